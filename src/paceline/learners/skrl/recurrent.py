"""Recurrent networks of skrl on torch: their states in a rollout, and the sequences of an update."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.learners.recurrent import Rnn
from paceline.learners.skrl.network_parts import RecurrentSize
from paceline.learners.skrl.settings import SkrlSettings


class RecurrentLayer(nn.Module):
    """LSTM or GRU of a network, with the states of all envs of a rank.

    In a rollout a call computes one step of all envs, from `state`. In an update it computes the sequences of a
    minibatch, which `Sequences` sets.
    """

    state: Tensor
    """State before the next step, [env, part, layer, hidden]."""

    def __init__(self, size: RecurrentSize, inputs: int, num_envs: int, generator: torch.Generator):
        super().__init__()
        self.rnn = Rnn(size.type, inputs, size.hidden_size, size.layers)
        self.rnn.initialize(generator)
        self.register_buffer("state", torch.zeros(num_envs, *self.rnn.state_shape), persistent=False)
        self._next_state = self.state
        self.sequences: tuple[Tensor, Tensor] | None = None
        """States before the sequences of the minibatch, [sequence, ...], and the steps at which an episode starts, bool
        [step, sequence]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [row, hidden] for inputs [row, inputs]. The rows are envs, or steps x sequences."""
        if self.sequences is None:
            output, self._next_state = self.rnn(x.unsqueeze(0), self.state)
            return output.squeeze(0)
        state, starts = self.sequences
        return self.rnn(x.unflatten(0, starts.shape), state, starts)[0].flatten(0, 1)

    def advance(self) -> None:
        """Replace the state by the one after the latest step."""
        self.state.copy_(self._next_state)


class Sequences:
    """Divides a rollout into sequences of equal length, each from the state that the networks had at its start."""

    def __init__(self, layers: list[RecurrentLayer], config: SkrlSettings):
        self._layers, self._length = layers, config.sequence_length or config.rollouts
        self._states: list[list[Tensor]] = []

    def begin_step(self, index: int) -> None:
        """Keep the states if a sequence starts with step `index` of the rollout."""
        if index == 0:
            self._states.clear()
        if index % self._length == 0:
            self._states.append([layer.state.clone() for layer in self._layers])

    def minibatches(self, done: Tensor, tensors: list[Tensor | None], count: int) -> Iterator[list[Tensor | None]]:
        """Yield `count` minibatches of sequences in random order, each with the rows of all `tensors`, [rollout step,
        env, ...]. `done` is bool [rollout step, env]."""
        starts = self._divide(torch.cat((torch.zeros_like(done[:1]), done[:-1])))
        states = [torch.cat(parts) for parts in zip(*self._states, strict=True)]
        rows = [None if tensor is None else self._divide(tensor) for tensor in tensors]
        for chosen in torch.randperm(starts.shape[1], device=done.device).tensor_split(count):
            for layer, state in zip(self._layers, states, strict=True):
                layer.sequences = state[chosen], starts[:, chosen]
            yield [None if each is None else each[:, chosen].flatten(0, 1) for each in rows]
        for layer in self._layers:
            layer.sequences = None

    def _divide(self, tensor: Tensor) -> Tensor:
        """Return [step, sequence, ...] from [rollout step, env, ...]."""
        return tensor.unflatten(0, (-1, self._length)).transpose(0, 1).flatten(1, 2)
