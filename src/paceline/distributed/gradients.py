"""A network's parameters and gradients as two flat buffers."""

import torch
from torch import Tensor, nn


class FlatParameters:
    """Makes every parameter a view of `values` and every gradient a view of `gradient`.

    One optimiser step, one norm and one collective then serve all layers at once.
    """

    def __init__(self, module: nn.Module):
        parameters = list(module.parameters())
        self.values = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
        self.gradient = torch.zeros_like(self.values)
        self.values.grad = self.gradient
        start = 0
        for parameter in parameters:
            part = slice(start, start + parameter.numel())
            parameter.data = self.values.data[part].view_as(parameter)
            parameter.grad = self.gradient[part].view_as(parameter)
            start = part.stop

    def clip(self, largest_norm: float) -> Tensor:
        """Scale the gradient down to `largest_norm`; return the norm it had."""
        norm = torch.linalg.vector_norm(self.gradient)
        self.gradient *= (largest_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm
