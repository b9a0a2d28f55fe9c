"""Distribute the state of all envs over ranks, and collect it again."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def shard_ranges(total: int, ranks: int) -> list[range]:
    """Return the global env indices of each rank: consecutive ranges whose lengths differ by at most one."""
    size, remainder = divmod(total, ranks)
    bounds = [index * size + min(index, remainder) for index in range(ranks + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def concatenate(shards: Sequence[Any]) -> Any:
    """Concatenate the states of consecutive envs, nested dicts of tensors [env, ...]. Scalars must be equal."""
    return _map(lambda *parts: torch.cat(parts) if parts[0].dim() else parts[0], *shards)


def copy_to_host(state: Any) -> Any:
    """Return a copy of a state, nested dicts of tensors and other values, with all tensors in the host's memory."""
    return _map(lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, state)


def num_bytes(state: Any) -> int:
    """Return the size of the tensors of a state."""
    return sum(map(num_bytes, state.values())) if isinstance(state, dict) else state.nbytes


def _map(function: Callable[..., Any], *states: Any) -> Any:
    """Apply a function to the leaves of nested dicts."""
    if isinstance(states[0], dict):
        return {name: _map(function, *(state[name] for state in states)) for name in states[0]}
    return function(*states)
