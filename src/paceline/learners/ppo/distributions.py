"""Distributions of actions: how noise becomes actions, and the objective of an update.

A distribution computes from the output of the actor, [..., num_outputs]. It samples with random numbers that are
functions of (seed, env, step).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from paceline.env.vec_env import ActionSpec
from paceline.learners import categorical
from paceline.learners.categorical import column_sums, log_softmax, most_likely, one_hot
from paceline.learners.ppo.objective import (
    Losses,
    kl_divergence,
    log_prob,
    losses_of,
    objective,
    objective_gradient,
    surrogate_gradient,
    value_gradient,
)
from paceline.learners.ppo.samples import Rollout, Samples
from paceline.learners.ppo.settings import PpoSettings
from paceline.tensors import random

Gradients = tuple[Tensor, tuple[Tensor, ...], Tensor]
"""Gradients with respect to the output of the actor, the distribution's own parameters and the value."""


class ActionDistribution(ABC):
    """Distribution of the actions around the output of the actor."""

    num_outputs: int
    """Width of the output of the actor."""
    choices: tuple[int, ...] = ()
    """Number of choices of each column of discrete actions; empty for continuous ones."""
    log_std: Tensor
    """Logarithm of the standard deviation of continuous actions, [actions]; empty for discrete actions."""
    parameters: Mapping[str, nn.Parameter] = MappingProxyType({})
    """Parameters that the actor does not output, by name."""
    metric_names: tuple[str, ...] = ()
    """Names of the numbers to log."""

    def metrics(self) -> tuple[Tensor, ...]:
        """Return the values of `metric_names`, scalars."""
        return ()

    @abstractmethod
    def sample_noise(self, seed: int, env: Tensor, step: Tensor) -> Tensor:
        """Sample the random numbers of actions, [..., num_outputs]."""

    def scale_noise(self, noise: Tensor) -> Tensor:
        """Return the argument of `act`, for all steps of a rollout."""
        return noise

    @abstractmethod
    def act(self, output: Tensor, scaled_noise: Tensor) -> Tensor:
        """Return the actions for the env, [env, actions]."""

    @abstractmethod
    def samples_of(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return `Samples.action` and `Samples.log_prob`, [step, env, ...]."""

    @abstractmethod
    def losses(self, output: Tensor, value: Tensor, samples: Samples, config: PpoSettings) -> Losses:
        """Return the losses of the networks' outputs, `output` [sample, num_outputs] and `value` [sample]."""

    @abstractmethod
    def gradient(
        self, output: Tensor, value: Tensor, samples: Samples, config: PpoSettings
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Gradients]:
        """Return the surrogate loss, value loss and entropy of `losses`, and the gradients of the total loss."""

    @abstractmethod
    def kl_divergence(self, old_output: Tensor, old_log_std: Tensor, output: Tensor) -> Tensor:
        """Return the mean KL divergence from the new to the old distribution, a scalar."""


class Gaussian(ActionDistribution):
    """Normal distribution whose standard deviation does not depend on the observations."""

    metric_names = ("policy/std",)

    def __init__(self, num_actions: int, initial_std: float, device: torch.device):
        self.num_outputs = num_actions
        self.log_std = parameter = nn.Parameter(torch.full((num_actions,), math.log(initial_std), device=device))
        self.parameters = {"log_std": parameter}

    def metrics(self) -> tuple[Tensor, ...]:
        return (self.log_std.exp().mean(),)

    def sample_noise(self, seed: int, env: Tensor, step: Tensor) -> Tensor:
        return random.normal(seed, env, step, random.Stream.ACTION, self.num_outputs)

    def scale_noise(self, noise: Tensor) -> Tensor:
        return noise * self.log_std.exp()

    def act(self, output: Tensor, scaled_noise: Tensor) -> Tensor:
        return output + scaled_noise

    def samples_of(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        return rollout.action, log_prob(rollout.noise, rollout.log_std)

    def losses(self, output: Tensor, value: Tensor, samples: Samples, config: PpoSettings) -> Losses:
        return objective(output, self.log_std, value, samples, config)

    def gradient(
        self, output: Tensor, value: Tensor, samples: Samples, config: PpoSettings
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Gradients]:
        losses, (by_mean, by_log_std, by_value) = objective_gradient(output, self.log_std, value, samples, config)
        return losses, (by_mean, (by_log_std,), by_value)

    def kl_divergence(self, old_output: Tensor, old_log_std: Tensor, output: Tensor) -> Tensor:
        return kl_divergence(old_output, old_log_std, output, self.log_std.detach())


class Categorical(ActionDistribution):
    """Independent categorical distributions, one for each column of an action. Actions are sampled by the Gumbel-max
    method."""

    def __init__(self, choices: tuple[int, ...], device: torch.device):
        self.choices, self.num_outputs = choices, sum(choices)
        self.log_std = torch.zeros(0, device=device)

    def sample_noise(self, seed: int, env: Tensor, step: Tensor) -> Tensor:
        return random.gumbel(seed, env, step, random.Stream.ACTION, self.num_outputs)

    def act(self, output: Tensor, scaled_noise: Tensor) -> Tensor:
        return most_likely(output + scaled_noise, self.choices)

    def samples_of(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        action = one_hot(rollout.action, self.choices)
        return action, (action * log_softmax(rollout.output, self.choices)).sum(-1)

    def losses(self, output: Tensor, value: Tensor, samples: Samples, config: PpoSettings) -> Losses:
        log_probs = log_softmax(output, self.choices)
        ratio = ((samples.action * log_probs).sum(-1) - samples.log_prob).exp()
        return losses_of(ratio, categorical.entropy(log_probs).mean(), value, samples, config)

    def gradient(
        self, output: Tensor, value: Tensor, samples: Samples, config: PpoSettings
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Gradients]:
        log_probs = log_softmax(output, self.choices)
        probs = log_probs.exp()
        ratio = ((samples.action * log_probs).sum(-1) - samples.log_prob).exp_()
        surrogate, by_log_prob = surrogate_gradient(ratio, samples.advantage, config.clip)
        squared_error, by_value = value_gradient(value, samples, config)
        by_output = by_log_prob.unsqueeze(1) * (samples.action - probs)
        negative_entropy = probs * log_probs
        if config.entropy_weight:
            # The derivative of the entropy of a column is -p (log p + entropy).
            by_entropy = negative_entropy - probs * column_sums(negative_entropy, self.choices)
            by_output.add_(by_entropy, alpha=config.entropy_weight / len(value))
        return (surrogate, squared_error, -negative_entropy.sum(-1).mean()), (by_output, (), by_value)

    def kl_divergence(self, old_output: Tensor, old_log_std: Tensor, output: Tensor) -> Tensor:
        log_probs = (log_softmax(logits, self.choices) for logits in (old_output, output))
        return categorical.kl_divergence(*log_probs).mean()


def make_distribution(actions: ActionSpec, initial_std: float, device: torch.device) -> ActionDistribution:
    """Return the distribution of the actions of an env."""
    if actions.choices:
        return Categorical(actions.choices, device)
    return Gaussian(actions.width, initial_std, device)
