"""Mean and variance of rows, over all ranks and over time."""

import torch
from torch import Tensor


def row_sums(rows: Tensor, origin: Tensor | float = 0.0) -> Tensor:
    """Return the count, the sum and the sum of squares of `rows - origin`, float64 [3, width]; `rows` is [..., width].

    The results of several ranks can be added up. An `origin` near the mean keeps the variance exact: both sums are
    computed about the mean of the rows and then shifted, so no precision is lost where the mean is much larger than the
    standard deviation.
    """
    rows = rows.flatten(0, -2)
    variance, mean = torch.var_mean(rows, dim=0, correction=0)
    shift = (mean - origin).double()
    return torch.stack((torch.ones_like(shift), shift, variance + shift.square())) * rows.shape[0]


def shift_origin(sums: Tensor, offset: Tensor) -> Tensor:
    """Return `row_sums(rows, origin - offset)` from `row_sums(rows, origin)`."""
    count, total, squares = sums.unbind(0)
    return torch.stack((count, total + count * offset, squares + 2.0 * offset * total + count * offset.square()))


def mean_and_variance(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean, relative to the origin, and the variance of the rows of `row_sums`, float64 [width]."""
    count, total, squares = sums.unbind(0)
    mean = total / count
    # Rounding can make the variance of constant rows negative, and its square root NaN.
    return mean, (squares / count - mean.square()).clamp(min=0.0)


def standardize(rows: Tensor, sums: Tensor, correction: int = 1) -> Tensor:
    """Return (rows - mean) / std, [..., width], with the mean and the standard deviation of `sums`, which `row_sums`
    computed about the origin 0. `correction` is that of `torch.std`."""
    mean, variance = mean_and_variance(sums)
    std = (variance * (sums[0] / (sums[0] - correction).clamp(min=1.0))).sqrt()
    return (rows - mean.float()) / (std.float() + 1e-8)


def merge_(count: Tensor, mean: Tensor, variance: Tensor, sums: Tensor) -> None:
    """Merge rows into running statistics in place (Chan et al. 1979). `sums` is `row_sums(rows, mean)`, which may be
    added up over ranks."""
    shift, rows_variance = mean_and_variance(sums)
    total = count + sums[0, 0]
    share = sums[0, 0] / total
    variance += share * (rows_variance - variance + shift.square() * (1.0 - share))
    mean += share * shift
    count.copy_(total)


class RunningStatistics:
    """Mean and variance of all rows seen so far."""

    # Limits the amplification of noise in an observation that hardly varies.
    SMALLEST_STD = 1e-2

    def __init__(self, width: int, device: torch.device):
        self.count = torch.zeros((), device=device, dtype=torch.float64)
        self.mean = torch.zeros(width, device=device)
        self.variance = torch.ones(width, device=device)
        self._scale = 1.0 / self.std()

    def sums(self, rows: Tensor) -> Tensor:
        """Return the argument of `merge` for rows [..., width]. The results of several ranks can be added up."""
        return row_sums(rows, self.mean)

    def merge(self, sums: Tensor) -> None:
        """Include the rows of `sums`."""
        merge_(self.count, self.mean, self.variance, sums)
        self._scale.copy_(1.0 / self.std())

    def std(self) -> Tensor:
        """Return the standard deviation by which rows are normalized."""
        return self.variance.sqrt() + self.SMALLEST_STD

    def normalize(self, rows: Tensor) -> Tensor:
        return (rows - self.mean) * self._scale

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in ("count", "mean", "variance")}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name in self.state():
            getattr(self, name).copy_(state[name])
        self._scale.copy_(1.0 / self.std())
