"""Running mean and variance of observations."""

import torch
from torch import Tensor


class RunningStatistics:
    """Mean and variance of all rows seen so far, merged a batch at a time (Chan et al. 1979)."""

    # Keeps an observation that hardly varies from being blown up to noise.
    SMALLEST_STD = 1e-2

    def __init__(self, width: int, device: torch.device):
        self.count = torch.zeros((), device=device, dtype=torch.float64)
        self.mean = torch.zeros(width, device=device)
        self.variance = torch.ones(width, device=device)
        self._scale = 1.0 / self.std()

    def merge(self, rows: Tensor) -> None:
        """Take in `rows` [..., width], in place."""
        rows = rows.flatten(0, -2)
        variance, mean = torch.var_mean(rows, dim=0, correction=0)
        total = self.count + rows.shape[0]
        share = (rows.shape[0] / total).float()
        shift = mean - self.mean
        self.variance += share * (variance - self.variance + shift.square() * (1.0 - share))
        self.mean += share * shift
        self.count.copy_(total)
        self._scale.copy_(1.0 / self.std())

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
