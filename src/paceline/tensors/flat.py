"""Parameters of networks, their gradient and Adam's moments as flat buffers."""

import math
from itertools import accumulate

import torch
from torch import Tensor, nn

# Each parameter starts at a multiple of so many numbers: a GPU's fastest products want their matrices to start at
# multiples of 16 bytes (measured on an H200 with 29 actions, whose log_std lies before the rest: an update in 0.81 of
# the time).
_ALIGNMENT = 32


class FlatParameters:
    """Makes every parameter of some groups a view of `values`, beside one flat `gradient`.

    One optimiser step serves all layers at once; and so does one collective of `message`, which is the gradient and
    `beside` it as many other numbers. Between parameters may lie numbers that belong to none and are zero.
    """

    def __init__(self, *groups: list[nn.Parameter], beside: int = 0):
        self._parameters = [parameter for group in groups for parameter in group]
        self._sizes = [p.numel() for p in self._parameters]
        device = self._parameters[0].device
        self._between = [torch.zeros(-size % _ALIGNMENT, device=device) for size in self._sizes]
        spans = [size + len(between) for size, between in zip(self._sizes, self._between, strict=True)]
        self._places: dict[Tensor, int] = dict(zip(self._parameters, accumulate(spans, initial=0), strict=False))
        self.values = nn.Parameter(self.spread(torch.cat([p.detach().flatten() for p in self._parameters])))
        self.message = torch.zeros(self.values.numel() + beside, device=device)
        self.gradient, self.beside = self.message.split((self.values.numel(), beside))
        self.values.grad = self.gradient
        for parameter in self._parameters:
            parameter.data = self.together(parameter)[0]
        sizes = iter(spans)
        self._groups = self.gradient.split([sum(next(sizes) for _ in group) for group in groups])

    def spread(self, dense: Tensor) -> Tensor:
        """A vector like `values`, of one that has the parameters' numbers without what lies between them."""
        parts = zip(dense.split(self._sizes), self._between, strict=True)
        return torch.cat([piece for part in parts for piece in part])

    def dense(self, spread: Tensor) -> Tensor:
        """The reverse of `spread`."""
        pairs = zip(self._places.values(), self._sizes, strict=True)
        return torch.cat([spread[place : place + size] for place, size in pairs])

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
        parts = zip(torch.autograd.grad(loss, self._parameters), self._between, strict=True)
        torch.cat([piece for part, between in parts for piece in (part.flatten(), between)], out=self.gradient)

    def clip(self, largest_norm: float) -> tuple[Tensor, ...]:
        """Scale each group's gradient down to `largest_norm`; return the norm each had."""
        norms = tuple(torch.linalg.vector_norm(group) for group in self._groups)
        for group, norm in zip(self._groups, norms, strict=True):
            group.mul_((largest_norm / norm).clamp(max=1.0))
        return norms


class FlatAdam:
    """Adam (Kingma and Ba 2014) on one flat vector, by torch's own kernel: what torch.optim does around it for many
    tensors takes longer than the kernel itself."""

    def __init__(self, flat: FlatParameters, learning_rate: float):
        self._flat = flat
        device = flat.gradient.device
        self.learning_rate = torch.tensor(learning_rate, device=device)
        """To be changed in place."""
        self._count = torch.zeros((), device=device)
        self._moments = {name: torch.zeros_like(flat.gradient) for name in ("exp_avg", "exp_avg_sq")}
        # On a GPU one block of threads does up to 65,536 numbers of a tensor: pieces keep more blocks busy, and no more
        # than these go in one launch (measured on an H200: 450,000 numbers in 9 us, 28 us as one piece).
        piece = math.ceil(len(flat.gradient) / (36 if device.type == "cuda" else 1))
        vectors = (flat.values.data, flat.gradient, *self._moments.values())
        self._pieces = [list(vector.split(piece)) for vector in vectors]

    def step(self) -> None:
        """Down the gradient that is in place."""
        self._count += 1
        values, gradients, averages, squares = self._pieces
        torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage]
            values,
            gradients,
            averages,
            squares,
            [],
            [self._count] * len(values),
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        moments = {name: self._flat.dense(moment) for name, moment in self._moments.items()}
        return {"learning_rate": self.learning_rate.clone(), "step": self._count.clone(), **moments}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.learning_rate.copy_(state["learning_rate"])
        self._count.copy_(state["step"])
        for name, moment in self._moments.items():
            moment.copy_(self._flat.spread(state[name].to(moment)))
