"""Generalized advantage estimation (Schulman et al. 2015) that distinguishes time limits from terminations."""

import torch
from torch import Tensor


def advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, discount: float, decay: float
) -> Tensor:
    """Return the advantages; all tensors are [step, env].

    `next_value` is the value of the state that the reward led to, before any reset. It counts after a time limit,
    because the episode would have continued, and does not count after a termination.
    """
    not_terminated, not_done = (~terminated).float(), (~done).float() * (discount * decay)
    td_error = reward + discount * not_terminated * next_value - value
    running = torch.zeros_like(reward[0])
    reversed_advantages = []
    for error, keep in zip(td_error.flip(0).unbind(0), not_done.flip(0).unbind(0), strict=True):
        running = torch.addcmul(error, keep, running)
        reversed_advantages.append(running)
    return torch.stack(reversed_advantages[::-1])
