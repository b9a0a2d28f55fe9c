"""Conversion between torch and JAX: arrays that share memory, and trees of arrays in checkpoints."""

import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

# Read when JAX starts. By default it allocates most of the GPU memory, which torch and Warp need as well.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

JaxDevice = Any
"""jax.Device, which type checkers do not accept as a class."""


def jax_device(device: torch.device) -> JaxDevice:
    """Return the JAX device of a torch device, or the CPU if JAX is installed without CUDA."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            return jax.devices("cuda")[device.index or 0]
    return jax.devices("cpu")[0]


def to_jax(tensor: Tensor, device: JaxDevice) -> jax.Array:
    """Return an array that shares the memory of the tensor, or a copy if JAX is on another device. Booleans become
    int8. The memory must not be changed afterwards. The inverse is `torch.from_dlpack`."""
    tensor = (tensor.to(torch.int8) if tensor.dtype == torch.bool else tensor).contiguous()
    return jax.dlpack.from_dlpack(tensor.cpu() if device.platform == "cpu" else tensor)


def random_key() -> jax.Array:
    """Return a key sampled from torch's generator."""
    return jnp.array(torch.randint(2**32, (2,)).numpy(), dtype=jnp.uint32)


def flat(tree: Any) -> dict[str, Tensor]:
    """Return copies of the arrays of a tree by their paths."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {_name(path): torch.from_dlpack(leaf).clone() for path, leaf in leaves}


def unflat(like: Any, arrays: dict[str, Tensor]) -> Any:
    """Return a tree of the same structure as `like` with copies of the arrays of `flat`."""
    leaves, form = jax.tree.flatten_with_path(like)
    found = []
    for path, leaf in leaves:
        tensor = arrays[_name(path)]
        if tensor.shape != leaf.shape:
            raise RuntimeError(f"{_name(path)} has shape {tuple(tensor.shape)} and should have {leaf.shape}")
        found.append(jnp.array(tensor.cpu().numpy(), dtype=leaf.dtype, device=leaf.device))
    return jax.tree.unflatten(form, found)


class SavedArrays:
    """State of a model or a preprocessor of skrl."""

    def __init__(self, module: Any):
        self._module = module

    def state(self) -> dict[str, Tensor]:
        return flat(self._module.state_dict.params)

    def load_state(self, state: dict[str, Tensor]) -> None:
        current = self._module.state_dict
        self._module.state_dict = current.replace(params=unflat(current.params, state))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
