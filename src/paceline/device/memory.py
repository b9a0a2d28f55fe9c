"""Free memory of a device."""

import torch

from paceline.device.cpu import free_host_bytes


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or the available memory of the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
