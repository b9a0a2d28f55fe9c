"""The worlds' state, spread over any number of ranks: cut into shares, and joined again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def shares(total: int, ranks: int) -> list[range]:
    """The worlds of each rank: consecutive, all of them once, and their numbers differ by one at most."""
    small, more = divmod(total, ranks)
    sizes = [small + (index < more) for index in range(ranks)]
    return [range(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(ranks)]


def joined(parts: Sequence[Any]) -> Any:
    """States of consecutive worlds, nested dicts of tensors [world, ...], as one. A scalar is common to all worlds."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: joined([part[name] for part in parts]) for name in first}
    return torch.cat(list(parts)) if first.dim() else first


def cut(state: Any, worlds: range) -> Any:
    """Of the state of all worlds, that of some."""
    if isinstance(state, dict):
        return {name: cut(part, worlds) for name, part in state.items()}
    return state[worlds.start : worlds.stop] if state.dim() else state


def on_cpu(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: on_cpu(part) for name, part in state.items()}
    return state.cpu() if isinstance(state, Tensor) else state
