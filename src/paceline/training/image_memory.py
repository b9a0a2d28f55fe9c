"""Memory that the images of a rollout need, checked before it is allocated."""

import torch
from rich.filesize import decimal

from paceline.device.memory import free_bytes
from paceline.env.vec_env import VecEnv
from paceline.errors import UserError, counted
from paceline.learners.encoders import images_of


def check_image_memory(env: VecEnv, horizon: int) -> str:
    """Return a line that states how much memory the images of a rollout need, or an empty string without images. Raise
    UserError if they do not fit into the free memory of the device."""
    groups = images_of(env)
    if not groups:
        return ""
    per_step = {name: env.num_envs * _bytes(spec.shape, spec.dtype) for name, spec in groups.items()}
    # The rollout, the images of the env, and those on which the policy acts next.
    needed, free = sum(per_step.values()) * (horizon + 3), free_bytes(env.device)
    sizes = ", ".join(f"{name} {'x'.join(map(str, spec.shape))}" for name, spec in groups.items())
    rollout = f"{counted(env.num_envs, 'env')}, {counted(horizon, 'step')}"
    what = f"Images of a rollout ({rollout}; {sizes}) need {decimal(needed)}"
    if needed > free:
        raise UserError(
            f"{what}, but {env.device} has {decimal(free)} free: use fewer envs (--num-envs), fewer steps per "
            "iteration, smaller images or fewer streams (--env.*.width, --env.*.height, --env.*.streams)"
        )
    return f"{what} of {decimal(free)} free."


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
