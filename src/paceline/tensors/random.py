"""Random numbers as functions of (seed, env, step, stream): the same on every device and for any number of ranks.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a keyed
bijection of a 128-bit counter, here (block, stream, step, env), under a 64-bit key, here the seed.
"""

import math
from enum import IntEnum
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.tensors.graph import fuse

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
Words = TypeVar("Words", Tensor, np.ndarray)


class Stream(IntEnum):
    """Purpose of a random number. Two purposes never share a stream."""

    RESET = 0
    ACTION = 1
    MINIBATCH = 2
    STEP = 3
    RANDOMIZE = 4
    DELAY = 5
    CAMERA_NOISE = 6
    CAMERA_DROPOUT = 7


def philox(counter: tuple[Words, ...], key: tuple[int, int]) -> tuple[Words, ...]:
    """Return four 32-bit words, each stored in 64 bits, for each 128-bit counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The signed product overflows, but its 64 bits are those of the unsigned product. Operations in place take less
        # time in NumPy.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = p0 >> 32, p1 >> 32
        high0 &= _WORD
        high1 &= _WORD
        p0 &= _WORD
        p1 &= _WORD
        high1 ^= c1
        high1 ^= k0
        high0 ^= c3
        high0 ^= k1
        c0, c1, c2, c3 = high1, p1, high0, p0
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _WORD, (k1 + _KEY_INCREMENTS[1]) & _WORD
    return c0, c1, c2, c3


@cache
def _philox_for(device: torch.device):
    return _numpy_philox if device.type == "cpu" else fuse(philox, device)


def _numpy_philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Compute `philox` with NumPy, whose calls cost less than torch's: a few thousand counters take half the time."""
    words = philox(tuple(part.numpy().view(np.uint64) for part in counter), key)
    return tuple(torch.from_numpy(word.view(np.int64)) for word in words)


def bits(seed: int, env: Tensor, step: Tensor, stream: Stream, count: int) -> Tensor:
    """Return `count` 32-bit words for every pair of env index and step, which broadcast, int64 [..., count]."""
    env, step = torch.broadcast_tensors(env, step)
    if not count:
        return env.new_empty(*env.shape, 0)
    block = torch.arange(-(-count // 4), device=env.device)
    env, step, block = torch.broadcast_tensors(env[..., None], step[..., None], block)
    # Contiguous tensors, because the compiler may compute a range that it can see in 32 bits.
    counter = tuple(t.contiguous() for t in (block, torch.full_like(block, int(stream)), step & _WORD, env))
    words = _philox_for(env.device)(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return torch.stack(words[:count], dim=-1).flatten(-2)[..., :count]


def uniform(seed: int, env: Tensor, step: Tensor, stream: Stream, count: int) -> Tensor:
    """Sample uniform numbers in [0, 1) on a grid of 2^-24, float32 [..., count]."""
    return (bits(seed, env, step, stream, count) >> 8).float() * 2.0**-24


def normal(seed: int, env: Tensor, step: Tensor, stream: Stream, count: int) -> Tensor:
    """Sample standard normal numbers by the Box-Muller transform, float32 [..., count]."""
    even = count + count % 2
    radius, angle = uniform(seed, env, step, stream, even).unflatten(-1, (2, even // 2)).unbind(-2)
    radius = torch.sqrt(-2.0 * torch.log1p(-radius))
    angle = angle * (2.0 * math.pi)
    return torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)[..., :count]


def gumbel(seed: int, env: Tensor, step: Tensor, stream: Stream, count: int) -> Tensor:
    """Sample standard Gumbel numbers, float32 [..., count]. If one is added to each logit of a categorical
    distribution, the index of the largest sum is a sample of it."""
    exponential = -torch.log1p(-uniform(seed, env, step, stream, count))
    # Half of the smallest positive number, so that all results are finite.
    return -torch.log(exponential.clamp(min=2.0**-25))
