"""Who this process is among all ranks, and its device; read once."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from paceline.errors import UserError
from paceline.interrupts import PARENT

MOST_RANKS = 2**20


@dataclass(frozen=True)
class Rank:
    """One process of a run. Worlds, seeds and files are told apart by `index`, which is global."""

    index: int = 0
    world_size: int = 1
    local_index: int = 0
    """Among the ranks of this host."""
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launched: bool = False
    """True if a launcher started this process as a rank. Only then is there a group to join."""

    @property
    def is_main(self) -> bool:
        """The one rank in all nodes that writes files."""
        return self.index == 0

    @property
    def cores(self) -> int:
        """Its share of the host's; where there are fewer cores than ranks they take turns."""
        return max(1, usable_cores() // self.local_size)


def under_launcher() -> bool:
    """Return whether a launcher started this process as a rank of a run."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


_JAX_LAUNCHER = {
    "RANK": "JAX_RANK",
    "WORLD_SIZE": "JAX_WORLD_SIZE",
    "LOCAL_RANK": "JAX_LOCAL_RANK",
    "MASTER_ADDR": "JAX_COORDINATOR_ADDR",
    "MASTER_PORT": "JAX_COORDINATOR_PORT",
}
"""What skrl's launcher for JAX calls a launcher's variables."""


def adopt_jax_launcher() -> None:
    """Take what skrl's launcher for JAX says for what torch's says. How many ranks the host has, it does not say."""
    if "RANK" in os.environ or "JAX_RANK" not in os.environ:
        return
    if missing := [name for name in _JAX_LAUNCHER.values() if name not in os.environ]:
        raise UserError(
            f"JAX_RANK is set, but not {' '.join(missing)}: start the ranks with python -m skrl.utils.distributed.jax, "
            "or unset it to train alone"
        )
    os.environ.update({name: os.environ[theirs] for name, theirs in _JAX_LAUNCHER.items()})


def under_elastic_agent() -> bool:
    """Return whether torch's elastic launcher started this process. It restarts workers that end with an error."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def die_with_launcher() -> None:
    """A worker whose launcher is killed must not train on by itself."""
    if under_elastic_agent():
        die_with(PARENT)


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends; end it now if that is no longer the process `parent`."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def this_rank(gpu_ids: tuple[int, ...]) -> Rank:
    """Who the launcher says that this process is; alone, if there is none. GPUs are given out by local rank."""
    if not under_launcher():
        return Rank(device=_device(gpu_ids[:1], 0, 1))
    if "LOCAL_RANK" not in os.environ:
        raise UserError(
            "RANK and WORLD_SIZE are set, but not LOCAL_RANK: if they count nodes, start the ranks with "
            "python -m torch.distributed.run --nnodes=$WORLD_SIZE --node_rank=$RANK --nproc_per_node=$NPROC_PER_NODE "
            "--master_addr=$MASTER_ADDR --master_port=$MASTER_PORT -m paceline train ...; or unset them to train alone"
        )
    index, world_size = _place("RANK", "WORLD_SIZE")
    if "LOCAL_WORLD_SIZE" in os.environ:
        local, local_size = _place("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    else:
        local = _number("LOCAL_RANK")
        local_size = local + 1
    if local_size > world_size:
        raise UserError(
            f"{local_size} ranks on this host (LOCAL_RANK, LOCAL_WORLD_SIZE) but WORLD_SIZE is {world_size}: "
            "start the ranks with one launcher, or unset its variables to train alone"
        )
    device = _device(gpu_ids, local, local_size)
    return Rank(index, world_size, local, local_size, device=device, launched=True)


def is_secondary_worker() -> bool:
    """Return whether a launcher started this process as a rank other than the main one, which prints for all ranks. A
    process with invalid variables is not one: it reports the error itself."""
    try:
        return not this_rank(()).is_main
    except UserError:
        return False


def _place(index_name: str, size_name: str) -> tuple[int, int]:
    """An index and the number it is below, from two of the launcher's variables."""
    index, size = _number(index_name), _number(size_name)
    if index >= size:
        raise UserError(
            f"the environment variable {index_name} is {index}, but {size_name} is {size}: a launcher counts ranks "
            f"from 0 to {size_name} - 1; start the ranks with one, or unset its variables to train alone"
        )
    return index, size


def main_address() -> tuple[str, int]:
    """Host and port at which the main rank listens, as the launcher says."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UserError(
            f"{' and '.join(missing)} not set, but RANK and WORLD_SIZE are: start the ranks with a launcher, which "
            "sets where the main rank listens, or unset them to train alone"
        )
    return os.environ["MASTER_ADDR"], _number("MASTER_PORT", 1, 2**16 - 1)


def _number(name: str, least: int = 0, most: int = MOST_RANKS) -> int:
    word = os.environ[name]
    # Not more digits than that: int() refuses thousands of them in its own way.
    if not (word.isdecimal() and len(word) <= len(str(most)) and least <= int(word) <= most):
        raise UserError(
            f"the environment variable {name} is {word[:80]!r}: a launcher sets it to a number from {least} to {most}"
        )
    return int(word)


def _device(gpu_ids: tuple[int, ...], local: int, local_size: int) -> torch.device:
    if not gpu_ids:
        return torch.device("cpu")
    if local >= len(gpu_ids):
        raise UserError(
            f"{local_size} ranks on {socket.gethostname()} but {len(gpu_ids)} GPUs for them "
            f"({' '.join(map(str, gpu_ids))}): start as many ranks as GPUs, or name a GPU twice to share it"
        )
    return torch.device("cuda", gpu_ids[local])


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
    """GPU indices, relative to CUDA_VISIBLE_DEVICES, from what the command line says: indices, `all`, `none` (the CPU),
    or nothing. Nothing is the first GPU, or under a launcher one for each local rank, where there are GPUs and the
    engine for them. An index may stand twice: its ranks then share that GPU."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    words = tuple(word.lower() for word in asked)
    if not words:
        usable = present if engine != "mujoco" and find_spec("mujoco_warp") else 0
        return tuple(range(usable if under_launcher() else min(usable, 1)))
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
