"""`paceline train --mirror URL` and `--resume URL` in real processes, on a local disk and on an S3 server."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.run import checkpoint
from paceline.run.storage import Folder, download
from tests.forked import paceline
from tests.run.s3 import BUCKET, SECRET, S3Server, s3_server
from tests.signals import DEFAULT_SIGNALS

SMALL = ["--num-envs", "8", "--ppo.horizon", "8", "--ppo.hidden", "8"]
TRAIN = ["train", "cartpole", *SMALL, "--checkpoint-every", "2", "--keep-checkpoints", "2"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def _checkpoints(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in checkpoint.listing(folder / "checkpoints")}


def _learner_state(file: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of a checkpoint: networks, optimizer, normalizers and envs."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _popen(*argv: str, cwd: Path) -> subprocess.Popen[str]:
    command = [*DEFAULT_SIGNALS, sys.executable, "-m", "paceline", *argv]
    return subprocess.Popen(command, cwd=cwd, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


def test_a_run_resumed_from_a_bucket_is_bit_exact_and_writes_no_credentials(server: S3Server, tmp_path: Path):
    url = f"s3://{BUCKET}/run"
    undisturbed = paceline(*TRAIN, "--run-dir", "whole", "--max-iterations", "8", cwd=tmp_path)
    first = paceline(*TRAIN, "--run-dir", "first", "--max-iterations", "4", "--mirror", url, cwd=tmp_path)
    shutil.move(tmp_path / "first", tmp_path / "lost")
    resumed = ["train", "--resume", url, "--run-dir", "second", "--max-iterations", "8", "--mirror", url]
    second = paceline(*resumed, cwd=tmp_path)
    for process in (undisturbed, first, second):
        assert process.returncode == 0, process.stderr

    download(url, tmp_path / "stored")
    whole = _checkpoints(tmp_path / "whole")
    newest = max(whole)
    expected, stored = (_learner_state(tmp_path / run / "checkpoints" / newest) for run in ("whole", "stored"))
    assert sorted(whole) == sorted(_checkpoints(tmp_path / "stored"))
    assert expected == stored
    assert _checkpoints(tmp_path / "stored") == _checkpoints(tmp_path / "second")
    sums = (tmp_path / "stored/checkpoints/SHA256SUMS").read_text().splitlines()
    assert sums == [
        f"{hashlib.sha256(c).hexdigest()}  {n}" for n, c in sorted(_checkpoints(tmp_path / "stored").items())
    ]
    assert len(list((tmp_path / "stored/tensorboard").iterdir())) == 2
    assert json.loads((tmp_path / "stored/result.json").read_text())["iterations"] == 8

    output = "".join(process.stdout + process.stderr for process in (first, second))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    for secret in (SECRET, server.environment["AWS_ACCESS_KEY_ID"]):
        assert secret not in output
        assert [file for file in files if secret.encode() in file.read_bytes()] == []


def test_the_same_command_continues_from_the_mirror_after_the_directory_is_lost(tmp_path: Path):
    url = f"file://{tmp_path}/mirror"
    command = [*TRAIN, "--run-dir", "run", "--max-iterations", "4", "--mirror", url]
    assert paceline(*command, cwd=tmp_path).returncode == 0
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "mirror/result.json").unlink()
    again = paceline(*command, "--max-iterations", "4", cwd=tmp_path)
    assert "completed 4 iterations" in again.stderr

    other_settings = paceline(*command, "--seed", "1", "--run-dir", "other", cwd=tmp_path)
    assert other_settings.returncode == 2
    assert f"--mirror {url} holds a run with other settings (seed 0, now 1)" in other_settings.stderr
    assert not (tmp_path / "other").exists()


def test_the_mirror_of_another_run_is_not_overwritten(tiny_run: Path, tmp_path: Path):
    url = f"file://{tmp_path}/mirror"
    shutil.copytree(tiny_run, tmp_path / "run")
    shutil.copytree(tiny_run, tmp_path / "mirror")
    refused = paceline("train", "--resume", "run", "--max-iterations", "3", "--mirror", url, cwd=tmp_path)
    assert refused.returncode == 2
    assert f"{url} holds another run" in refused.stderr
    not_that_run = paceline("train", "--resume", url, "--run-dir", "run", "--max-iterations", "3", cwd=tmp_path)
    assert not_that_run.returncode == 2
    assert "run holds another run than" in not_that_run.stderr


@pytest.mark.parametrize("url", ["s3://missing/run", "file:///sys/paceline/run"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(url: str, server: S3Server, tmp_path: Path):
    refused = paceline(*TRAIN, "--run-dir", "run", "--mirror", url, cwd=tmp_path)
    assert refused.returncode == 2
    assert f"--mirror: cannot write {url}" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_stop_request_uploads_the_last_checkpoint(tmp_path: Path):
    mirror = tmp_path / "mirror"
    command = [*TRAIN, "--run-dir", "run", "--max-iterations", "1000000", "--mirror", f"file://{mirror}"]
    with _popen(*command, cwd=tmp_path) as run:
        _wait_for((mirror / "checkpoints/SHA256SUMS").exists)
        os.kill(run.pid, signal.SIGINT)
        run.communicate(timeout=60)
    assert run.returncode == 130
    assert _checkpoints(mirror) == _checkpoints(tmp_path / "run")
    assert json.loads((mirror / "result.json").read_text())["status"] == "interrupted"


def test_training_goes_on_without_the_server_and_the_run_then_fails_with_the_reason(server: S3Server, tmp_path: Path):
    # This test is the last one that uses the server.
    url = f"s3://{BUCKET}/without_server"
    command = [*TRAIN, "--run-dir", "run", "--max-iterations", "400", "--checkpoint-every", "100"]
    with _popen(*command, "--mirror", url, cwd=tmp_path) as run:
        _wait_for(lambda: Folder(url).read("run.yaml") is not None)
        server.stop()
        _, error = run.communicate(timeout=100)
    assert run.returncode == 1
    assert "the mirror is not complete: cannot" in error
    assert url in error
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "completed"
    assert checkpoint.newest(tmp_path / "run/checkpoints").stem == "iteration_00000400"

    repaired = paceline(*command, "--mirror", f"file://{tmp_path}/mirror", cwd=tmp_path)
    assert repaired.returncode == 0
    assert _checkpoints(tmp_path / "mirror") == _checkpoints(tmp_path / "run")
