"""The clipped objective of PPO, as a formula and with its gradient derived by hand.

The compiler makes the formula fast on a GPU. On a CPU autograd would run its many small operations one by one, so the
gradient is written out. A test compares both.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.learners.ppo.samples import Samples
from paceline.learners.ppo.settings import PpoSettings


class Losses(NamedTuple):
    """Loss to minimize, and its parts without gradient."""

    total: Tensor
    surrogate: Tensor
    value: Tensor
    entropy: Tensor


def surrogate_loss(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return the clipped surrogate loss, a scalar. `ratio` is the probability ratio of the new and the old policy."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage).mean()


def value_loss(value: Tensor, old_value: Tensor, target: Tensor, clip: float | None) -> Tensor:
    """Return the mean squared error of the value, a scalar. With `clip`, the loss does not decrease further
    if the value differs from `old_value` by more than `clip`."""
    loss = (value - target).square()
    if clip is not None:
        clipped = old_value + (value - old_value).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - target).square())
    return loss.mean()


def objective(mean: Tensor, log_std: Tensor, value: Tensor, samples: Samples, config: PpoSettings) -> Losses:
    """Return the losses of the networks' outputs `mean` [sample, actions], `log_std` [actions] and `value` [sample]."""
    fixed = log_std.detach()
    noise = (samples.action - mean) / fixed.exp()
    # Zero, but with the gradient of log_std as a matrix product, which is many times faster than the compiler's sum
    # over the samples: that took up to 6 % of an update (measured on an H200).
    by_log_std = (noise.detach().square() - 1.0) @ (log_std - fixed).unsqueeze(1)
    ratio = (log_prob(noise, fixed) + by_log_std.squeeze(1) - samples.log_prob).exp()
    surrogate = surrogate_loss(ratio, samples.advantage, config.clip)
    clip = config.clip if config.clip_value else None
    squared_error = value_loss(value, samples.value, samples.value_target, clip)
    entropy = log_std.sum() + log_std.numel() * 0.5 * math.log(2.0 * math.pi * math.e)
    total = surrogate + config.value_weight * squared_error - config.entropy_weight * entropy
    return Losses(total, surrogate.detach(), squared_error.detach(), entropy.detach())


def objective_gradient(
    mean: Tensor, log_std: Tensor, value: Tensor, samples: Samples, config: PpoSettings
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return the surrogate loss, value loss and entropy of `objective`, and its gradient with respect to `mean`,
    `log_std` and `value`."""
    advantage, target, old_value = samples.advantage, samples.value_target, samples.value
    inverse_std, count = (-log_std).exp(), len(value)
    noise = (samples.action - mean) * inverse_std
    squared = noise.square()
    constant = log_std.sum() + 0.5 * math.log(2.0 * math.pi) * mean.shape[1]
    ratio = torch.add(squared.sum(1), samples.log_prob, alpha=2.0).mul_(-0.5).sub_(constant).exp_()
    gain = ratio * advantage
    clipped = ratio.clamp_(1.0 - config.clip, 1.0 + config.clip).mul_(advantage)
    # Where the clipped gain is smaller it is constant and has no gradient.
    gain_gradient = (gain * (gain <= clipped)).mul_(-1.0 / count).unsqueeze(1)

    error = value - target
    squared_error = error.square()
    if config.clip_value:
        change = value - old_value
        clipped_change = change.clamp(-config.clip, config.clip)
        clipped_error = clipped_change + old_value - target
        clipped_loss = clipped_error.square()
        clipped_error *= clipped_change == change
        error = torch.where(squared_error >= clipped_loss, error, clipped_error)
        squared_error = torch.maximum(squared_error, clipped_loss)

    gradients = (
        gain_gradient * noise * inverse_std,
        (gain_gradient * (squared - 1.0)).sum(0) - config.entropy_weight,
        error * (2.0 * config.value_weight / count),
    )
    return (-torch.minimum(gain, clipped).mean(), squared_error.mean(), constant + 0.5 * mean.shape[1]), gradients


def log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-probability [...] of actions that are `noise` [..., actions] standard deviations from the mean."""
    return (-0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)).sum(-1)


def kl_divergence(old_mean: Tensor, old_log_std: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the mean KL divergence from the new to the old normal distribution, a scalar."""
    narrowing, shift = old_log_std - log_std, (old_mean - mean).square().mean(0)
    spread = torch.addcmul(torch.expm1(2.0 * narrowing), shift, (-2.0 * log_std).exp())
    return (0.5 * spread - narrowing).sum()
