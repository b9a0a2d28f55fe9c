"""Workflows on a real Slurm: `paceline launch --on slurm`."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.launch.job_record import JobRecord, read_record
from paceline.run import checkpoint
from tests.launch.slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = pytest.mark.root

WORKFLOWS = Path(__file__).parents[2] / "workflows"
SECONDS = 120.0
ITERATIONS = 30
SMALL = "train_options=--num-envs 8 --checkpoint-every 10 --timeout 5 --ppo.hidden 16 16 --logger none"
SECRET = "value-of-the-credential"

# The worker is started again until it fails. The lead waits for that, and is started again by a requeue.
RESCHEDULE = """\
workflow:
  name: reschedule
  groups:
  - name: first
    tasks:
    - name: master
      lead: true
      image: image
      command: [bash, -euc, "until [ -e {{output}}/../../worker/output/2 ]; do sleep 0.1; done; cat given.txt; exit 3"]
      exitActions: {RESCHEDULE: "3"}
      files: [{path: given.txt, localpath: local.txt}]
    - name: worker
      image: image
      command: [bash, -euc, "cd {{output}}; echo $TOKEN | md5sum; [ ! -e 1 ] || touch 2; touch 1; exit 3"]
      exitActions: {RESCHEDULE: "3"}
      credentials: {storage: {TOKEN: token}}
  - name: second
    tasks:
    - {name: after, image: image, command: ["true"], inputs: [{task: master}]}
"""
# The second start completes.
LIMITED = """\
workflow:
  name: limited
  tasks:
  - name: task
    image: image
    command: [bash, -euc]
    args:
    - |
      if [ -e {{output}}/saved ]; then exit 0; fi
      trap 'touch {{output}}/saved; exit 1' TERM
      sleep 60 & wait
"""


@dataclass(frozen=True)
class Launch:
    """A workflow launched with `--follow`. Its storage root is `folder`."""

    cluster: SlurmCluster
    folder: Path
    job_id: str
    process: subprocess.Popen[bytes]

    @property
    def directory(self) -> Path:
        return self.folder / "jobs" / self.job_id

    def record(self) -> JobRecord:
        return read_record(self.directory)

    def wait(self) -> int:
        """Wait for the end of the command and return its exit code."""
        self.cluster.wait(lambda: self.process.poll() is not None, SECONDS)
        return self.process.returncode

    def printed(self) -> str:
        return (self.folder / "printed.log").read_text()

    def command(self, name: str) -> str:
        """Run a command of `paceline` about the job and return its output."""
        argv = [self.job_id, "--profile", str(self.folder / "profile.yaml")]
        return self.cluster.call("env", "COLUMNS=200", sys.executable, "-m", "paceline", name, *argv)

    def slurm_job(self, group: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        return self.cluster.job(self.record().handles[group])

    @property
    def run(self) -> Path:
        """Run directory of train_policy.yaml."""
        return self.directory / "master" / "output" / "run"

    def result(self) -> dict[str, Any]:
        return json.loads((self.run / "result.json").read_text())

    def has_checkpoint(self) -> bool:
        return bool(checkpoint.listing(self.run / "checkpoints"))

    def learner(self) -> dict[str, Any]:
        """Return the state of the learner in the newest checkpoint."""
        return checkpoint.load(checkpoint.newest(self.run / "checkpoints"))["learner"]

    def log(self) -> str:
        return (self.directory / "master.log").read_text()


def launch(
    cluster: SlurmCluster, folder: Path, file: Path, *argv: str, settings: str = "", **environment: str
) -> Launch:
    (folder / "profile.yaml").write_text(f"storage_root: {folder}\nslurm: {{grace_seconds: 20, {settings}}}\n")
    command = ["launch", str(file), "--on", "slurm", "--follow", "--profile", str(folder / "profile.yaml"), *argv]
    variables = cluster.environment | environment | {"COLUMNS": "200"}
    output = folder / "printed.log"
    process = cluster.controller.start(sys.executable, "-m", "paceline", *command, output=output, **variables)
    job_id = f"{file.stem.replace('_', '-')}-1"
    return Launch(cluster, folder, job_id, process)


def train(cluster: SlurmCluster, folder: Path, *values: str) -> Launch:
    file, small = WORKFLOWS / "train_policy.yaml", ["--set-string", SMALL]
    values = ("num_nodes=2", "num_gpu=0", f"max_iterations={ITERATIONS}", "tensorboard_port=0", *values)
    return launch(cluster, folder, file, "--set", *values, *small)


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """A cluster without jobs. Afterwards, links are restored and jobs are canceled, also if the test failed."""
    yield running_cluster
    for node in running_cluster.nodes:
        node.reconnect()
    running_cluster.call("scancel", "--user=root")
    running_cluster.wait_until_idle()
    running_cluster.wait(lambda: not running_cluster.job_processes(), 30.0)


@pytest.fixture(scope="module")
def launches(running_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    """Launches that nothing disturbs, which have ended. They run at the same time."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("train", "export", "reschedule", "limited")}
    found = {"train": train(running_cluster, folders["train"])}
    running_cluster.wait(lambda: "mixed" in running_cluster.node_states(), SECONDS)
    values = ["--set", "num_gpu=0", "max_iterations=2", "tensorboard_port=0", "--set-string", SMALL]
    found["export"] = launch(running_cluster, folders["export"], WORKFLOWS / "train_then_export.yaml", *values)
    for name, text in (("reschedule", RESCHEDULE), ("limited", LIMITED)):
        (folders[name] / f"{name}.yaml").write_text(text)
        (folders[name] / "local.txt").write_text("content of a local file\n")
        settings = "max_reschedules: 1" if name == "reschedule" else "time: 60s, signal_seconds: 55"
        file = folders[name] / f"{name}.yaml"
        found[name] = launch(running_cluster, folders[name], file, settings=settings, TOKEN=SECRET)
    for launched in found.values():
        launched.wait()
    return found


