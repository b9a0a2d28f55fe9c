"""Optimizers on several ranks, and learning rates."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.learners.rollout import RolloutEnv
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


class GradientHook:
    """Averages the gradient over ranks in one collective, and clips it, before each step of an optimizer."""

    def __init__(self, optimizer: Optimizer, rollout_env: RolloutEnv, max_norm: float | None):
        self._group, self._share, self._max_norm = rollout_env.group, rollout_env.share, max_norm
        self.kl = torch.zeros((), device=rollout_env.env.device)
        """KL divergence of the minibatch, which is averaged as well."""
        optimizer.register_step_pre_hook(self._average_and_clip)

    def _average_and_clip(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._group.is_distributed:
            tensors = [self.kl, *(parameter.grad for parameter in parameters if parameter.grad is not None)]
            averages = unpack(self._group.sum_(pack(tensors).mul_(self._share)), tensors)
            for tensor, average in zip(tensors, averages, strict=True):
                tensor.copy_(average)
        if self._max_norm is not None:
            clip_grad_norm_(parameters, self._max_norm)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
