"""Distribute the state of all envs over ranks, and collect it again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def shard_ranges(total: int, ranks: int) -> list[range]:
    """Return the global env indices of each rank: consecutive ranges whose lengths differ by at most one."""
    size, remainder = divmod(total, ranks)
    sizes = [size + (index < remainder) for index in range(ranks)]
    return [range(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(ranks)]


def concatenate(shards: Sequence[Any]) -> Any:
    """Concatenate the states of consecutive envs, nested dicts of tensors [env, ...]. All envs share a scalar."""
    first = shards[0]
    if isinstance(first, dict):
        return {name: concatenate([part[name] for part in shards]) for name in first}
    return torch.cat(list(shards)) if first.dim() else first


def shard(state: Any, envs: range) -> Any:
    """Return the part of the state of all envs that belongs to `envs`."""
    if isinstance(state, dict):
        return {name: shard(part, envs) for name, part in state.items()}
    return state[envs.start : envs.stop] if state.dim() else state


def to_cpu(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: to_cpu(part) for name, part in state.items()}
    return state.cpu() if isinstance(state, Tensor) else state
