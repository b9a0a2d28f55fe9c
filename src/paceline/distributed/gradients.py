"""A network's parameters, and their gradient, as flat buffers."""

import torch
from torch import Tensor, nn


class FlatParameters:
    """Makes every parameter of a module a view of `values`, beside one flat `gradient`.

    One optimiser step, one norm and one collective then serve all layers at once.
    """

    def __init__(self, module: nn.Module):
        self._parameters = list(module.parameters())
        self.values = nn.Parameter(torch.cat([p.detach().flatten() for p in self._parameters]))
        self.gradient = torch.zeros_like(self.values, requires_grad=False)
        self.values.grad = self.gradient
        start = 0
        for parameter in self._parameters:
            part = slice(start, start + parameter.numel())
            parameter.data = self.values.data[part].view_as(parameter)
            start = part.stop

    def differentiate(self, loss: Tensor) -> None:
        """Put the gradient of `loss` into `gradient`."""
        parts = torch.autograd.grad(loss, self._parameters)
        torch.cat([part.flatten() for part in parts], out=self.gradient)

    def clip(self, largest_norm: float) -> Tensor:
        """Scale the gradient down to `largest_norm`; return the norm it had."""
        norm = torch.linalg.vector_norm(self.gradient)
        self.gradient *= (largest_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm
