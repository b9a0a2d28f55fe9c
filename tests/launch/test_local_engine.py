"""Workflows on this machine, with real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.distributed.ranks import free_port
from tests.forked import paceline
from tests.launch.workflows import SECONDS, group, launch, log, marked, result, start, states, task, wait_for, workflow

WORKFLOWS = Path(__file__).parents[2] / "workflows"
SMALL = "train_options=--num-envs 6 --ppo.horizon 8 --ppo.hidden 8 --logger none --checkpoint-every 5"


def test_a_task_reads_the_output_of_another_and_its_output_is_copied(tmp_path: Path):
    (tmp_path / "data.txt").write_text("given")
    script = "cat data /tmp/in.txt >{{output}}/a.txt; echo {{workflow_id}} $VALUE {{host:first}}; echo no >{{output}}/b"
    text = workflow(
        task("second", "cat {{input:0}}/a.txt {{input:first}}/b {{input:1}}/data.txt", "inputs:", "- task: first")
        + f"    - url: file://{tmp_path}/data.txt\n",
        task(
            "first",
            script,
            "environment: {VALUE: '{{output}}'}",
            "files:",
            "- {path: data, localpath: data.txt}",
            "- {path: /tmp/in.txt, contents: 'at /tmp/in.txt\n'}".replace("\n", "\\n").replace("'", '"'),
            "outputs:",
            f"- {{url: 'file://{tmp_path}/stored/{{{{workflow_id}}}}', regex: '.*txt'}}",
        ),
    )
    done = launch(text, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(tmp_path) == {"second": ("completed", 0), "first": ("completed", 0)}
    directory = tmp_path / "jobs" / "test-1" / "first"
    assert log(tmp_path, "first") == f"test-1 {directory}/output 127.0.0.1\n"
    assert log(tmp_path, "second") == f"givenat {directory}/files/tmp/in.txt\nno\ngiven"
    stored = tmp_path / "stored" / "test-1"
    assert [file.name for file in stored.iterdir()] == ["a.txt"]
    assert "image image is not used" in done.stdout


def test_datasets_are_versioned_folders(tmp_path: Path):
    output = "outputs: [{update_dataset: {name: numbers}}]"
    tasks = [task(name, f"echo $RANDOM >{{{{output}}}}/{name}", output) for name in ("x", "y")]
    assert launch(workflow(tasks[0]), tmp_path).returncode == 0
    assert launch(workflow(*tasks), tmp_path).returncode == 0
    versions = tmp_path / "datasets" / "numbers"
    assert sorted(place.name for place in versions.iterdir()) == ["1", "2", "3"]
    assert (versions / "3" / "x").is_file()
    read = [
        task("newest", "cat {{input:0}}/numbers/x", "inputs:", "- dataset: {name: 'numbers:latest'}"),
        task("older", "cat {{input:0}}/numbers/x", "inputs:", "- dataset: {name: 'numbers:1'}"),
    ]
    assert launch(workflow(*read), tmp_path).returncode == 0
    for name, version in (("newest", "3"), ("older", "1")):
        assert (tmp_path / "jobs" / "test-3" / f"{name}.log").read_text() == (versions / version / "x").read_text()


def test_a_task_reads_the_output_of_an_earlier_job(tmp_path: Path):
    assert launch(workflow(task("write", "echo given >{{output}}/x")), tmp_path).returncode == 0
    read = task("read", "cat {{input:0}}/x {{input:write}}/x", "inputs:", "- task: test-1:write")
    assert launch(workflow(read), tmp_path).returncode == 0
    assert (tmp_path / "jobs" / "test-2" / "read.log").read_text() == "given\ngiven\n"


def test_a_token_without_a_value_is_a_warning_of_a_dry_run_and_refused_otherwise(tmp_path: Path):
    text = workflow(task("one", "echo {{host:other}}"))
    dry = launch(text, tmp_path, "--dry-run")
    assert (dry.returncode, "echo {{host:other}}" in dry.stdout) == (0, True)
    assert "file.yaml:10: task one: {{host:other}}: unknown task" in dry.stderr
    done = launch(text, tmp_path)
    assert (done.returncode, "file.yaml:10: task one: {{host:other}}" in done.stderr) == (2, True)


def test_a_failed_task_is_reported_and_what_needs_it_is_skipped(tmp_path: Path):
    after = task("after", "true", "inputs:", "- task: bad")
    done = launch(workflow(task("bad", "echo the cause; exit 3"), after, task("other", "true")), tmp_path)
    assert done.returncode == 1
    assert states(tmp_path) == {"bad": ("failed", 3), "after": ("skipped", None), "other": ("completed", 0)}
    assert "bad failed: exit code 3" in done.stdout
    assert "last line: the cause" in done.stdout


def test_an_output_that_cannot_be_stored_fails_the_task(tmp_path: Path):
    (tmp_path / "file").write_text("")
    bad = task("bad", "touch {{output}}/x", "outputs:", f"- url: file://{tmp_path}/file/folder")
    done = launch(workflow(bad), tmp_path)
    assert done.returncode == 1
    assert "its output cannot be stored" in result(tmp_path)["tasks"]["bad"]["reason"]
    assert (tmp_path / "jobs" / "test-1" / "bad" / "output" / "x").exists()


def test_a_disk_that_is_full_is_an_error_without_a_traceback(tmp_path: Path):
    (tmp_path / "file.yaml").write_text(workflow(task("one", "true")))
    command = f"ulimit -f 0; {sys.executable} -m paceline launch file.yaml"
    environment = os.environ | {"XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "cannot write the files of the job: [Errno 27]" in done.stderr
    assert f"free space in {tmp_path}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_result_that_cannot_be_written_does_not_change_the_exit_code(tmp_path: Path):
    done = launch(workflow(task("one", "mkdir ../../result.json")), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "result.json cannot be written: [Errno 21]" in done.stdout


def test_a_program_that_does_not_exist_fails_the_task(tmp_path: Path):
    text = workflow("  - {name: bad, image: i, command: [no-such-program]}\n")
    done = launch(text, tmp_path)
    assert done.returncode == 1
    assert states(tmp_path) == {"bad": ("failed", 127)}
    assert "cannot start no-such-program" in done.stdout


def test_the_end_of_the_lead_ends_its_group(tmp_path: Path):
    # The child of the worker has started another session and ignores SIGTERM.
    stubborn = "trap '' TERM; setsid bash -c 'trap \"\" TERM; touch {{output}}/up; sleep 1000' & wait"
    up = tmp_path / "jobs" / "test-1" / "worker" / "output" / "up"
    lead = task("lead", f"until [ -e {up} ]; do sleep 0.05; done", "lead: true")
    (tmp_path / "profile.yaml").write_text("local: {grace_seconds: 0.5}\n")
    done = launch(group(lead, task("worker", stubborn)), tmp_path, "--profile", "profile.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: state for name, (state, _) in states(tmp_path).items()} == {"lead": "completed", "worker": "stopped"}
    assert not marked(tmp_path)


@pytest.mark.parametrize("ignored", [True, False])
def test_a_failed_worker_fails_the_group_only_if_the_file_says_so(ignored: bool, tmp_path: Path):
    failed = tmp_path / "failed"
    tasks = (
        task("lead", f"until [ -e {failed} ]; do sleep 0.05; done; sleep 1", "lead: true"),
        task("worker", f"touch {failed}; exit 5"),
    )
    done = launch(group(*tasks, keys="" if ignored else "    ignoreNonleadStatus: false\n"), tmp_path)
    assert done.returncode == (0 if ignored else 1)
    assert states(tmp_path) == {"lead": ("completed", 0) if ignored else ("stopped", 143), "worker": ("failed", 5)}


@pytest.mark.parametrize("barrier", [True, False])
def test_with_a_barrier_no_task_starts_before_the_files_of_all_are_ready(barrier: bool, tmp_path: Path):
    bad = task("worker", "true", "files: [{path: a, contents: b}, {path: a/c, contents: d}]")
    # The end of the lead would stop the preparation of the other task.
    lead = task("lead", "echo start; until grep -q failed ../../job.json; do sleep 0.05; done", "lead: true")
    done = launch(group(lead, bad, keys="" if barrier else "    barrier: false\n"), tmp_path)
    assert done.returncode == (1 if barrier else 0)
    assert states(tmp_path)["worker"] == ("failed", None)
    assert "cannot prepare its files: " in result(tmp_path)["tasks"]["worker"]["reason"]
    assert "start" not in log(tmp_path, "lead") if barrier else log(tmp_path, "lead") == "start\n"


def test_a_killed_worker_is_started_again_alone(tmp_path: Path):
    again = tmp_path / "again"
    worker = f"if [ -e {again} ]; then touch {tmp_path}/done; sleep 1000; fi; touch {again}; kill -9 $$"
    lead = f"echo start; until [ -e {tmp_path}/done ]; do sleep 0.05; done"
    done = launch(
        group(task("lead", lead, "lead: true"), task("worker", worker, "exitActions: {RESCHEDULE: 137}")), tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: found["restarts"] for name, found in result(tmp_path)["tasks"].items()} == {"lead": 0, "worker": 1}
    assert log(tmp_path, "lead") == "start\n"


def test_a_lead_that_is_started_again_restarts_its_group_and_keeps_its_output(tmp_path: Path):
    up = tmp_path / "up"
    lead = f"until [ -e {up} ]; do sleep 0.05; done; rm {up}; [ ! -e {{{{output}}}}/once ] || exit 7"
    lead = f"{lead}; touch {{{{output}}}}/once; exit 4"
    worker = task("worker", f"echo start; touch {up}; sleep 1000")
    done = launch(
        group(task("lead", lead, "lead: true", "exitActions: {RESCHEDULE: 4, COMPLETE: 7}"), worker), tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(tmp_path)["lead"] == ("completed", 7)
    assert result(tmp_path)["tasks"]["lead"]["restarts"] == 1
    assert log(tmp_path, "worker") == "start\nstart\n"


def test_a_task_is_not_started_again_without_end(tmp_path: Path):
    (tmp_path / "profile.yaml").write_text("local: {max_reschedules: 2}\n")
    text = workflow(task("bad", "echo start; exit 1", "exitActions: {RESCHEDULE: 1-255}"))
    done = launch(text, tmp_path, "--profile", "profile.yaml")
    assert done.returncode == 1
    assert log(tmp_path, "bad") == "start\n" * 3
    assert "local.max_reschedules" in done.stdout


def test_a_workflow_ends_at_its_timeout(tmp_path: Path):
    text = workflow(task("slow", "sleep 1000"), head="  timeout: {exec_timeout: 1s}\n")
    done = launch(text, tmp_path)
    assert done.returncode == 1
    assert "slow stopped: exec_timeout of 1 s" in done.stdout
    assert states(tmp_path) == {"slow": ("stopped", 143)}
    assert result(tmp_path)["status"] == "failed"


REFUSED = {
    "CPUs": ("", "  resources: {default: {cpu: 1e5}}\n", ["1e+05 CPUs", "--oversubscribe"]),
    "GPUs": ("", "  resources: {default: {gpu: 1000}}\n", ["1000 GPUs", "--oversubscribe"]),
    "memory": ("", "  resources: {default: {memory: 1000Ti}}\n", ["GiB of memory", "--oversubscribe"]),
    "a URL of another kind": ("outputs: [{url: 'ftp://host/x'}]", "", ["outputs: unknown URL scheme 'ftp'"]),
    "a secret in a URL": ("inputs: [{url: 's3://a:b@c/x'}]", "", ["inputs: a s3:// URL contains credentials"]),
    "a URL that is none": (
        "checkpoint: [{path: a, url: 's3://[', frequency: 1m}]",
        "",
        ["checkpoint: a URL is invalid"],
    ),
    "nodes": ("", "  resources: {default: {nodesExcluded: [a]}}\n", ["does not support nodesExcluded"]),
    "topology": ("", "  resources: {default: {topology: [{key: a}]}}\n", ["does not support topology"]),
    "mounts": ("volumeMounts: [/a]", "", ["does not support volumeMounts"]),
    "privileges": ("privileged: true", "", ["does not support privileged"]),
    "a secret as a file that is not set": ("credentials: {my-key: /path}", "", ["environment variable MY_KEY"]),
    "a secret at a relative path": ("credentials: {key: path}", "", ["does not support credentials.key"]),
    "a secret that is not set": ("credentials: {key: {MY_SECRET: k}}", "", ["environment variable MY_SECRET"]),
    "a missing file": ("files: [{path: a, localpath: nothing}]", "", ["localpath nothing", "no such file"]),
    "a file outside of the directory": ("files: [{path: ../a, contents: b}]", "", ["../a", "must not contain .."]),
    "a version of an output": ("outputs: [{dataset: {name: 'a:1'}}]", "", ["dataset.name", "remove the version"]),
    "a dataset outside of its folder": ("outputs: [{dataset: {name: ../a}}]", "", ["dataset.name", "without .."]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_engine_cannot_do_is_refused_by_name(case: str, tmp_path: Path):
    line, head, messages = REFUSED[case]
    done = launch(workflow(task("one", "true", line), head=head), tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    for message in messages:
        assert message in done.stderr
    assert not (tmp_path / "jobs").exists()


def test_more_than_the_machine_has_runs_with_oversubscribe_and_what_is_not_used_is_reported(tmp_path: Path):
    head = "  pool: cluster\n  resources: {default: {cpu: 99999, gpu: 0, platform: dgx}}\n"
    text = workflow(task("one", "echo x$CUDA_VISIBLE_DEVICES", "cacheSize: 1Gi"), head=head)
    done = launch(text, tmp_path, "--oversubscribe")
    assert done.returncode == 0
    for line in (
        "image image is not used",
        "pool cluster is not used",
        "platform dgx is not used",
        "cacheSize are not used",
    ):
        assert line in done.stdout
    assert log(tmp_path, "one") == "x\n"


def test_a_dry_run_prints_the_workflow_and_the_commands_and_starts_nothing(tmp_path: Path):
    text = workflow(task("one", "echo {{ word }} {{output}}"), head="  resources: {default: {cpu: 99999}}\n")
    done = launch(
        text + "default-values: {word: hello}\n", tmp_path, "--dry-run", "--set", "word=a", "--set", "word=hi"
    )
    assert done.returncode == 0, done.stderr
    assert "        echo hi {{output}}\n" in done.stdout
    assert f"bash -euc 'echo hi {tmp_path}/jobs/test-1/one/output\n'" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["file.yaml"]


def test_the_files_of_paceline_are_copied_once(tmp_path: Path):
    done = paceline("launch", "--copy", "train_policy.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "train_policy.yaml").read_text() == (WORKFLOWS / "train_policy.yaml").read_text()
    again = paceline("launch", "--copy", "train_policy.yaml", cwd=tmp_path)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    other = paceline("launch", "--copy", "train_polici.yaml", cwd=tmp_path)
    assert (other.returncode, "did you mean 'train_policy.yaml'" in other.stderr) == (2, True)


def test_ctrl_c_ends_all_tasks_and_leaves_nothing(tmp_path: Path):
    script = "setsid sleep 1000 & sleep 1000 & touch {{output}}/up; wait"
    (tmp_path / "file.yaml").write_text(
        workflow(task("one", script), task("two", script, "inputs:", "- task: one"), task("three", script))
    )
    process = start(tmp_path, "launch", "file.yaml")
    try:
        wait_for(lambda: len(list(tmp_path.glob("jobs/test-1/*/output/up"))) == 2)
        # The task runner and three processes of each task.
        assert len(marked(tmp_path)) == 8
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, output
    assert states(tmp_path) == {"one": ("stopped", 143), "two": ("skipped", None), "three": ("stopped", 143)}
    assert result(tmp_path)["status"] == "interrupted"
    assert not marked(tmp_path)


def train(name: str, *values: str, options: str = "") -> list[str]:
    """Return the arguments that run a workflow of Paceline on CPUs. `values` replace the default values."""
    fixed = ("num_gpu=0", "max_restarts=3", "memory=1Gi")
    file = str(WORKFLOWS / f"{name}.yaml")
    return ["launch", file, "--oversubscribe", "--set", *fixed, *values, "--set-string", SMALL + options]


def test_a_second_ctrl_c_kills_all_tasks_at_once(tmp_path: Path):
    script = "trap '' TERM; touch {{output}}/up; while true; do sleep 1; done"
    (tmp_path / "file.yaml").write_text(workflow(task("one", script), task("two", script)))
    (tmp_path / "profile.yaml").write_text("local: {grace_seconds: 3600}\n")
    process = start(tmp_path, "launch", "file.yaml", "--profile", "profile.yaml")
    printed = process.stdout
    assert printed
    try:
        wait_for(lambda: len(list(tmp_path.glob("jobs/test-1/*/output/up"))) == 2)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "Press Ctrl-C again" in printed.readline())
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, output
    assert not marked(tmp_path)
    status = paceline("status", "test-1", cwd=tmp_path)
    assert "test-1 on local: interrupted" in status.stdout


def test_a_policy_is_trained_and_exported_although_the_port_of_tensorboard_is_used(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as used:
        values = ("max_iterations=3", f"tensorboard_port={used.getsockname()[1]}")
        done = paceline(*train("train_then_export", *values), cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    job = tmp_path / "jobs" / "train-then-export-1"
    assert (job / "export" / "output" / "policy.pt").stat().st_size > 0


def test_a_policy_is_trained_and_evaluated(tmp_path: Path):
    argv = train("train_then_evaluate", "max_iterations=1", "tensorboard_port=0", "episodes=2")
    done = paceline(*argv, cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "jobs" / "train-then-evaluate-1" / "evaluate" / "output" / "run" / "eval").glob("*.json")
    assert json.loads(file.read_text())["iteration"] == 1


def test_runs_of_a_scaling_experiment_are_compared(tmp_path: Path):
    values = ("max_iterations=2", "ranks_per_node=1", f"port={free_port()}", "num_envs=6")
    done = paceline(*train("scaling", *values), cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    output = tmp_path / "jobs" / "scaling-1" / "report" / "output"
    assert "2 ranks" in (output / "report.html").read_text()


def test_a_policy_is_trained_on_images(tmp_path: Path):
    encoder = " --ppo.image-channels 4 8 --ppo.image-kernels 4 3 --ppo.image-strides 2 2 --ppo.image-features 16"
    values = ("width=24", "height=16", "max_iterations=1", "tensorboard_port=0", f"port={free_port()}")
    argv = train("train_cameras", *values, options=encoder)
    done = paceline(*argv, cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "jobs" / "train-cameras-1" / "master" / "output" / "run"
    assert json.loads((run / "result.json").read_text())["iterations"] == 1


def test_a_new_job_continues_the_run_at_the_url_of_a_cancelled_one(tmp_path: Path):
    mirror, port = tmp_path / "mirror", free_port()
    values = ("max_iterations=1000000", f"checkpoint_url=file://{mirror}", f"tensorboard_port={port}")
    argv = train("train_one_node", *values, options=" --logger tensorboard")
    iterations = list[int]()
    for job in ("train-one-node-1", "train-one-node-2"):
        known = set(mirror.glob("checkpoints/iteration_*"))
        process = start(tmp_path, *argv)
        try:
            wait_for(lambda known=known: set(mirror.glob("checkpoints/iteration_*.safetensors")) - known)
            wait_for(lambda: answers(port))
            cancelled = paceline("cancel", job, cwd=tmp_path)
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.communicate()
        assert (cancelled.returncode, process.returncode) == (0, 130), output
        assert not answers(port)
        assert not marked(tmp_path)
        trained = json.loads((mirror / "result.json").read_text())
        assert trained["status"] == "interrupted"
        iterations.append(trained["iterations"])
    assert iterations[0] < iterations[1]
    assert trained["restarts"] == 1
    assert len(list(mirror.glob("tensorboard/events.*"))) == 2


def answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}") as page:
            return b"TensorBoard" in page.read()
    except OSError:
        return False


def test_training_on_two_nodes_continues_after_a_worker_and_the_lead_were_killed(tmp_path: Path):
    values = ("num_nodes=2", "max_iterations=60", f"port={free_port()}", "tensorboard_port=0")
    process = start(tmp_path, *train("train_policy", *values))
    run = tmp_path / "jobs" / "train-policy-1" / "master" / "output" / "run"
    try:
        for name in ("worker-1", "master"):
            before = set(run.glob("checkpoints/*.safetensors"))
            wait_for(lambda before=before: set(run.glob("checkpoints/iteration_*.safetensors")) - before)
            kill_agent(tmp_path, name)
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    tasks = result(tmp_path, "train-policy-1")["tasks"]
    assert {name: (found["state"], found["restarts"]) for name, found in tasks.items()} == {
        "master": ("completed", 1),
        "worker-1": ("completed", 1),
    }
    trained = json.loads((run / "result.json").read_text())
    assert (trained["status"], trained["iterations"], trained["world_size"]) == ("completed", 60, 2)
    assert not marked(tmp_path)


def kill_agent(folder: Path, task: str) -> None:
    agents = [each for each in marked(folder, f"/{task}") if "torch.distributed.run" in each.cmdline()]
    assert len(agents) == 1
    agents[0].kill()
