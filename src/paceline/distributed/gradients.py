"""Networks' parameters, and their gradient, as flat buffers."""

from itertools import accumulate

import torch
from torch import Tensor, nn


class FlatParameters:
    """Makes every parameter of some groups a view of `values`, beside one flat `gradient`.

    One optimiser step serves all layers at once; and so does one collective of `message`, which is the gradient and
    `beside` it as many other numbers.
    """

    def __init__(self, *groups: list[nn.Parameter], beside: int = 0):
        self._parameters = [parameter for group in groups for parameter in group]
        self.values = nn.Parameter(torch.cat([p.detach().flatten() for p in self._parameters]))
        self.message = torch.zeros(self.values.numel() + beside, device=self.values.device)
        self.gradient, self.beside = self.message.split((self.values.numel(), beside))
        self.values.grad = self.gradient
        sizes = [p.numel() for p in self._parameters]
        for parameter, part in zip(self._parameters, self.values.data.split(sizes), strict=True):
            parameter.data = part.view_as(parameter)
        self._places: dict[Tensor, int] = dict(zip(self._parameters, accumulate(sizes, initial=0), strict=False))
        self._groups = self.gradient.split([sum(p.numel() for p in group) for group in groups])

    def together(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the gradient of one parameter, or of two of the same shape as one tensor [2, ...]; views."""
        first, second = self._places[parameters[0]], self._places[parameters[-1]]
        shape, stride = parameters[0].shape, parameters[0].stride()
        if len(parameters) > 1:
            shape, stride = (2, *shape), (second - first, *stride)
        values, gradient = (flat.as_strided(shape, stride, first) for flat in (self.values.data, self.gradient))
        return values, gradient

    def differentiate(self, loss: Tensor) -> None:
        """Put the gradient of `loss` into `gradient`."""
        parts = torch.autograd.grad(loss, self._parameters)
        torch.cat([part.flatten() for part in parts], out=self.gradient)

    def clip(self, largest_norm: float) -> tuple[Tensor, ...]:
        """Scale each group's gradient down to `largest_norm`; return the norm each had."""
        norms = tuple(torch.linalg.vector_norm(group) for group in self._groups)
        for group, norm in zip(self._groups, norms, strict=True):
            group.mul_((largest_norm / norm).clamp(max=1.0))
        return norms
