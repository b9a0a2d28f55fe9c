"""CPU cores, host memory and the threads of torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may use, considering CPU affinity and the container's limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        # The quota is "max" without a limit.
        quota, period = map(int, (_CGROUP / "cpu.max").read_text().split())
        return max(1, min(cores, round(quota / period)))
    return cores


@contextmanager
def cores_of_new_processes(count: int) -> Iterator[None]:
    """Let processes that this thread starts inside the context use only the first `count` of its cores; all if it is
    0. A process inherits the cores of the thread that starts it."""
    if not count:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_host_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the available memory of the host, or what is left of the memory limit of the container if that is lower.
    `cgroup` is the directory of the container's control group (version 2)."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):
        # The limit is "max" without a limit.
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        # Inactive pages of files count as used, but the kernel frees them when memory is needed.
        reclaimable = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())["inactive_file"]
        return min(available, max(0, limit - used + int(reclaimable)))
    return available


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
