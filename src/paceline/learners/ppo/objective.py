"""PPO's clipped objective, twice: as a formula, and with its derivative worked out by hand.

A compiler makes the formula fast on a GPU; on a CPU autograd would run its many small steps one by one. A test holds
them to each other.
"""

import math

import torch
from torch import Tensor

from paceline.learners.ppo.settings import PpoSettings

Losses = tuple[Tensor, Tensor, Tensor, Tensor]
"""What to descend; and its parts: surrogate, value loss, entropy."""


def objective(
    mean: Tensor, log_std: Tensor, value: Tensor, action: Tensor, scalars: tuple[Tensor, ...], config: PpoSettings
) -> Losses:
    """`mean` and `action` are [sample, actions]; `value`, and each of the `scalars` advantage, target, old value and
    old log-probability, are [sample]."""
    advantage, target, old_value, old_log_prob = scalars
    fixed = log_std.detach()
    noise = (action - mean) / fixed.exp()
    # Zero, but its derivative by the log_std is a product of matrices: many times faster than a compiler's sum over the
    # samples, which took up to 6 % of an update (measured on an H200).
    by_log_std = (noise.detach().square() - 1.0) @ (log_std - fixed).unsqueeze(1)
    ratio = (log_prob(noise, fixed) + by_log_std.squeeze(1) - old_log_prob).exp()
    clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
    surrogate = -torch.minimum(ratio * advantage, clipped * advantage).mean()

    value_loss = (value - target).square()
    if config.clip_value:
        near = old_value + (value - old_value).clamp(-config.clip, config.clip)
        value_loss = torch.maximum(value_loss, (near - target).square())
    value_loss = value_loss.mean()

    entropy = _entropy(log_std)
    loss = surrogate + config.value_weight * value_loss - config.entropy_weight * entropy
    return loss, surrogate.detach(), value_loss.detach(), entropy.detach()


def derived(
    mean: Tensor, log_std: Tensor, value: Tensor, action: Tensor, scalars: tuple[Tensor, ...], config: PpoSettings
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The parts of `objective`; and its gradient with respect to `mean`, `log_std` and `value`."""
    advantage, target, old_value, old_log_prob = scalars
    inverse_std, samples = (-log_std).exp(), len(value)
    noise = (action - mean) * inverse_std
    squared = noise.square()
    constant = log_std.sum() + 0.5 * math.log(2.0 * math.pi) * mean.shape[1]
    ratio = torch.add(squared.sum(1), old_log_prob, alpha=2.0).mul_(-0.5).sub_(constant).exp_()
    gain = ratio * advantage
    clipped = ratio.clamp_(1.0 - config.clip, 1.0 + config.clip).mul_(advantage)
    # Where the clipped gain is the smaller one it is constant, and pulls at nothing.
    pull = (gain * (gain <= clipped)).mul_(-1.0 / samples).unsqueeze(1)

    error = value - target
    value_loss = error.square()
    if config.clip_value:
        moved = value - old_value
        near = moved.clamp(-config.clip, config.clip)
        near_error = near + old_value - target
        near_loss = near_error.square()
        near_error *= near == moved
        error = torch.where(value_loss >= near_loss, error, near_error)
        value_loss = torch.maximum(value_loss, near_loss)

    gradients = (
        pull * noise * inverse_std,
        (pull * (squared - 1.0)).sum(0) - config.entropy_weight,
        error * (2.0 * config.value_weight / samples),
    )
    return (-torch.minimum(gain, clipped).mean(), value_loss.mean(), constant + 0.5 * mean.shape[1]), gradients


def log_prob(noise: Tensor, log_std: Tensor) -> Tensor:
    """Log density of actions that lie `noise` standard deviations from the mean, [...]."""
    return (-0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)).sum(-1)


def _entropy(log_std: Tensor) -> Tensor:
    return log_std.sum() + log_std.numel() * 0.5 * math.log(2.0 * math.pi * math.e)


def divergence(old_mean: Tensor, old_log_std: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence of the new from the old normal distribution, a scalar."""
    narrower, shift = old_log_std - log_std, (old_mean - mean).square().mean(0)
    spread = torch.addcmul(torch.expm1(2.0 * narrower), shift, (-2.0 * log_std).exp())
    return (0.5 * spread - narrower).sum()
