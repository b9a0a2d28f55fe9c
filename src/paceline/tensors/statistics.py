"""Running mean and variance of observations."""

from collections.abc import Callable

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks in place, and returns it; see `Group.sum_`."""


def sums(rows: Tensor, origin: Tensor | float = 0.0) -> Tensor:
    """Of `rows` [..., width] less `origin`, and of the squares of that, float64 [2, width]. They are taken about the
    rows' own mean and then moved, so that nothing is lost where the mean is much larger than the spread."""
    rows = rows.flatten(0, -2)
    variance, mean = torch.var_mean(rows, dim=0, correction=0)
    shift = (mean - origin).double()
    return torch.stack((shift, variance + shift.square())) * rows.shape[0]


def moments(sum_: Sum, rows: Tensor, origin: Tensor | float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows [..., width] that all ranks have: how many, their mean and their variance, float64. An `origin` near
    the mean keeps the variance exact."""
    own = sums(rows, origin)
    count = torch.full_like(own[:1], rows.numel() // rows.shape[-1])
    count, total, squares = sum_(torch.cat((count, own))).unbind(0)
    shift = total / count
    # Rounding may take what never varies below zero, and its root would not be a number.
    variance = (squares / count - shift.square()).clamp(min=0.0)
    return count[0], shift + origin, variance


def standardized(sum_: Sum, rows: Tensor) -> Tensor:
    """With zero mean and unit spread over the rows [..., 1] of all ranks."""
    count, mean, variance = moments(sum_, rows)
    spread = (variance * count / (count - 1.0).clamp(min=1.0)).sqrt()
    return (rows - mean.float()) / (spread.float() + 1e-8)


class RunningStatistics:
    """Mean and variance of all rows seen so far, merged a batch at a time (Chan et al. 1979)."""

    # Keeps an observation that hardly varies from being blown up to noise.
    SMALLEST_STD = 1e-2

    def __init__(self, width: int, device: torch.device):
        self.count = torch.zeros((), device=device, dtype=torch.float64)
        self.mean = torch.zeros(width, device=device)
        self.variance = torch.ones(width, device=device)
        self._scale = 1.0 / self.std()

    def merge(self, count: Tensor, sums: Tensor) -> None:
        """Take in so many rows, by what `sums` said of them, in place."""
        shift, square = (sums / count).unbind(0)
        total = self.count + count
        share = count / total
        # Rounding may take what never varies below zero, and its root would not be a number.
        variance = (square - shift.square()).clamp(min=0.0)
        self.variance += share * (variance - self.variance + shift.square() * (1.0 - share))
        self.mean += share * shift
        self.count.copy_(total)
        self._scale.copy_(1.0 / self.std())

    def sums(self, rows: Tensor) -> Tensor:
        """Of deviations from the present mean, and of their squares, float64 [2, width]: ranks can add theirs up."""
        return sums(rows, self.mean)

    def std(self) -> Tensor:
        return self.variance.sqrt() + self.SMALLEST_STD

    def normalize(self, rows: Tensor) -> Tensor:
        return (rows - self.mean) * self._scale

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count.clone(), "mean": self.mean.clone(), "variance": self.variance.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.count.copy_(state["count"])
        self.mean.copy_(state["mean"])
        self.variance.copy_(state["variance"])
        self._scale.copy_(1.0 / self.std())
