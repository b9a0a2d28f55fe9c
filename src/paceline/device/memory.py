"""Memory of a device."""

import psutil
import torch

from paceline.device.cpu import free_host_bytes


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or the available memory of the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def used_mib(device: torch.device) -> float:
    """Return the used memory of a GPU, by all processes, or the resident memory of this process, MiB."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**20
    return psutil.Process().memory_info().rss / 2**20
