"""Adam (Kingma and Ba 2014) on one flat vector."""

import torch
from torch import Tensor

from paceline.distributed.gradients import FlatParameters


class FlatAdam:
    """Torch's own kernel; what torch.optim does around it for many tensors costs more than the kernel for our one."""

    def __init__(self, flat: FlatParameters, learning_rate: float):
        self._flat = flat
        self.learning_rate = torch.tensor(learning_rate, device=flat.gradient.device)
        """To be changed in place."""
        self.moments = {
            "step": torch.zeros((), device=flat.gradient.device),
            "exp_avg": torch.zeros_like(flat.gradient),
            "exp_avg_sq": torch.zeros_like(flat.gradient),
        }

    def step(self) -> None:
        """Down the gradient that is in place."""
        moments = self.moments
        moments["step"] += 1
        torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage]
            [self._flat.values.data],
            [self._flat.gradient],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [moments["step"]],
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        return {"learning_rate": self.learning_rate.clone()} | {name: t.clone() for name, t in self.moments.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.learning_rate.copy_(state["learning_rate"])
        for name, tensor in self.moments.items():
            tensor.copy_(state[name])
