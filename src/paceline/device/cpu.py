"""CPU cores and torch's threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def usable_cores() -> int:
    """Cores this process may use: fewer than the machine has, in a container or under a scheduler."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def tune_torch(device: torch.device) -> None:
    """Set torch up for many small operations beside a simulation."""
    if device.type == "cpu":
        # The physics has threads of its own on all cores; torch's would only contend with them.
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")  # TF32


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
