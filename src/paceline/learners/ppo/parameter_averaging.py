"""Averages of parameters in place of gradients, for slow links between ranks.

Each rank updates its networks with its own samples for some iterations. Then the ranks synchronize, which takes the
time of one collective: they average their parameters and merge their statistics.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.tensors.flat import FlatAdam, pack, unpack
from paceline.tensors.statistics import RunningStatistics, shift_origin

OUTER_STEP = 1.0, 0.3
"""Outer learning rate and momentum of `--sync periodic`. Those of DiLoCo, 0.7 and 0.9, multiply a steady change of the
parameters by 7, which is too much for PPO: cartpole stops learning at two thirds of the return. These multiply it by
1.4."""
_NUM_FAULTS = 2
"""Number of columns of `VecEnv.faults`, which are the last of `RolloutEnv.totals`."""


@dataclass(frozen=True)
class Averaging:
    """Settings of `ParameterAveraging`."""

    every: int = 1
    """Number of iterations after which the ranks synchronize."""
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    """Learning rate and Nesterov momentum of the outer optimizer, whose gradient is the difference between the
    parameters of the latest sync and their new average (DiLoCo, Douillard et al. 2023). With 1 and 0, the average
    replaces the parameters."""


class ParameterAveraging:
    """Averages parameters, Adam's moments and `adapted`, other tensors that each rank changes, over ranks. A rank has
    the weight `share`, its fraction of all samples.

    After a sync all ranks have the same values. Statistics of observations become those over the samples of all ranks,
    and those of episodes are summed. Between syncs, `normalizers` of a rank include only its own samples.
    """

    def __init__(
        self,
        settings: Averaging,
        group: Group,
        share: float,
        optimizers: Sequence[FlatAdam],
        adapted: Sequence[Tensor],
        normalizers: dict[str, RunningStatistics],
        num_totals: int,
    ):
        self._settings, self._group, self._share = settings, group, share
        self._flats = [adam.flat for adam in optimizers]
        self._parameters = [flat.values.data for flat in self._flats]
        self._others = [*(moment for adam in optimizers for moment in adam.moments.values()), *adapted]
        self._own_normalizers = normalizers
        self._reference = [parameter.clone() for parameter in self._parameters]
        self._momentum = [torch.zeros_like(parameter) for parameter in self._parameters]
        device = self._parameters[0].device
        self.normalizers = {name: RunningStatistics(len(own.mean), device) for name, own in normalizers.items()}
        """Statistics of the latest sync, the same on all ranks."""
        self._totals = torch.zeros(num_totals, dtype=torch.float64, device=device)
        self._row_sums = [self._totals.new_zeros(3, len(own.mean)) for own in normalizers.values()]
        self._merged_totals = torch.zeros_like(self._totals)
        self._iterations = 0

    def add(self, totals: Tensor, row_sums: Sequence[Tensor]) -> None:
        """Add the statistics of an iteration on this rank: `RolloutEnv.totals`, and `RunningStatistics.sums` of each
        normalizer, before they are merged into it."""
        self._totals[:-_NUM_FAULTS] += totals[:-_NUM_FAULTS]
        self._totals[-_NUM_FAULTS:] = totals[-_NUM_FAULTS:]
        for name, total, sums in zip(self.normalizers, self._row_sums, row_sums, strict=True):
            total += shift_origin(sums, self._own_normalizers[name].mean - self.normalizers[name].mean)

    @torch.no_grad()
    def end_iteration(self, values: Tensor) -> Tensor:
        """Synchronize if it is due. `values` are the totals and losses of an iteration. Return the totals of all ranks
        that have not been returned yet, and the losses: averages if the ranks have synchronized, and otherwise those of
        this rank."""
        self._iterations += 1
        losses = values[len(self._totals) :]
        if self._iterations == self._settings.every:
            losses = self._sync(losses)
        result = torch.cat((self._merged_totals, losses))
        self._merged_totals[:-_NUM_FAULTS] = 0.0
        return result

    @torch.no_grad()
    def finish_period(self) -> None:
        """Synchronize now, unless nothing has changed since the latest sync."""
        if self._iterations:
            self._sync(self._totals.new_zeros(0))

    @contextmanager
    def latest_sync(self) -> Iterator[None]:
        """Replace the parameters by those of the latest sync, which are the same on all ranks, within the context."""
        current = [parameter.clone() for parameter in self._parameters]
        _copy(self._reference, self._parameters)
        try:
            yield
        finally:
            _copy(current, self._parameters)

    def _sync(self, losses: Tensor) -> Tensor:
        tensors = [*self._parameters, *self._others, losses.float()]
        message = pack(tensors).mul_(self._share)
        finish = self._group.begin_sum_(message)
        sums = [self._totals, *self._row_sums]
        totals, *row_sums = unpack(self._group.sum_(pack(sums)), sums)
        finish()
        *averages, losses = unpack(message, tensors)
        self._outer_step(averages[: len(self._parameters)])
        _copy(averages[len(self._parameters) :], self._others)
        for name, merged in zip(self.normalizers, row_sums, strict=True):
            self.normalizers[name].merge(merged)
            self._own_normalizers[name].load_state(self.normalizers[name].state())
        self._merged_totals[:-_NUM_FAULTS] += totals[:-_NUM_FAULTS]
        self._merged_totals[-_NUM_FAULTS:] = totals[-_NUM_FAULTS:]
        for pending in sums:
            pending.zero_()
        self._iterations = 0
        return losses

    def _outer_step(self, averages: list[Tensor]) -> None:
        rate, momentum = self._settings.outer_learning_rate, self._settings.outer_momentum
        if (rate, momentum) == (1.0, 0.0):
            # Without an outer optimizer one rank computes bit by bit what it computes without averages.
            _copy(averages, self._reference)
        else:
            for reference, velocity, average in zip(self._reference, self._momentum, averages, strict=True):
                change = average - reference
                velocity.mul_(momentum).add_(change)
                reference.add_(change.add_(velocity, alpha=momentum), alpha=rate)
        _copy(self._reference, self._parameters)

    def state(self) -> dict[str, Any]:
        """Return what is the same on all ranks after a sync, except the parameters, Adam and the normalizers."""
        momentum = [flat.unpad(velocity) for flat, velocity in zip(self._flats, self._momentum, strict=True)]
        return {"momentum": pack(momentum), "totals": self._merged_totals.clone()}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore a state after the parameters, Adam and the normalizers have been restored. Without a state, that of a
        run without averages, start with zeros."""
        if state:
            dense = [flat.unpad(flat.values.data) for flat in self._flats]
            for flat, velocity, part in zip(self._flats, self._momentum, unpack(state["momentum"], dense), strict=True):
                velocity.copy_(flat.pad(part.to(velocity)))
            self._merged_totals.copy_(state["totals"])
        _copy(self._parameters, self._reference)
        for name, own in self._own_normalizers.items():
            self.normalizers[name].load_state(own.state())


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
