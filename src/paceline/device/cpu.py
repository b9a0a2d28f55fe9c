"""CPU cores and the threads of torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def usable_cores() -> int:
    """Return the number of cores that this process may use, considering CPU affinity and the container's limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def tune_torch(device: torch.device) -> None:
    """Configure torch for many small operations next to a simulation."""
    if device.type == "cpu":
        # The threads of the physics occupy all cores; threads of torch would compete with them.
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")  # TF32


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
