"""GPUs, as torch and Warp number them in CUDA's order, which CUDA_VISIBLE_DEVICES changes."""

from importlib.util import find_spec

import torch

from paceline.errors import UserError


def gpu_uuid(device: torch.device) -> str:
    """As the driver writes it: GPU-8 digits-4-4-4-12."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def choose_gpus(asked: tuple[str, ...], engine: str, all_by_default: bool) -> tuple[int, ...]:
    """GPU indices, relative to CUDA_VISIBLE_DEVICES, from what the command line says: indices, `all`, `none` (the CPU),
    or nothing. Nothing is the first GPU, or all of them if `all_by_default`, where there are GPUs and the engine for
    them. An index may stand twice: its ranks then share that GPU."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    words = tuple(word.lower() for word in asked)
    if not words:
        usable = present if engine != "mujoco" and find_spec("mujoco_warp") else 0
        return tuple(range(usable if all_by_default else min(usable, 1)))
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
