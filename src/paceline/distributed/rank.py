"""The rank of this process and its device, from the launcher's environment variables."""

import os
import socket
from dataclasses import dataclass, field

import torch

from paceline.device.cpu import usable_cores
from paceline.errors import UserError
from paceline.process.interrupts import PARENT
from paceline.process.parent import die_with

# Environment variables of torch.distributed.run and their names in skrl's launcher for JAX.
_JAX_LAUNCHER = {
    name: f"JAX_{name.replace('MASTER', 'COORDINATOR')}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
}
_REMEDY = "start the ranks with a launcher, or unset its variables to train with a single rank"


@dataclass(frozen=True)
class Rank:
    """One process of a run. Env indices, seeds and files depend on `index`, which is global."""

    index: int = 0
    world_size: int = 1
    local_index: int = 0
    """Index among the ranks of this host."""
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launched: bool = False
    """True if a launcher started this process as a rank. Without a launcher there is no process group."""

    @property
    def is_main(self) -> bool:
        """True on one rank of all nodes, the only one that writes files other than logs and shards of checkpoints."""
        return self.index == 0

    @property
    def cores(self) -> int:
        """Number of cores of this rank. If a host has fewer cores than ranks, they share them."""
        return max(1, usable_cores() // self.local_size)


def under_launcher() -> bool:
    """Return whether a launcher started this process as a rank of a run."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def under_elastic_agent() -> bool:
    """Return whether torch's elastic launcher started this process. It restarts workers that end with an error."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def adopt_jax_launcher() -> None:
    """Copy the variables of skrl's launcher for JAX to those of torch's, except the number of ranks per host, which it
    does not set."""
    if "RANK" in os.environ or "JAX_RANK" not in os.environ:
        return
    if missing := [name for name in _JAX_LAUNCHER.values() if name not in os.environ]:
        raise UserError(
            f"JAX_RANK is set, but not {' '.join(missing)}: start the ranks with python -m skrl.utils.distributed.jax, "
            "or unset it to train with a single rank"
        )
    os.environ.update({name: os.environ[jax_name] for name, jax_name in _JAX_LAUNCHER.items()})


def die_with_launcher() -> None:
    """End this worker when its elastic launcher is killed."""
    if under_elastic_agent():
        die_with(PARENT)


def this_rank(gpu_ids: tuple[int, ...]) -> Rank:
    """Return the rank that the launcher's variables describe; a single rank without a launcher. GPUs are assigned by
    local rank."""
    if not under_launcher():
        return Rank(device=_device(gpu_ids[:1], 0, 1))
    if "LOCAL_RANK" not in os.environ:
        raise UserError(
            "RANK and WORLD_SIZE are set, but not LOCAL_RANK: if they count nodes, start the ranks with "
            "python -m torch.distributed.run --nnodes=$WORLD_SIZE --node_rank=$RANK --nproc_per_node=$NPROC_PER_NODE "
            "--master_addr=$MASTER_ADDR --master_port=$MASTER_PORT -m paceline train ...; "
            "or unset them to train with a single rank"
        )
    index, world_size = _index_and_size("RANK", "WORLD_SIZE")
    local, local_size = _index_and_size("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if local_size > world_size:
        hosted = f"{local_size} ranks on this host (LOCAL_RANK, LOCAL_WORLD_SIZE)"
        raise UserError(f"{hosted} but WORLD_SIZE is {world_size}: {_REMEDY}")
    return Rank(index, world_size, local, local_size, device=_device(gpu_ids, local, local_size), launched=True)


def main_address() -> tuple[str, int]:
    """Return host and port of the main rank, from the launcher's variables."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UserError(f"{' and '.join(missing)} not set, but RANK and WORLD_SIZE are: {_REMEDY}")
    return os.environ["MASTER_ADDR"], _number("MASTER_PORT", 1, 2**16 - 1)


def _index_and_size(index_name: str, size_name: str) -> tuple[int, int]:
    """Return the values of two variables. If the size is not set, it is index + 1."""
    index = _number(index_name)
    size = _number(size_name) if size_name in os.environ else index + 1
    if index >= size:
        raise UserError(
            f"the environment variable {index_name} is {index}, but {size_name} is {size}: a launcher counts ranks "
            f"from 0 to {size_name} - 1; {_REMEDY}"
        )
    return index, size


def _number(name: str, least: int = 0, most: int = 2**20) -> int:
    value = os.environ[name]
    # The length is checked first, because int() fails for thousands of digits.
    if value.isdecimal() and len(value) <= len(str(most)) and least <= int(value) <= most:
        return int(value)
    raise UserError(
        f"the environment variable {name} is {value[:80]!r}: a launcher sets it to a number from {least} to {most}"
    )


def _device(gpu_ids: tuple[int, ...], local: int, local_size: int) -> torch.device:
    if not gpu_ids:
        return torch.device("cpu")
    if local >= len(gpu_ids):
        raise UserError(
            f"{local_size} ranks on {socket.gethostname()} but {len(gpu_ids)} GPUs for them "
            f"({' '.join(map(str, gpu_ids))}): start as many ranks as GPUs, or name a GPU twice to share it"
        )
    return torch.device("cuda", gpu_ids[local])
