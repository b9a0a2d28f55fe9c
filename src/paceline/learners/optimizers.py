"""Optimizers on several ranks, and learning rates."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.learners.settings import LEARNING_RATES
from paceline.tensors.flat import pack, unpack


class KlAdaptiveLearningRate:
    """Adapts a learning rate to the KL divergence between the old and the new policy, without a host sync: it is
    divided by 1.5 above twice the desired divergence, and multiplied by 1.5 below half of it."""

    def __init__(self, desired_kl: float, device: torch.device):
        # Tensors, because an operation with a Python number costs twice as much on a CPU.
        self._low, self._high = torch.tensor((desired_kl / 2.0, desired_kl * 2.0), device=device).unbind(0)
        self._factors = torch.tensor((1.5, 1.0, 1.0 / 1.5), device=device).unbind(0)

    def update_(self, learning_rate: Tensor, kl: Tensor) -> None:
        """Change the learning rate in place."""
        faster, same, slower = self._factors
        factor = torch.where(kl > self._high, slower, torch.where(kl < self._low, faster, same))
        learning_rate.mul_(factor).clamp_(*LEARNING_RATES)


def broadcast_parameters(group: Group, parameters: Iterable[Tensor]) -> None:
    """Copy the values of the main rank into the tensors of all ranks, in place."""
    for parameter in parameters:
        # Exact, because all other ranks add zeros.
        shared = parameter.detach().clone() if group.rank.is_main else torch.zeros_like(parameter)
        parameter.detach().copy_(group.sum_(shared))


def average_gradients(group: Group, share: float, optimizer: Optimizer, *extra: Tensor) -> None:
    """Average the gradients of an optimizer, and `extra`, over ranks in place and in one collective, weighted by this
    rank's `share` of all samples."""
    if group.alone:
        return
    parameters = [parameter for part in optimizer.param_groups for parameter in part["params"]]
    tensors = [*extra, *(parameter.grad for parameter in parameters if parameter.grad is not None)]
    averages = unpack(group.sum_(pack(tensors).mul_(share)), tensors)
    for tensor, average in zip(tensors, averages, strict=True):
        tensor.copy_(average)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
