"""Parameters of networks, their gradient and Adam's moments as flat buffers."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

# Each parameter starts at a multiple of this number of elements: the fastest matrix products on a GPU need matrices
# that start at multiples of 16 bytes (measured on an H200 with 29 actions, whose log_std lies before the other
# parameters: an update takes 0.81 of the time).
_ALIGNMENT = 32


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of the tensors in one vector, for example to sum them over ranks in one collective."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def unpack(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector of `pack` into views with the shapes of `like`."""
    parts = vector.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


class FlatParameters:
    """Makes every parameter of some groups a view of the vector `values`, with one flat `gradient`.

    One optimizer step updates all layers at once. One sum over ranks of `message` covers the gradient and `extra`, a
    few more numbers. The padding between parameters is zero.
    """

    def __init__(self, *groups: list[nn.Parameter], extra: int = 0):
        self._parameters = [parameter for group in groups for parameter in group]
        self._sizes, device = [p.numel() for p in self._parameters], self._parameters[0].device
        self._padding = [torch.zeros(-size % _ALIGNMENT, device=device) for size in self._sizes]
        # Elements of each parameter, then its padding.
        self._layout = [n for size in self._sizes for n in (size, -size % _ALIGNMENT)]
        starts = list(accumulate(self._layout, initial=0))[::2]
        self._offsets: dict[Tensor, int] = dict(zip(self._parameters, starts, strict=False))
        self.values = nn.Parameter(self.pad(pack([p.detach() for p in self._parameters])))
        self.message = torch.zeros(self.values.numel() + extra, device=device)
        self.gradient, self.extra = self.message.split((self.values.numel(), extra))
        self.values.grad = self.gradient
        for parameter in self._parameters:
            parameter.data = self.views(parameter)[0]
        ends = list(accumulate(len(group) for group in groups))
        self._groups = self.gradient.tensor_split([starts[end] for end in ends[:-1]])

    def pad(self, dense: Tensor) -> Tensor:
        """Return a vector laid out like `values` from one that has the elements of the parameters only."""
        parts = zip(dense.split(self._sizes), self._padding, strict=True)
        return torch.cat([piece for part in parts for piece in part])

    def unpad(self, padded: Tensor) -> Tensor:
        """Undo `pad`."""
        return torch.cat(padded.split(self._layout)[::2])

    def views(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the values and of the gradient of one parameter, or of two parameters of the same shape
        stacked into one tensor [2, ...]."""
        first, second = self._offsets[parameters[0]], self._offsets[parameters[-1]]
        shape, stride = parameters[0].shape, parameters[0].stride()
        if len(parameters) > 1:
            shape, stride = (2, *shape), (second - first, *stride)
        values, gradient = (flat.as_strided(shape, stride, first) for flat in (self.values.data, self.gradient))
        return values, gradient

    def backward(self, loss: Tensor) -> None:
        """Write the gradient of `loss` into `gradient`."""
        parts = zip(torch.autograd.grad(loss, self._parameters), self._padding, strict=True)
        torch.cat([piece for part, padding in parts for piece in (part.flatten(), padding)], out=self.gradient)

    def begin_average(
        self, begin_sum: Callable[[Tensor], Callable[[], None]], share: float, extra: Sequence[Tensor]
    ) -> Callable[[], Tensor]:
        """Begin to average the gradient and the scalars `extra` over ranks in one collective, weighted by this rank's
        `share` of all samples. The returned function waits for the result and returns the averages of `extra`.
        `begin_sum` is `Group.begin_sum_`."""
        torch.stack(tuple(extra), out=self.extra)
        wait = begin_sum(self.message.mul_(share))

        def finish() -> Tensor:
            wait()
            return self.extra.clone()

        return finish

    def clip(self, max_norm: float) -> tuple[Tensor, ...]:
        """Clip the norm of the gradient of each group to `max_norm` and return the norms before clipping."""
        norms = tuple(torch.linalg.vector_norm(group) for group in self._groups)
        for group, norm in zip(self._groups, norms, strict=True):
            group.mul_((max_norm / norm).clamp(max=1.0))
        return norms


class FlatAdam:
    """Adam (Kingma and Ba 2014) on one flat vector. It calls torch's fused kernel directly, because torch.optim spends
    more time around the kernel than in it."""

    def __init__(self, flat: FlatParameters, learning_rate: float):
        self.flat = flat
        device = flat.gradient.device
        self.learning_rate = torch.tensor(learning_rate, device=device)
        """Learning rate; change it in place."""
        self._count = torch.zeros((), device=device)
        self.moments = {name: torch.zeros_like(flat.gradient) for name in ("exp_avg", "exp_avg_sq")}
        """First and second moment, laid out like the parameters."""
        # On a GPU one thread block processes up to 65,536 elements of a tensor. 36 pieces keep more blocks busy and fit
        # into one launch (measured on an H200: 450,000 elements in 9 us, 28 us as one piece).
        piece = math.ceil(len(flat.gradient) / (36 if device.type == "cuda" else 1))
        vectors = (flat.values.data, flat.gradient, *self.moments.values())
        self._pieces = [list(vector.split(piece)) for vector in vectors]

    def step(self) -> None:
        """Update the parameters with the current gradient."""
        self._count += 1
        counts = [self._count] * len(self._pieces[0])
        options = {"lr": self.learning_rate, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
        torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage, reportCallIssue]
            *self._pieces, [], counts, **options, amsgrad=False, maximize=False
        )

    def state(self) -> dict[str, Tensor]:
        moments = {name: self.flat.unpad(moment) for name, moment in self.moments.items()}
        return {"learning_rate": self.learning_rate.clone(), "step": self._count.clone(), **moments}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.learning_rate.copy_(state["learning_rate"])
        self._count.copy_(state["step"])
        for name, moment in self.moments.items():
            moment.copy_(self.flat.pad(state[name].to(moment)))
