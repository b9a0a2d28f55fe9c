"""States of learners and envs: nested dicts of tensors and numbers."""

from typing import Any


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by their paths, such as "envs/qpos"."""
    leaves: dict[str, Any] = {}
    for key, value in state.items():
        leaves |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return leaves
