"""PPO's objective against torch's own distributions and autograd."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.distributions import kl_divergence as torch_kl_divergence

from paceline.learners.ppo.objective import kl_divergence, log_prob, objective, objective_gradient
from paceline.learners.ppo.samples import Samples
from paceline.learners.ppo.settings import PpoSettings

SAMPLES, ACTIONS = 200, 3
CONFIG = PpoSettings(entropy_weight=0.01, value_weight=0.5)


def sample(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch() -> tuple[tuple[Tensor, Tensor, Tensor], Samples]:
    """Return outputs of the networks, and samples of which some are clipped and some are not."""
    mean, log_std, value = sample(SAMPLES, ACTIONS, seed=0), 0.2 * sample(ACTIONS, seed=1), sample(SAMPLES, seed=2)
    action = mean + log_std.exp() * sample(SAMPLES, ACTIONS, seed=3)
    old_log_prob = Normal(mean, log_std.exp()).log_prob(action).sum(1) + 0.3 * sample(SAMPLES, seed=4)
    samples = Samples(
        obs={},
        action=action,
        output=mean,
        advantage=sample(SAMPLES, seed=5),
        value_target=sample(SAMPLES, seed=6),
        value=value + 0.3 * sample(SAMPLES, seed=7),
        log_prob=old_log_prob,
    )
    for output in (mean, log_std, value):
        output.requires_grad_()
    return (mean, log_std, value), samples


def reference(outputs: tuple[Tensor, Tensor, Tensor], samples: Samples, config: PpoSettings) -> Tensor:
    """Compute the objective with torch's distributions."""
    (mean, log_std, value), advantage, target, old_value = (
        outputs,
        samples.advantage,
        samples.value_target,
        samples.value,
    )
    normal = Normal(mean, log_std.exp())
    ratio = torch.exp(normal.log_prob(samples.action).sum(1) - samples.log_prob)
    assert 0.2 < ((ratio - 1.0).abs() > config.clip).double().mean() < 0.8
    gain = torch.min(ratio * advantage, ratio.clip(1 - config.clip, 1 + config.clip) * advantage).mean()
    value_loss = (value - target) ** 2
    if config.clip_value:
        near = old_value + (value - old_value).clip(-config.clip, config.clip)
        value_loss = torch.max(value_loss, (near - target) ** 2)
    entropy = normal.entropy().sum(1).mean()
    return -gain + config.value_weight * value_loss.mean() - config.entropy_weight * entropy


@pytest.mark.parametrize("clip_value", [True, False])
def test_objective_equals_the_reference_in_loss_and_gradient(clip_value: bool):
    config = dataclasses.replace(CONFIG, clip_value=clip_value)
    outputs, samples = batch()
    expected = reference(outputs, samples, config)
    loss, surrogate, value_loss, entropy = objective(*outputs, samples, config)
    torch.testing.assert_close(loss, expected)
    parts = surrogate + config.value_weight * value_loss - config.entropy_weight * entropy
    torch.testing.assert_close(parts, expected.detach())
    gradients = torch.autograd.grad(expected, outputs)
    torch.testing.assert_close(torch.autograd.grad(loss, outputs), gradients)


@pytest.mark.parametrize("clip_value", [True, False])
def test_objective_gradient_equals_autograd_of_the_objective(clip_value: bool):
    config = dataclasses.replace(CONFIG, clip_value=clip_value)
    outputs, samples = batch()
    loss, *parts = objective(*outputs, samples, config)
    with torch.no_grad():
        by_hand, gradients = objective_gradient(*outputs, samples, config)
    torch.testing.assert_close(list(by_hand), parts)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss, outputs))


def test_log_prob_equals_that_of_torch_normal():
    (mean, log_std, _), samples = batch()
    expected = Normal(mean, log_std.exp()).log_prob(samples.action).sum(1)
    torch.testing.assert_close(log_prob((samples.action - mean) / log_std.exp(), log_std), expected)


def test_kl_divergence_equals_that_of_torch_normal():
    old, new, old_log_std, log_std = sample(50, 3, seed=0), sample(50, 3, seed=1), sample(3, seed=2), sample(3, seed=3)
    expected = torch_kl_divergence(Normal(old, old_log_std.exp()), Normal(new, log_std.exp())).sum(1).mean()
    torch.testing.assert_close(kl_divergence(old, old_log_std, new, log_std), expected)
