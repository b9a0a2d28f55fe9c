"""Networks that learners share."""

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS = {nn.ELU: functional.elu_, nn.ReLU: torch.relu_, nn.Tanh: torch.tanh_}
"""Each as a function that works in place."""


def _activation(name: str) -> nn.Module:
    # In place: ELU then has its gradient from its output, without a second exponential.
    return {"elu": nn.ELU(inplace=True), "relu": nn.ReLU(inplace=True), "tanh": nn.Tanh()}[name]


def mlp(
    inputs: int,
    hidden: tuple[int, ...],
    outputs: int,
    activation: str,
    last_gain: float,
    generator: torch.Generator,
) -> nn.Sequential:
    """A multi-layer perceptron with orthogonal weights; `last_gain` scales the output layer's."""
    layers: list[nn.Module] = []
    widths = (inputs, *hidden, outputs)
    for i, (before, after) in enumerate(pairwise(widths)):
        linear = nn.Linear(before, after)
        last = i == len(hidden)
        nn.init.orthogonal_(linear.weight, last_gain if last else math.sqrt(2.0), generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, _activation(activation)]
    return nn.Sequential(*layers)


def plain(network: nn.Sequential) -> Callable[[Tensor], Tensor]:
    """What `network` of `mlp` computes, without a Module's dealings around every layer: at few rows on a CPU they take
    a third of the time."""
    *hidden, last = [(layer.weight, layer.bias) for layer in network if isinstance(layer, nn.Linear)]
    activate = ACTIVATIONS[type(network[1])]

    def run(x: Tensor) -> Tensor:
        for weight, bias in hidden:
            x = activate(functional.linear(x, weight, bias))
        return functional.linear(x, *last)

    return run


def through(network: nn.Sequential, x: Tensor) -> Tensor:
    """What `network` of `mlp` makes of rows that may be wider than its input, by columns of zeros."""
    first = network[0]
    assert isinstance(first, nn.Linear)
    weight = functional.pad(first.weight, (0, x.shape[-1] - first.in_features))
    return network[1:](functional.linear(x, weight, first.bias))


def fold_normalizer(network: nn.Sequential, mean: Tensor, std: Tensor) -> nn.Sequential:
    """A copy of `network` that takes raw inputs: its first layer does the normalising."""
    folded = copy.deepcopy(network).cpu().requires_grad_(False)
    first = folded[0]
    assert isinstance(first, nn.Linear)
    first.weight.div_(std.cpu())
    first.bias.sub_(first.weight @ mean.cpu())
    return folded
