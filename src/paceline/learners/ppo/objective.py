"""The clipped objective of PPO for continuous actions, as a formula and with its gradient derived by hand.

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
    entropy = log_std.sum() + log_std.numel() * 0.5 * math.log(2.0 * math.pi * math.e)
    return losses_of(ratio, entropy, value, samples, config)


def losses_of(ratio: Tensor, entropy: Tensor, value: Tensor, samples: Samples, config: PpoSettings) -> Losses:
    """Return the losses from the probability ratios [sample], the mean entropy and the values [sample]."""
    surrogate = surrogate_loss(ratio, samples.advantage, config.clip)
    clip = config.clip if config.clip_value else None
    squared_error = value_loss(value, samples.value, samples.value_target, clip)
    total = surrogate + config.value_weight * squared_error - config.entropy_weight * entropy
    return Losses(total, surrogate.detach(), squared_error.detach(), entropy.detach())


def objective_gradient(
    mean: Tensor, log_std: Tensor, value: Tensor, samples: Samples, config: PpoSettings
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return the surrogate loss, value loss and entropy of `objective`, and its gradient with respect to `mean`,
    `log_std` and `value`."""
    inverse_std = (-log_std).exp()
    noise = (samples.action - mean) * inverse_std
    squared = noise.square()
    constant = log_std.sum() + 0.5 * math.log(2.0 * math.pi) * mean.shape[1]
    ratio = torch.add(squared.sum(1), samples.log_prob, alpha=2.0).mul_(-0.5).sub_(constant).exp_()
    surrogate, by_log_prob = surrogate_gradient(ratio, samples.advantage, config.clip)
    squared_error, by_value = value_gradient(value, samples, config)
    by_log_prob = by_log_prob.unsqueeze(1)
    gradients = (
        by_log_prob * noise * inverse_std,
        (by_log_prob * (squared - 1.0)).sum(0) - config.entropy_weight,
        by_value,
    )
    return (surrogate, squared_error, constant + 0.5 * mean.shape[1]), gradients


def surrogate_gradient(ratio: Tensor, advantage: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the surrogate loss and its gradient with respect to the log-probabilities, [sample]. `ratio` is
    overwritten."""
    gain = ratio * advantage
    clipped = ratio.clamp_(1.0 - clip, 1.0 + clip).mul_(advantage)
    # Where the clipped gain is smaller it is constant and has no gradient.
    return -torch.minimum(gain, clipped).mean(), (gain * (gain <= clipped)).mul_(-1.0 / len(ratio))


def value_gradient(value: Tensor, samples: Samples, config: PpoSettings) -> tuple[Tensor, Tensor]:
    """Return the value loss without its weight, and the gradient of the weighted loss with respect to `value`."""
    target, old_value = samples.value_target, samples.value
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
    return squared_error.mean(), error * (2.0 * config.value_weight / len(value))


def log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-probability [...] of actions that are `noise` [..., actions] standard deviations from the mean."""
    return (-0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)).sum(-1)


def kl_divergence(old_mean: Tensor, old_log_std: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the mean KL divergence from the new to the old normal distribution, a scalar."""
    narrowing, shift = old_log_std - log_std, (old_mean - mean).square().mean(0)
    spread = torch.addcmul(torch.expm1(2.0 * narrowing), shift, (-2.0 * log_std).exp())
    return (0.5 * spread - narrowing).sum()
