"""GPUs, numbered as in torch and Warp: in CUDA's order, relative to CUDA_VISIBLE_DEVICES."""

import re
from importlib.util import find_spec
from pathlib import Path

import torch

from paceline.errors import UserError


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID in the format of the NVIDIA driver: GPU-, then 8-4-4-4-12 hexadecimal digits."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def gpu_count() -> int:
    """Return the number of GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def driver_version() -> str:
    """Return the version of the NVIDIA driver, or "none"."""
    file = Path("/proc/driver/nvidia/version")
    number = re.search(r"\d+\.\d[.\d]*", file.read_text()) if file.exists() else None
    return number[0] if number else "none"


def choose_gpus(gpu_ids: tuple[str, ...], engine: str, all_by_default: bool) -> tuple[int, ...]:
    """Return the GPU indices that --gpu-ids selects, relative to CUDA_VISIBLE_DEVICES; empty for the CPU.

    `gpu_ids` holds indices, `all` or `none`. An index may occur twice: its ranks then share that GPU. If it is empty,
    and torch and MuJoCo Warp can use a GPU, the first GPU is selected, or all GPUs if `all_by_default`.
    """
    present, values = gpu_count(), tuple(value.lower() for value in gpu_ids)
    if not values:
        usable = present if engine != "mujoco" and find_spec("mujoco_warp") else 0
        return tuple(range(usable if all_by_default else min(usable, 1)))
    if values == ("none",):
        return ()
    if values == ("all",):
        if not present:
            raise UserError("--gpu-ids all: torch sees no GPU here; use --gpu-ids none to train on the CPU")
        return tuple(range(present))
    if not all(value.isdecimal() for value in values):
        raise UserError(f"--gpu-ids {' '.join(gpu_ids)}: give indices such as 0 1, or all, or none")
    ids = tuple(map(int, values))
    if max(ids) >= present:
        allowed = f"choose from 0 to {present - 1}, or none" if present else "torch sees none; use --gpu-ids none"
        raise UserError(f"--gpu-ids {max(ids)}: no such GPU: {allowed} to train on the CPU")
    return ids