@pytest.fixture
def undisturbed(launches: dict[str, Launch]) -> Launch:
    return launches["train"]


def assert_equal_tensors(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_equal_tensors(actual[name], expected[name])
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


def test_two_nodes_train_as_one_job(undisturbed: Launch):
    assert undisturbed.wait() == 0, undisturbed.printed()
    found = undisturbed.result()
    assert (found["status"], found["world_size"], found["iterations"]) == ("completed", 2, ITERATIONS)
    for line in (
        "master   |   rank 0 on node1",
        "master   |   rank 1 on node2",
        "training, Slurm job 1: RUNNING node[1-2]",
    ):
        assert line in undisturbed.printed()
    _, master, worker = undisturbed.command("status").splitlines()
    assert master.split()[:7] == ["master", "(lead)", "1", "COMPLETED", "node1", "completed", "0"]
    assert worker.split()[:6] == ["worker-1", "1", "COMPLETED", "node2", "completed", "0"]
    assert "rank 1 on node2" in undisturbed.command("logs")


def test_a_job_starts_after_the_one_whose_output_it_needs(launches: dict[str, Launch]):
    exported = launches["export"]
    assert exported.wait() == 0, exported.printed()
    assert (exported.directory / "export" / "output" / "policy.pt").stat().st_size > 0


def test_the_lead_is_started_again_by_a_bounded_number_of_requeues_and_a_worker_by_a_new_step(
    launches: dict[str, Launch],
):
    rescheduled = launches["reschedule"]
    assert rescheduled.wait() == 1, rescheduled.printed()
    first, second = rescheduled.slurm_job("first"), rescheduled.slurm_job("second")
    assert (first["JobState"], first["Restarts"], second["JobState"]) == ("FAILED", "1", "CANCELLED")
    assert (rescheduled.directory / "master.log").read_text() == "content of a local file\n" * 2
    status = rescheduled.command("status")
    assert "after 1 restart (slurm.max_reschedules)" in status


def test_credentials_reach_the_tasks_and_no_file(launches: dict[str, Launch]):
    rescheduled = launches["reschedule"]
    digest = hashlib.md5(f"{SECRET}\n".encode()).hexdigest()
    assert digest in (rescheduled.directory / "worker.log").read_text()
    assert not any(SECRET in path.read_text() for path in rescheduled.folder.rglob("*") if path.is_file())


def test_a_job_is_requeued_before_its_time_limit(launches: dict[str, Launch]):
    limited = launches["limited"]
    assert limited.wait() == 0, limited.printed()
    assert limited.slurm_job("task")["Restarts"] == "1"
    assert "Requeue: the time limit is near." in (limited.directory / "task.slurm.log").read_text()


def test_ctrl_c_during_the_submission_cancels_what_was_submitted(cluster: SlurmCluster, tmp_path: Path):
    (tmp_path / "reschedule.yaml").write_text(RESCHEDULE)
    (tmp_path / "local.txt").touch()
    slow = tmp_path / "sbatch"
    slow.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@" && touch {tmp_path}/submitted && sleep 2\n')
    slow.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    launched = launch(cluster, tmp_path, tmp_path / "reschedule.yaml", TOKEN=SECRET, PATH=path)
    cluster.wait((tmp_path / "submitted").exists, SECONDS)
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait() == 130, launched.printed()
    assert launched.record().handles.keys() == {"first"}
    cluster.wait(lambda: launched.slurm_job("first")["JobState"] == "CANCELLED", SECONDS)


def test_a_job_that_loses_a_node_is_requeued_on_others_with_the_result_of_an_undisturbed_run(
    cluster: SlurmCluster, undisturbed: Launch, tmp_path: Path
):
    training = train(cluster, tmp_path)
    cluster.wait(training.has_checkpoint, SECONDS)
    cluster.node("node2").cut()
    cluster.wait(lambda: training.slurm_job("training")["Restarts"] == "1", SECONDS)
    cluster.wait(lambda: training.slurm_job("training")["JobState"] == "RUNNING", SECONDS)
    # The agent of the first start still runs on node2, and finds the rendezvous again.
    cluster.node("node2").reconnect()
    assert training.wait() == 0, training.printed()
    assert training.slurm_job("training")["NodeList"] == "node[1,3]"
    assert (training.result()["restarts"], training.result()["requeues"]) == (1, 1)
    assert training.log().count("rank 1 on node2: ") == training.log().count("rank 1 on node3: ") == 1
    assert_equal_tensors(training.learner(), undisturbed.learner())


def test_a_preempted_job_continues_from_its_newest_iteration_and_a_canceled_one_leaves_no_process(
    cluster: SlurmCluster, tmp_path: Path
):
    training = train(cluster, tmp_path, "max_iterations=1000000", "tensorboard_port=6006")
    cluster.wait(training.has_checkpoint, SECONDS)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    cluster.submit("--partition=urgent", "--nodes=3", "--exclusive", f"--output={tmp_path / 'urgent.log'}", str(urgent))
    cluster.wait(lambda: training.slurm_job("training")["JobState"] == "PENDING", SECONDS)
    stopped = training.result()
    assert stopped["status"] == "interrupted"
    assert training.learner()["iteration"] == stopped["iterations"]
    cluster.wait(lambda: f"from iteration {stopped['iterations']}, restart 1" in training.log(), SECONDS)
    # The nodes have no sshd; the tests of the engine ssh open a tunnel.
    with pytest.raises(AssertionError, match=r"exit code 2: (?s:.)*cannot open a tunnel to port 6006 of node1"):
        training.command("tensorboard")

    assert "has ended" in training.command("cancel")
    assert training.slurm_job("training")["JobState"] == "CANCELLED"
    assert cluster.job_processes() == []
    assert training.wait() == 1
    assert training.result()["status"] == "interrupted"
    assert training.learner()["iteration"] == training.result()["iterations"] >= stopped["iterations"]
