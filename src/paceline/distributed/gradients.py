"""Networks' parameters, and their gradient, as flat buffers."""

import torch
from torch import Tensor, nn


class FlatParameters:
    """Makes every parameter of some groups a view of `values`, beside one flat `gradient`.

    One optimiser step and one collective then serve all layers at once.
    """

    def __init__(self, *groups: list[nn.Parameter]):
        self._parameters = [parameter for group in groups for parameter in group]
        self.values = nn.Parameter(torch.cat([p.detach().flatten() for p in self._parameters]))
        self.gradient = torch.zeros_like(self.values, requires_grad=False)
        self.values.grad = self.gradient
        parts = self.values.data.split([p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.data = part.view_as(parameter)
        self._group_sizes = [sum(p.numel() for p in group) for group in groups]

    def differentiate(self, loss: Tensor) -> None:
        """Put the gradient of `loss` into `gradient`."""
        parts = torch.autograd.grad(loss, self._parameters)
        torch.cat([part.flatten() for part in parts], out=self.gradient)

    def clip(self, largest_norm: float) -> Tensor:
        """Scale each group's gradient down to `largest_norm`; return the norms they had, [group]."""
        parts = self.gradient.split(self._group_sizes)
        norms = torch.stack([torch.linalg.vector_norm(part) for part in parts])
        scales = (largest_norm / (norms + 1e-6)).clamp(max=1.0)
        self.gradient.copy_(torch.cat([part * scale for part, scale in zip(parts, scales.unbind(0), strict=True)]))
        return norms
