"""Inputs, outputs and checkpoints of tasks on an S3 server, and credentials."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.run.storage import Folder
from tests.forked import paceline
from tests.launch.workflows import launch, log, marked, result, start, states, task, wait_for, workflow
from tests.run.s3 import BUCKET, SECRET, S3Server, s3_server

TOKEN = "also-not-to-be-found-in-any-file"
CREDENTIALS = "credentials: {s3: {AWS_SECRET_ACCESS_KEY: key}, my-token: /tmp/secret}"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def wait_then(script: str, go: Path) -> str:
    """Return a script that waits for a file before its last part."""
    return f"{script}; until [ -e {go} ]; do sleep 0.05; done; "


def test_data_is_transferred_while_a_task_runs_and_credentials_are_written_nowhere(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    url, go = f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "go"
    Folder(f"{url}/in").write("sub/given", b"given")
    train = [
        "cp {{input:0}}/sub/given checkpoints/first; echo log >checkpoints/log",
        "sha256sum /tmp/secret/my-token >{{output}}/sum; stat -c %a /tmp/secret/my-token >{{output}}/mode",
    ]
    script = wait_then("mkdir checkpoints; " + "; ".join(train), go) + "mv checkpoints/log checkpoints/last"
    (tmp_path / "file.yaml").write_text(
        workflow(
            task(
                "train",
                script,
                CREDENTIALS,
                f"inputs: [{{url: {url}/in}}, {{url: {url}/nothing}}]",
                f"outputs: [{{url: '{url}/out/{{{{workflow_id}}}}'}}]",
                f"checkpoint: [{{path: checkpoints, url: {url}/checkpoints, frequency: 1s, regex: .*st$}}]",
            ),
            task("next", "cat {{input:1}}/mode", f"inputs: [{{task: train}}, {{url: {url}/out/test-1}}]"),
        )
    )
    process = start(tmp_path, "launch", "file.yaml")
    checkpoints = Folder(f"{url}/checkpoints")
    try:
        wait_for(lambda: checkpoints.read("first") == b"given")
        commands = [" ".join(each.cmdline()) for each in (*marked(tmp_path), psutil.Process(process.pid))]
        runners = [each for each in marked(tmp_path) if "paceline.launch.task_runner" in each.cmdline()]
        priorities = [os.getpriority(os.PRIO_PROCESS, thread.id) for thread in runners[0].threads()]
        secret_files = list(tmp_path.glob("jobs/test-1/train/secrets/*/*"))
        go.touch()
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    assert states(tmp_path) == {"train": ("completed", 0), "next": ("completed", 0)}
    assert checkpoints.listing() == ["first", "last"]
    assert log(tmp_path, "next") == "600\n"
    assert "nothing has no files, the directory of the input is empty" in log(tmp_path, "train")
    assert len(secret_files) == 1
    # A thread looks for files, and threads of the library of S3 transfer them.
    assert priorities.count(19) >= 2
    assert min(priorities) == os.getpriority(os.PRIO_PROCESS, 0)
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 8
    for secret in (SECRET, TOKEN):
        assert not any(secret in text for text in (*written, *commands, output))


def test_a_specification_of_another_version_is_refused_without_printing_credentials():
    line = json.dumps({"variables": {"TOKEN": SECRET}, "secrets": {"my-token": TOKEN}})
    command = [sys.executable, "-m", "paceline.launch.task_runner", "run"]
    done = subprocess.run(command, input=line, capture_output=True, text=True, check=False)
    assert "workflow_id" in done.stderr
    assert (done.returncode, SECRET in done.stderr, TOKEN in done.stderr) == (1, False, False)


def test_an_upload_that_fails_is_repeated_and_then_fails_the_task(tmp_path: Path):
    go, url = tmp_path / "go", f"s3://{BUCKET}/{tmp_path.name}"
    script = wait_then("mkdir checkpoints; echo 1 >checkpoints/first", go) + "echo 2 >checkpoints/second"
    lost = task("lost", script, f"checkpoint: [{{path: checkpoints, url: {url}, frequency: 1s}}]")
    missing = task("missing", "touch {{output}}/x", "outputs: [{url: s3://missing/out}]")
    (tmp_path / "file.yaml").write_text(workflow(lost, missing, task("after", "true", "inputs: [{task: lost}]")))
    with s3_server() as server:
        process = start(tmp_path, "launch", "file.yaml")
        try:
            wait_for(lambda: Folder(url).listing() == ["first"])
            server.stop()
            go.touch()
            output, _ = process.communicate(timeout=90)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 1, output
    assert states(tmp_path) == {"lost": ("failed", None), "missing": ("failed", None), "after": ("skipped", None)}
    reasons = {name: found["reason"] for name, found in result(tmp_path)["tasks"].items()}
    directory = tmp_path / "jobs" / "test-1"
    assert f"its checkpoint cannot be uploaded: cannot upload {url}/second" in reasons["lost"]
    assert (directory / "lost" / "work" / "checkpoints" / "second").read_text() == "2\n"
    assert "its output cannot be stored: cannot upload s3://missing/out/x" in reasons["missing"]
    assert f"it is kept in {directory}/missing/output" in reasons["missing"]
    assert (directory / "missing" / "output" / "x").exists()


def test_a_dry_run_checks_the_file_and_not_the_host(tmp_path: Path):
    text = workflow(
        task(
            "one",
            "cat /tmp/secret/my-token; train --to {{output}}",
            "credentials: {s3: {UNSET_SECRET: key}, my-token: /tmp/secret}",
            "files: [{path: train, localpath: nothing}]",
            "inputs: [{url: s3://bucket/in}]",
            "outputs: [{url: 's3://bucket/{{workflow_id}}'}]",
            "checkpoint: [{path: '{{output}}', url: gs://bucket/x, frequency: 10m}]",
        ),
        head="  pool: cluster\n  resources: {default: {cpu: 9999, gpu: 99, memory: 99Ti, platform: dgx}}\n",
    )
    (tmp_path / "profile.yaml").write_text("environment: /nothing\n")
    done = launch(text, tmp_path, "--dry-run", "--profile", "profile.yaml")
    assert done.returncode == 0, done.stderr
    assert "/jobs/test-1/one/secrets/my-token/my-token" in done.stdout


def test_a_task_whose_coordinator_is_killed_ends(tmp_path: Path):
    (tmp_path / "file.yaml").write_text(workflow(task("one", "setsid sleep 1000 & touch {{output}}/up; wait")))
    process = start(tmp_path, "launch", "file.yaml")
    try:
        wait_for(lambda: list(tmp_path.glob("jobs/test-1/*/output/up")))
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not marked(tmp_path))
    status = paceline("status", "test-1", cwd=tmp_path)
    assert "test-1 on local: lost; the process that ran it was killed" in status.stdout
