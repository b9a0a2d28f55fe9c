"""Randomness as a function: `draw(seed, world, step, stream)`, the same on every device and for any number of ranks.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a keyed
bijection of a 128-bit counter, here (block, stream, step, world), under a 64-bit key, here the seed.
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
    """What a random number is for; two uses never share a stream."""

    RESET = 0
    ACTION = 1
    MINIBATCH = 2
    STEP = 3
    RANDOMIZE = 4
    DELAY = 5


def philox(counter: tuple[Words, ...], key: tuple[int, int]) -> tuple[Words, ...]:
    """Four 32-bit words, held in 64 bits each, for each 128-bit counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The signed product wraps, but its 64 bits are those of the unsigned one.
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
    return _philox_of_numpy if device.type == "cpu" else fuse(philox, device)


def _philox_of_numpy(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """NumPy's calls are cheaper than torch's: on a few thousand counters this takes half the time."""
    words = philox(tuple(part.numpy().view(np.uint64) for part in counter), key)
    return tuple(torch.from_numpy(word.view(np.int64)) for word in words)


def bits(seed: int, world: Tensor, step: Tensor, stream: Stream, count: int) -> Tensor:
    """`count` 32-bit words for every pair of world and step (which broadcast), int64 [..., count]."""
    world, step = torch.broadcast_tensors(world, step)
    if not count:
        return world.new_empty(*world.shape, 0)
    block = torch.arange(-(-count // 4), device=world.device)
    world, step, block = torch.broadcast_tensors(world[..., None], step[..., None], block)
    # Whole tensors, because a compiler may count in 32 bits what it sees being counted up.
    counter = tuple(t.contiguous() for t in (block, torch.full_like(block, int(stream)), step & _WORD, world))
    words = _philox_for(world.device)(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return torch.stack(words[:count], dim=-1).flatten(-2)[..., :count]


def uniform(seed: int, world: Tensor, step: Tensor, stream: Stream, count: int) -> Tensor:
    """Numbers in [0, 1) on a grid of 2^-24, float32 [..., count]."""
    return (bits(seed, world, step, stream, count) >> 8).float() * 2.0**-24


def normal(seed: int, world: Tensor, step: Tensor, stream: Stream, count: int) -> Tensor:
    """Standard normal numbers by Box and Muller, float32 [..., count]."""
    even = count + count % 2
    radius, angle = uniform(seed, world, step, stream, even).unflatten(-1, (2, even // 2)).unbind(-2)
    radius = torch.sqrt(-2.0 * torch.log1p(-radius))
    angle = angle * (2.0 * math.pi)
    return torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)[..., :count]
