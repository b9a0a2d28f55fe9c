"""Who this process is among all ranks, and its device; read once."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from paceline.errors import UserError


@dataclass(frozen=True)
class Rank:
    """One process of a run. Worlds, seeds and files are told apart by `index`, which is global."""

    index: int
    world_size: int
    host: str
    device: torch.device

    @property
    def is_main(self) -> bool:
        """The one rank in all nodes that writes files."""
        return self.index == 0


def this_rank(gpu_ids: tuple[int, ...]) -> Rank:
    """The only rank of a run that one process does alone."""
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("started as one of several ranks (WORLD_SIZE is set), but this version trains with one rank")
    if len(gpu_ids) > 1:
        raise UserError(
            f"--gpu-ids {' '.join(map(str, gpu_ids))} asks for {len(gpu_ids)} ranks, "
            "but this version trains with one: give one GPU"
        )
    return Rank(0, 1, socket.gethostname(), torch.device("cuda", gpu_ids[0]) if gpu_ids else torch.device("cpu"))


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


def choose_gpus(asked: tuple[str, ...], engine: str) -> tuple[int, ...]:
    """GPU indices from what the command line says: indices, `all`, `none` (the CPU), or nothing for the first GPU,
    where there is one and the engine for it."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    words = tuple(word.lower() for word in asked)
    if not words:
        return (0,) if present and engine != "mujoco" and find_spec("mujoco_warp") else ()
    if words == ("none",):
        return ()
    if words == ("all",):
        if not present:
            raise UserError("--gpu-ids all: torch sees no GPU here; use --gpu-ids none to train on the CPU")
        return tuple(range(present))
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--gpu-ids {' '.join(asked)}: give indices such as 0 1, or all, or none")
    ids = tuple(int(word) for word in words)
    for gpu in ids:
        if gpu >= present:
            seen = f"torch sees {present} (0 to {present - 1})" if present else "torch sees none"
            raise UserError(f"--gpu-ids {gpu}: no such GPU, {seen}; choose from those, or none for the CPU")
    return ids
