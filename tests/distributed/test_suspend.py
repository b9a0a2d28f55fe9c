"""A suspended job continues: all of its processes are stopped for longer than --timeout, as Slurm's suspend and
docker pause do."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.run import checkpoint
from tests.distributed.faults import install, left_behind, start
from tests.distributed.ranks import paceline_on_ranks

SECONDS = 90.0
TIMEOUT = 3.0
SUSPENDED = 4.5
ARGV = ["train", "faulty", "--gpu-ids", "none", "--timeout", f"{TIMEOUT:g}", "--max-iterations", "200"]
ARGV += ["--checkpoint-every", "100", "--logger", "none"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


def send(run: Path, number: signal.Signals, order: random.Random) -> None:
    """Send a signal to all processes of a run, including the launcher, in any order."""
    pids = list(left_behind(str(run)))
    for pid in order.sample(pids, len(pids)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def tensors(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    parts = state.items() if isinstance(state, dict) else ()
    return {name: leaf for key, part in parts for name, leaf in tensors(part, f"{prefix}/{key}").items()}


def test_a_job_that_is_suspended_for_longer_than_the_timeout_continues_bit_by_bit(site: Path, tmp_path: Path):
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    rank = [*ARGV, "--run-dir", str(undisturbed)], {"PYTHONPATH": str(site)}
    assert [done.returncode for done in paceline_on_ranks(tmp_path, rank, rank)] == [0, 0]
    process = start(tmp_path, site, *ARGV, "--ranks", "2", "--run-dir", str(run))
    moments = random.Random(1)
    try:
        deadline = time.monotonic() + SECONDS
        while not (run / "workers" / "rank_1.log").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for _ in range(3):
            time.sleep(moments.uniform(0.2, 0.7))
            assert process.poll() is None, process.communicate()[1]
            send(run, signal.SIGSTOP, moments)
            time.sleep(SUSPENDED)
            send(run, signal.SIGCONT, moments)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        send(run, signal.SIGKILL, moments)
    assert process.returncode == 0, errors
    found, expected = (tensors(checkpoint.load(checkpoint.newest(path / "checkpoints"))) for path in (run, undisturbed))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
