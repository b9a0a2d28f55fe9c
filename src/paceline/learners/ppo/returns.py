"""Generalised advantage estimation, with time limits told apart from true ends."""

import torch
from torch import Tensor


def advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, discount: float, decay: float
) -> Tensor:
    """All [step, world]. `next_value` is the value of the state that the reward led to, before any reset: after a
    time limit the episode would have gone on, so it counts; after a termination it does not."""
    going, unbroken = (~terminated).float(), (~done).float() * (discount * decay)
    surprise = reward + discount * going * next_value - value
    running = torch.zeros_like(reward[0])
    backwards = []
    for now, keep in zip(surprise.flip(0).unbind(0), unbroken.flip(0).unbind(0), strict=True):
        running = torch.addcmul(now, keep, running)
        backwards.append(running)
    return torch.stack(backwards[::-1])
