"""PPO's objective against torch's own distributions and autograd."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from paceline.learners.ppo.objective import derived, divergence, log_prob, objective
from paceline.learners.ppo.settings import PpoSettings

SAMPLES, ACTIONS = 200, 3
CONFIG = PpoSettings(entropy_weight=0.01, value_weight=0.5)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, tuple[Tensor, ...]]:
    """Outputs of the networks, actions and scalars, such that some samples are clipped and some are not."""
    mean, log_std, value = draw(SAMPLES, ACTIONS, seed=0), 0.2 * draw(ACTIONS, seed=1), draw(SAMPLES, seed=2)
    action = mean + log_std.exp() * draw(SAMPLES, ACTIONS, seed=3)
    old_log_prob = Normal(mean, log_std.exp()).log_prob(action).sum(1) + 0.3 * draw(SAMPLES, seed=4)
    scalars = (draw(SAMPLES, seed=5), draw(SAMPLES, seed=6), value + 0.3 * draw(SAMPLES, seed=7), old_log_prob)
    for output in (mean, log_std, value):
        output.requires_grad_()
    return (mean, log_std, value), action, scalars


def reference(outputs: tuple[Tensor, Tensor, Tensor], action: Tensor, scalars: tuple[Tensor, ...], config: PpoSettings):
    """The objective once more, from torch's distributions."""
    (mean, log_std, value), (advantage, target, old_value, old_log_prob) = outputs, scalars
    normal = Normal(mean, log_std.exp())
    ratio = torch.exp(normal.log_prob(action).sum(1) - old_log_prob)
    assert 0.2 < ((ratio - 1.0).abs() > config.clip).double().mean() < 0.8
    gain = torch.min(ratio * advantage, ratio.clip(1 - config.clip, 1 + config.clip) * advantage).mean()
    value_loss = (value - target) ** 2
    if config.clip_value:
        near = old_value + (value - old_value).clip(-config.clip, config.clip)
        value_loss = torch.max(value_loss, (near - target) ** 2)
    entropy = normal.entropy().sum(1).mean()
    return -gain + config.value_weight * value_loss.mean() - config.entropy_weight * entropy


@pytest.mark.parametrize("clip_value", [True, False])
def test_loss_and_gradient_are_those_of_the_clipped_objective(clip_value: bool):
    config = dataclasses.replace(CONFIG, clip_value=clip_value)
    outputs, action, scalars = batch()
    expected = reference(outputs, action, scalars, config)
    loss, surrogate, value_loss, entropy = objective(*outputs, action, scalars, config)
    torch.testing.assert_close(loss, expected)
    parts = surrogate + config.value_weight * value_loss - config.entropy_weight * entropy
    torch.testing.assert_close(parts, expected.detach())
    theirs = torch.autograd.grad(expected, outputs)
    torch.testing.assert_close(torch.autograd.grad(loss, outputs), theirs)


@pytest.mark.parametrize("clip_value", [True, False])
def test_the_hand_derived_form_has_the_same_parts_and_gradient(clip_value: bool):
    config = dataclasses.replace(CONFIG, clip_value=clip_value)
    outputs, action, scalars = batch()
    loss, *parts = objective(*outputs, action, scalars, config)
    with torch.no_grad():
        by_hand, gradients = derived(*outputs, action, scalars, config)
    torch.testing.assert_close(list(by_hand), parts)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss, outputs))


def test_log_probabilities_are_those_of_a_normal_distribution():
    (mean, log_std, _), action, _ = batch()
    expected = Normal(mean, log_std.exp()).log_prob(action).sum(1)
    torch.testing.assert_close(log_prob((action - mean) / log_std.exp(), log_std), expected)


def test_the_divergence_is_that_of_two_normal_distributions():
    old, new, old_log_std, log_std = draw(50, 3, seed=0), draw(50, 3, seed=1), draw(3, seed=2), draw(3, seed=3)
    expected = kl_divergence(Normal(old, old_log_std.exp()), Normal(new, log_std.exp())).sum(1).mean()
    torch.testing.assert_close(divergence(old, old_log_std, new, log_std), expected)
