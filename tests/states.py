"""States of learners and envs: nested dicts of tensors and numbers."""

from typing import Any

import torch


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by their paths, such as "envs/qpos"."""
    leaves: dict[str, Any] = {}
    for key, value in state.items():
        leaves |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def states_of(envs: range, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the part of the state of all envs that belongs to `envs`."""
    return {name: tensor[envs.start : envs.stop] if tensor.dim() else tensor for name, tensor in state.items()}
