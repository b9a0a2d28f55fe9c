"""Recurrent networks of RL-Games: their settings, states and policy."""

from typing import Any

import torch
from torch import Tensor, nn

from paceline.learners.recurrent import RecurrentNetwork, Rnn
from paceline.learners.rl_games.settings import RlGamesSettings


def rnn_parameters(name: str, config: RlGamesSettings) -> dict[str, Any]:
    """Return the key "rnn" of a network in RL-Games' configuration files, or nothing for the name none."""
    if name == "none":
        return {}
    keys = ("units", "layers", "before_mlp", "concat_input", "layer_norm")
    return {"rnn": {"name": name} | {key: getattr(config, f"rnn_{key}") for key in keys}}


class RnnStates:
    """States of a trained part of RL-Games, which has new tensors in every step, as one tensor."""

    def __init__(self, owner: Any):
        self._owner = owner
        self.tensor = _pack(owner.rnn_states)
        """States before the next step of the env, [env, part, layer, units]."""

    def load(self) -> None:
        """Give the states to RL-Games."""
        self._owner.rnn_states = [part.transpose(0, 1).contiguous() for part in self.tensor.unbind(1)]

    def store(self) -> None:
        """Copy the states from RL-Games."""
        self.tensor.copy_(_pack(self._owner.rnn_states))


def _pack(states: list[Tensor]) -> Tensor:
    return torch.stack([part.transpose(0, 1) for part in states], dim=1)


def recurrent_policy(
    network: Any, before: list[nn.Module], after: list[nn.Module], config: RlGamesSettings
) -> RecurrentNetwork:
    """Return the actor of a network of RL-Games, with the modules before its first and after its last hidden layer."""
    original = network.a_rnn if config.separate else network.rnn
    rnn = Rnn(config.rnn_name, original.rnn.input_size, config.rnn_units, config.rnn_layers)
    rnn.load_state_dict(original.rnn.state_dict())
    norm = [network.a_layer_norm if config.separate else network.layer_norm] if config.rnn_layer_norm else []
    if config.rnn_before_mlp:
        return RecurrentNetwork(rnn, nn.Sequential(*norm, network.actor_mlp, *after), nn.Sequential(*before))
    hidden = _Concatenated(network.actor_mlp) if config.rnn_concat_input else network.actor_mlp
    return RecurrentNetwork(rnn, nn.Sequential(*norm, *after), nn.Sequential(*before, hidden))


class _Concatenated(nn.Module):
    """Output of a network followed by its input."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self._network = network

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self._network(x), x), dim=-1)
