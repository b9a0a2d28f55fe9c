"""Categorical distributions of discrete actions.

An action has one or more columns. `choices` is the number of choices of each column, and logits have one entry for each
choice of each column, [..., sum(choices)].
"""

import torch
from torch import Tensor, nn

from paceline.learners.networks import with_layers


def log_softmax(logits: Tensor, choices: tuple[int, ...]) -> Tensor:
    """Return the log-probabilities of all choices, in the shape of `logits`."""
    return torch.cat([column.log_softmax(-1) for column in logits.split(choices, -1)], dim=-1)


def most_likely(logits: Tensor, choices: tuple[int, ...]) -> Tensor:
    """Return the choice with the largest logit in each column, int64 [..., column]."""
    return torch.stack([column.argmax(-1) for column in logits.split(choices, -1)], dim=-1)


def one_hot(actions: Tensor, choices: tuple[int, ...]) -> Tensor:
    """Return 1 for each choice that is taken and 0 for the others, float32 [..., sum(choices)]. `actions` is [...,
    column]."""
    numbers = [torch.arange(count, device=actions.device) for count in choices]
    return torch.cat([actions[..., i, None] == each for i, each in enumerate(numbers)], dim=-1).float()


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy of distributions, [...], summed over the columns."""
    return -(log_probs.exp() * log_probs).sum(-1)


def kl_divergence(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return the KL divergence from the new to the old distributions, [...], summed over the columns."""
    return (old_log_probs.exp() * (old_log_probs - log_probs)).sum(-1)


def column_sums(values: Tensor, choices: tuple[int, ...]) -> Tensor:
    """Return the sum over the choices of each column, repeated for each of them, in the shape of `values`."""
    columns = values.split(choices, -1)
    return torch.cat([column.sum(-1, keepdim=True).expand_as(column) for column in columns], dim=-1)


class MostLikely(nn.Module):
    """Last layer of a policy with discrete actions: the most likely choices, int64 [batch, column], from logits."""

    def __init__(self, choices: tuple[int, ...]):
        super().__init__()
        self._choices = choices

    def forward(self, logits: Tensor) -> Tensor:
        return most_likely(logits, self._choices)


def with_choices(network: nn.Module, choices: tuple[int, ...]) -> nn.Module:
    """Return a network that computes actions from one that computes means or, with `choices`, logits."""
    return with_layers(network, MostLikely(choices)) if choices else network
