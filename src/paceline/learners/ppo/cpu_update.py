"""Actor and critic side by side: their hidden layers as batched products, their gradient without autograd.

On a CPU a small network's update is mostly calls, not arithmetic. Two networks in one call, and a backward pass that is
written out, take about half the time that autograd does. A test holds the gradient to autograd's.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.learners.networks import ACTIVATIONS
from paceline.tensors.flat import FlatParameters

_elu_backward, _relu_backward = torch.ops.aten.elu_backward, torch.ops.aten.threshold_backward

# An activation's derivative, from its output, times an incoming gradient.
_DERIVATIVES: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ELU: lambda gradient, y: _elu_backward(gradient, 1.0, 1.0, 1.0, True, y),
    nn.ReLU: lambda gradient, y: _relu_backward(gradient, y, 0.0),
    nn.Tanh: torch.ops.aten.tanh_backward,
}


class Twins:
    """Two perceptrons whose hidden layers have the same widths; their inputs and their outputs may differ."""

    def __init__(self, networks: tuple[nn.Sequential, nn.Sequential], flat: FlatParameters):
        layers = [[layer for layer in network if isinstance(layer, nn.Linear)] for network in networks]
        self._first, self._last = ([_Layer(flat, net[end]) for net in layers] for end in (0, -1))
        self._middle = [_Layer(flat, *pair) for pair in zip(*(net[1:-1] for net in layers), strict=True)]
        self._width = layers[0][0].out_features
        activation = type(networks[0][1])
        self._activate, self._deactivate = ACTIVATIONS[activation], _DERIVATIVES[activation]

    def forward(self, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Both networks' outputs for their inputs, [sample, ...] each; keeps what `backward` needs."""
        hidden = torch.empty(2, len(inputs[0]), self._width)
        for layer, x, y in zip(self._first, inputs, hidden, strict=True):
            torch.addmm(layer.bias, x, layer.weight.mT, out=y)
        self._inputs, self._hidden = inputs, [self._activate(hidden)]
        for layer in self._middle:
            product = torch.baddbmm(layer.bias.unsqueeze(1), self._hidden[-1], layer.weight.mT)
            self._hidden.append(self._activate(product))
        last = zip(self._last, self._hidden[-1], strict=True)
        return [torch.addmm(layer.bias, x, layer.weight.mT) for layer, x in last]

    def backward(self, gradients: tuple[Tensor, Tensor]) -> None:
        """From the outputs' gradients the parameters', into the flat gradient."""
        hidden = self._hidden[-1]
        back = torch.empty_like(hidden)
        for layer, y, x, below in zip(self._last, gradients, hidden, back, strict=True):
            layer.take_gradient(y, x)
            torch.mm(y, layer.weight, out=below)
        for layer, x, y in zip(reversed(self._middle), self._hidden[-2::-1], self._hidden[:0:-1], strict=True):
            back = self._deactivate(back, y)
            layer.take_gradient(back, x)
            back = torch.bmm(back, layer.weight)
        for layer, y, x in zip(self._first, self._deactivate(back, self._hidden[0]), self._inputs, strict=True):
            layer.take_gradient(y, x)


class _Layer:
    """A linear layer of one network, or of both as one: [out, in] or [2, out, in]."""

    def __init__(self, flat: FlatParameters, *linears: nn.Linear):
        self.weight, self._weight_gradient = flat.together(*(linear.weight for linear in linears))
        self.bias, self._bias_gradient = flat.together(*(linear.bias for linear in linears))

    def take_gradient(self, output: Tensor, x: Tensor) -> None:
        """Of the parameters, from the output's gradient and the input, [..., sample, n]."""
        torch.matmul(output.mT, x, out=self._weight_gradient)
        torch.sum(output, dim=-2, out=self._bias_gradient)
