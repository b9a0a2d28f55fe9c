"""Time limits of ranks count the time in which they run: real processes over gloo."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from paceline.distributed.failure import Failure
from paceline.distributed.group import Group
from paceline.distributed.rank import this_rank
from tests.distributed.ranks import on_ranks

LIMIT = 3.0
SUSPENDED = 4.5


def keep_waiting(late_rank: int, folder: Path) -> None:
    """One rank is alive but does not enter a collective in time."""
    rank = this_rank(())

    def write(failure: Failure) -> None:
        (folder / str(rank.index)).write_text(f"{failure}\n")

    group = Group(rank, timeout_seconds=60.0, on_failure=write, late_seconds=LIMIT)
    group.sum_(torch.ones(1))
    if rank.index == late_rank:
        time.sleep(60.0)
    group.sum_(torch.ones(1))


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_rank_that_is_alive_but_late_is_waited_for_up_to_a_limit_and_named(late_rank: int, tmp_path: Path):
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"\[\(0, 1\), \(1, 1\)\]"):
        on_ranks(2, keep_waiting, late_rank, tmp_path)
    assert time.monotonic() - began < 30.0
    for index in ("0", "1"):
        line = (tmp_path / index).read_text()
        assert line.startswith(f"alive, but kept the other ranks waiting for {LIMIT:g} s; rank {late_rank} on ")


def suspend_all() -> tuple[float, float]:
    """Stop all ranks while one of them waits in a collective; return its sum and the duration of the wait."""
    rank = this_rank(())
    group = Group(rank, timeout_seconds=LIMIT, on_failure=print, late_seconds=LIMIT)
    pids = " ".join(map(str, group.all_gather(os.getpid())))
    script = f"sleep 0.5; kill -STOP {pids}; sleep {SUSPENDED}; kill -CONT {pids}"
    with subprocess.Popen(["sh", "-c", script if rank.is_main else "sleep 1"]) as shell:
        if not rank.is_main:
            shell.wait(30.0)
        began = time.monotonic()
        total = group.sum_(torch.ones(1)).item()
        waited = time.monotonic() - began
    group.close()
    return total, waited


def test_ranks_that_are_suspended_during_a_collective_continue():
    (total, waited), _ = on_ranks(2, suspend_all)
    assert total == 2.0
    assert waited > SUSPENDED
