"""Networks that learners share, and `Policy`, the module of a trained policy."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.learners.recurrent import RecurrentNetwork

INPLACE_ACTIVATIONS = {nn.ELU: functional.elu_, nn.ReLU: torch.relu_, nn.Tanh: torch.tanh_}
"""Functions that apply the activation of a module in place."""


def _activation(name: str) -> nn.Module:
    # In place, because the gradient of ELU is then computed from its output, without a second exponential.
    return {"elu": nn.ELU(inplace=True), "relu": nn.ReLU(inplace=True), "tanh": nn.Tanh()}[name]


def mlp(
    inputs: int,
    hidden: tuple[int, ...],
    outputs: int,
    activation: str,
    last_gain: float,
    generator: torch.Generator,
) -> nn.Sequential:
    """Return a multi-layer perceptron with orthogonal weights. `last_gain` scales those of the output layer."""
    layers: list[nn.Module] = []
    widths = (inputs, *hidden, outputs)
    for i, (before, after) in enumerate(pairwise(widths)):
        linear = nn.Linear(before, after)
        last = i == len(hidden)
        nn.init.orthogonal_(linear.weight, last_gain if last else math.sqrt(2.0), generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, _activation(activation)]
    return nn.Sequential(*layers)


def mlp_of(layers: Iterable[Sequence[Tensor]], activation: type[nn.Module]) -> nn.Sequential:
    """Return a multi-layer perceptron with the given weights [out, in] and biases [out]."""
    network = nn.Sequential()
    for weight, bias in layers:
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        network.extend((linear, activation()))
    network.pop(-1)
    return network


def eager_forward(network: nn.Sequential) -> Callable[[Tensor], Tensor]:
    """Return a function that computes `network`, made by `mlp`, without the overhead of module calls, which is a third
    of the time for few rows on a CPU."""
    *hidden, last = [(layer.weight, layer.bias) for layer in network if isinstance(layer, nn.Linear)]
    activate = INPLACE_ACTIVATIONS[type(network[1])]

    def forward(x: Tensor) -> Tensor:
        for weight, bias in hidden:
            x = activate(functional.linear(x, weight, bias))
        return functional.linear(x, *last)

    return forward


def forward_padded(network: nn.Sequential, x: Tensor) -> Tensor:
    """Return the output of `network`, made by `mlp`, for rows that may have extra columns of zeros at the end."""
    first = network[0]
    assert isinstance(first, nn.Linear)
    weight = functional.pad(first.weight, (0, x.shape[-1] - first.in_features))
    return network[1:](functional.linear(x, weight, first.bias))


def vector_input(obs: dict[str, Tensor], groups: tuple[str, ...], features: Tensor | None = None) -> Tensor:
    """Concatenate the features of images, if there are any, and the vectors of observation groups into the input of an
    MLP, [..., width]."""
    vectors = [obs[name] for name in groups]
    vectors = vectors if features is None else [features, *vectors]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=-1)


class Encoder(nn.Module):
    """Module that computes features, float32 [batch, features], from the images of a dict of observation groups."""

    groups: tuple[str, ...]
    """Observation groups of the images."""


class Policy(nn.Module):
    """Deterministic policy over a dict of observation groups: the mean action or the most likely choice, on the CPU and
    without gradients.

    `network` computes actions from the features of `encoder`, if there is one, and the raw vectors of `vectors`, all
    concatenated, so it includes any normalization. The policy of a `RecurrentNetwork` has a state, which is zero at the
    start of an episode; the state of other policies is empty.
    """

    def __init__(self, network: nn.Module, vectors: tuple[str, ...] = ("policy",), encoder: Encoder | None = None):
        super().__init__()
        self.network, self.encoder = (_frozen_copy(module) for module in (network, encoder))
        self._vectors = vectors
        self.groups = (*vectors, *(encoder.groups if encoder else ()))
        """Observation groups that the policy uses."""
        self.state_names = network.state_names if isinstance(network, RecurrentNetwork) else ()
        """Names of the parts of the state: "h", and "c" of an LSTM. Without a state it is empty."""

    def initial_state(self, batch: int, device: torch.device | None = None) -> Tensor:
        """Return the state at the start of an episode, zeros [batch, part, layer, hidden]; [batch, 0] without a
        state."""
        return torch.zeros(batch, *(self.network.state_shape if self.state_names else (0,)), device=device)

    def step(self, obs: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions [batch, actions] as `VecEnv.step` takes them, and the state for the next step. Groups that the
        policy does not use may be present in `obs`."""
        features = self.encoder(obs) if self.encoder else None
        x = vector_input(obs, self._vectors, features)
        return self.network.step(x, state) if self.state_names else (self.network(x), state)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        """Return the actions in the first step of an episode. Without a state they are those of every step."""
        first = obs[self.groups[0]]
        return self.step(obs, self.initial_state(first.shape[0], first.device))[0]


class PolicyRunner:
    """Runs a policy in envs and keeps its state, which is updated in place."""

    def __init__(self, policy: Policy, num_envs: int, device: torch.device | None = None):
        self._policy = policy
        self._state = policy.initial_state(num_envs, device)

    def act(self, obs: dict[str, Tensor]) -> Tensor:
        """Return actions [env, actions]."""
        actions, state = self._policy.step(obs, self._state)
        self._state.copy_(state)
        return actions

    def reset(self, done: Tensor) -> None:
        """Reset the state of the envs whose episode has ended; `done` is bool [env]."""
        reset_state_(self._state, done)


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the outputs of a policy's TorchScript module: one tensor if it has no state, otherwise a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def reset_state_(state: Tensor, done: Tensor) -> None:
    """Set the states [env, ...] of the envs in `done`, bool [env], to zero, in place."""
    state.masked_fill_(done.view(-1, *[1] * (state.dim() - 1)), 0.0)


def _frozen_copy(module: nn.Module | None) -> Any:
    return copy.deepcopy(module).cpu().eval().requires_grad_(False) if module is not None else None


def fold_normalizer(network: nn.Module, mean: Tensor, std: Tensor) -> Any:
    """Return a copy of `network`, an MLP or a `RecurrentNetwork`, that takes raw inputs: its first layer includes the
    normalization of the last inputs. Other inputs, the features of images, come first."""
    folded = copy.deepcopy(network).cpu().requires_grad_(False)
    weight, bias = _first_layer(folded)
    weight = weight[:, weight.shape[1] - len(mean) :]
    weight.div_(std.cpu())
    bias.sub_(weight @ mean.cpu())
    return folded


def with_layers(network: nn.Module, *layers: nn.Module) -> nn.Module:
    """Return `network`, which may be a `RecurrentNetwork`, followed by layers."""
    if isinstance(network, RecurrentNetwork):
        return RecurrentNetwork(network.rnn, nn.Sequential(network.mlp, *layers), network.before)
    return nn.Sequential(network, *layers)


def with_input_layer(network: nn.Module, layer: nn.Module) -> nn.Module:
    """Return `network`, which may be a `RecurrentNetwork` without such a layer, after a layer."""
    if isinstance(network, RecurrentNetwork):
        return RecurrentNetwork(network.rnn, network.mlp, layer)
    return nn.Sequential(layer, network)


def _first_layer(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the layer that takes the input."""
    names = ("weight_ih_l0", "bias_ih_l0") if isinstance(network, RecurrentNetwork) else ("weight", "bias")
    first = network.rnn if isinstance(network, RecurrentNetwork) else next(iter(network.children()))
    weight, bias = (first.get_parameter(name) for name in names)
    return weight, bias
