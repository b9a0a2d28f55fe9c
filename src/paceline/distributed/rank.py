"""The rank of this process and its device."""

import socket
from dataclasses import dataclass, field

import torch

from paceline.device.cpu import usable_cores
from paceline.distributed.launcher import read_ranks, under_elastic_agent, under_launcher
from paceline.errors import UserError, counted
from paceline.process.interrupts import PARENT
from paceline.process.parent import die_with


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


def die_with_launcher() -> None:
    """End this worker when its elastic launcher is killed."""
    if under_elastic_agent():
        die_with(PARENT)


def this_rank(gpu_ids: tuple[int, ...]) -> Rank:
    """Return the rank that the launcher's variables describe; a single rank without a launcher. GPUs are assigned by
    local rank."""
    if not under_launcher():
        return Rank(device=_device(gpu_ids[:1], 0, 1))
    index, world_size, local, local_size = read_ranks()
    return Rank(index, world_size, local, local_size, device=_device(gpu_ids, local, local_size), launched=True)


def _device(gpu_ids: tuple[int, ...], local: int, local_size: int) -> torch.device:
    if not gpu_ids:
        return torch.device("cpu")
    if local >= len(gpu_ids):
        raise UserError(
            f"{local_size} ranks on {socket.gethostname()} but {counted(len(gpu_ids), 'GPU')} for them "
            f"({' '.join(map(str, gpu_ids))}): start as many ranks as GPUs, or name a GPU twice to share it"
        )
    return torch.device("cuda", gpu_ids[local])
