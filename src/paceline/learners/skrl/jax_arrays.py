"""Between torch and JAX: arrays that are the same memory, and trees of them as a checkpoint holds them."""

import os
from typing import Any

import torch
from torch import Tensor

# Read when JAX starts: it would take most of the GPU's memory, which torch and Warp need as well.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

JaxDevice = Any
"""A jax.Device, which is no class to type checkers."""


def jax_device(device: torch.device) -> JaxDevice:
    """The same as torch's, or the CPU where JAX is installed without CUDA."""
    if device.type == "cuda":
        try:
            return jax.devices("cuda")[device.index or 0]
        except RuntimeError:
            pass
    return jax.devices("cpu")[0]


def to_jax(tensor: Tensor, device: JaxDevice) -> jax.Array:
    """The tensor's own memory, or a copy where JAX is on another device; flags as int8. It must not be written to."""
    tensor = (tensor.to(torch.int8) if tensor.dtype == torch.bool else tensor).contiguous()
    return jax.dlpack.from_dlpack(tensor.cpu() if device.platform == "cpu" else tensor)


def to_torch(array: jax.Array) -> Tensor:
    """The array's own memory, wherever JAX has it."""
    return torch.from_dlpack(array)


def random_key() -> jax.Array:
    """From torch's generator."""
    return jnp.array(torch.randint(2**32, (2,)).numpy(), dtype=jnp.uint32)


def flat(tree: Any) -> dict[str, Tensor]:
    """Copies of a tree's arrays, by their paths."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {_name(path): to_torch(leaf).clone() for path, leaf in leaves}


def unflat(like: Any, arrays: dict[str, Tensor]) -> Any:
    """The tree that `flat` took apart, copied; of the same form as `like`."""
    leaves, form = jax.tree.flatten_with_path(like)
    found = []
    for path, leaf in leaves:
        tensor = arrays[_name(path)]
        if tensor.shape != leaf.shape:
            raise RuntimeError(f"{_name(path)} has shape {tuple(tensor.shape)} and should have {leaf.shape}")
        found.append(jnp.array(tensor.cpu().numpy(), dtype=leaf.dtype, device=leaf.device))
    return jax.tree.unflatten(form, found)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
