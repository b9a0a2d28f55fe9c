"""LSTM and GRU whose sequences may contain the starts of episodes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_GATES = {"lstm": 4, "gru": 3}
STATE_NAMES = {"lstm": ("h", "c"), "gru": ("h",)}
"""Names of the parts of a state: the hidden state, and the cell state of an LSTM."""


class Rnn(nn.Module):
    """LSTM or GRU with the equations, parameters and parameter names of `torch.nn.LSTM` and `torch.nn.GRU`.

    The torch modules cannot reset the state of single envs inside a sequence. Here a state is one tensor [batch, part,
    layer, hidden], with the parts of `STATE_NAMES`, so that it is stored, masked and saved like any tensor of an env.
    """

    def __init__(self, kind: str, inputs: int, hidden_size: int, layers: int):
        super().__init__()
        self.kind, self.inputs, self.hidden_size, self.layers = kind, inputs, hidden_size, layers
        self.state_shape = (len(STATE_NAMES[kind]), layers, hidden_size)
        """Shape of the state of one env."""
        rows = _GATES[kind] * hidden_size
        for layer in range(layers):
            columns = hidden_size if layer else inputs
            for name, shape in (("ih", (rows, columns)), ("hh", (rows, hidden_size))):
                self.register_parameter(f"weight_{name}_l{layer}", nn.Parameter(torch.zeros(shape)))
            for name in ("ih", "hh"):
                self.register_parameter(f"bias_{name}_l{layer}", nn.Parameter(torch.zeros(rows)))

    def initialize(self, generator: torch.Generator) -> None:
        """Set orthogonal weights and zero biases."""
        for name, parameter in self.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter, generator=generator)

    def forward(self, x: Tensor, state: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs [step, batch, hidden] of a sequence [step, batch, inputs] and the state after it.

        `state` is the state before the sequence. Where `starts`, bool [step, batch], is True, an episode starts and the
        state is zero. Rows of `x` may have extra columns of zeros at the end.
        """
        keep = None if starts is None else (~starts).unsqueeze(-1).to(x.dtype).unbind(0)
        new_state = []
        for layer in range(self.layers):
            parts = state[:, :, layer].unbind(1)
            outputs = []
            for index, projected in enumerate(self._project(layer, x).unbind(0)):
                if keep is not None:
                    parts = tuple(part * keep[index] for part in parts)
                parts = self._cell(layer, projected, *parts)
                outputs.append(parts[0])
            x = torch.stack(outputs)
            new_state.append(torch.stack(parts, dim=1))
        return x, torch.stack(new_state, dim=2)

    def _parameter(self, name: str, layer: int) -> Any:
        return getattr(self, f"{name}_l{layer}")

    def _project(self, layer: int, x: Tensor) -> Tensor:
        """Return the part of the gates that depends on the input, for all steps in one matrix product."""
        weight = self._parameter("weight_ih", layer)
        if x.shape[-1] > weight.shape[1]:
            weight = functional.pad(weight, (0, x.shape[-1] - weight.shape[1]))
        return functional.linear(x, weight, self._parameter("bias_ih", layer))

    def _cell(self, layer: int, projected: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of the state after one step."""
        h = parts[0]
        recurrent = functional.linear(h, self._parameter("weight_hh", layer), self._parameter("bias_hh", layer))
        if self.kind == "lstm":
            input_gate, forget_gate, candidate, output_gate = (projected + recurrent).chunk(4, dim=-1)
            c = forget_gate.sigmoid() * parts[1] + input_gate.sigmoid() * candidate.tanh()
            return output_gate.sigmoid() * c.tanh(), c
        (reset, update, candidate), (reset_h, update_h, candidate_h) = projected.chunk(3, -1), recurrent.chunk(3, -1)
        update = (update + update_h).sigmoid()
        candidate = (candidate + (reset + reset_h).sigmoid() * candidate_h).tanh()
        return (candidate + update * (h - candidate),)


class RecurrentNetwork(nn.Module):
    """RNN followed by an MLP. `before` computes the input of the RNN, if it is given."""

    def __init__(self, rnn: Rnn, mlp: nn.Module, before: nn.Module | None = None):
        super().__init__()
        self.before, self.rnn, self.mlp = before, rnn, mlp
        self.state_shape, self.state_names = rnn.state_shape, STATE_NAMES[rnn.kind]

    def forward(self, x: Tensor, state: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs of a sequence [step, batch, inputs] and the state after it, as `Rnn.forward`."""
        latent, state = self.rnn(x if self.before is None else self.before(x), state, starts)
        return self.mlp(latent), state

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of one step, [batch, outputs] from [batch, inputs], and the state after it."""
        output, state = self(x.unsqueeze(0), state)
        return output.squeeze(0), state
