"""PPO with recurrent networks for actor and critic.

A rollout is divided into sequences of horizon / minibatches steps. A minibatch has one sequence of every env, chosen at
random, so it does not depend on how the envs are distributed over ranks, and its shape is fixed. A sequence starts from
the state that the networks had in the rollout; inside it the state is set to zero where an episode starts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.env.vec_env import VecEnv
from paceline.learners.networks import mlp, reset_state_, vector_input
from paceline.learners.ppo.ppo import Ppo
from paceline.learners.ppo.samples import PackedSamples, Rollout, Samples, minibatch_orders
from paceline.learners.ppo.settings import PpoSettings
from paceline.learners.recurrent import RecurrentNetwork, Rnn
from paceline.learners.settings import refuse
from paceline.tensors.graph import fuse

_ACTOR, _CRITIC = 0, 1
"""Indices of the networks in the second dimension of states."""


def make_ppo(env: VecEnv, config: PpoSettings, *arguments: Any, **options: Any) -> Ppo:
    """Return the learner for networks with or without a state."""
    return (Ppo if config.rnn_type == "none" else RecurrentPpo)(env, config, *arguments, **options)


class Sequences(NamedTuple):
    """Minibatch of sequences, one of every env."""

    samples: PackedSamples
    """Samples of all sequences, [step * env, ...]."""
    starts: Tensor
    """True where an episode starts, bool [step, env]."""
    states: Tensor
    """States of actor and critic before the first step, [env, 2, ...]."""


class RecurrentPpo(Ppo):
    """`Ppo` whose actor and critic are `RecurrentNetwork`s."""

    is_recurrent: ClassVar[bool] = True
    actor: RecurrentNetwork
    critic: RecurrentNetwork

    def __init__(self, env: VecEnv, config: PpoSettings, *arguments: Any, **options: Any):
        super().__init__(env, config, *arguments, **options)
        if self._inputs.images:
            refuse(config, "image_training", "targets", "policy", "ppo with --ppo.rnn-type none")
        self._states = torch.zeros(env.num_envs, 2, *self.actor.state_shape, device=env.device)
        self.env_parts = {"rnn_state": self._states}
        self._length = config.horizon // config.minibatches
        self._final_value = fuse(self._estimate_final_value, env.device)

    def _make_network(
        self, inputs: int, outputs: int, last_gain: float, generator: torch.Generator
    ) -> RecurrentNetwork:
        config = self.config
        rnn = Rnn(config.rnn_type, inputs, config.rnn_hidden_size, config.rnn_layers)
        rnn.initialize(generator)
        hidden = mlp(config.rnn_hidden_size, config.hidden, outputs, config.activation, last_gain, generator)
        return RecurrentNetwork(rnn, hidden)

    # The rollout

    def _collect(self) -> Rollout:
        self._sequence_states: list[Tensor] = []
        self._final_values: list[Tensor] = []
        rollout = super()._collect()
        return replace(
            rollout,
            final_value=torch.stack(self._final_values) if rollout.final_obs else None,
            states=torch.stack(self._sequence_states),
        )

    def _step(self, obs: dict[str, Tensor], noise: Tensor) -> tuple[Any, ...]:
        if len(self._final_values) % self._length == 0:
            self._sequence_states.append(self._states.clone())
        output, action, value, states = self._act(obs, noise, self._states)
        step = self.env.step(action)
        self._final_values.append(
            value if self._inputs.critic_uses_images else self._final_value(step.final_obs, states)
        )
        # After the step, because a stop may be requested instead of it, and then the envs are saved as they are.
        self._states.copy_(states)
        reset_state_(self._states, step.terminated | step.truncated)
        return step, output, action, value

    def _choose_actions(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, obs: dict[str, Tensor], noise: Tensor, states: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the output of the actor, the action, the value and the new states."""
        of_actor, of_critic = self._network_inputs(obs)
        output, actor_state = self.actor.step(of_actor, states[:, _ACTOR])
        value, critic_state = self.critic.step(of_critic, states[:, _CRITIC])
        action = self.distribution.act(output, noise)
        return output, action, value.squeeze(-1), torch.stack((actor_state, critic_state), dim=1)

    def _estimate_value(self, obs: dict[str, Tensor]) -> Tensor:
        _, of_critic = self._network_inputs(obs)
        return self.critic.step(of_critic, self._states[:, _CRITIC])[0].squeeze(-1)

    def _estimate_final_value(self, final_obs: dict[str, Tensor], states: Tensor) -> Tensor:
        """Return the value of the observations before any reset, with the states before any reset."""
        groups = self._inputs.critic_groups
        x = vector_input(self._inputs.normalized(final_obs, groups), groups)
        value, _ = self.critic.step(x, states[:, _CRITIC])
        return value.squeeze(-1)

    def _network_inputs(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the inputs of actor and critic from raw observations."""
        return self._inputs.network_inputs(obs | self._inputs.normalized(obs, tuple(self.normalizers)))

    # Minibatches

    def _layer_size(self) -> int:
        # Most operations of an update are those of single steps.
        return self.env.num_envs * self.config.rnn_hidden_size

    def _minibatches(self, packed: PackedSamples) -> Iterator[Sequences]:
        config, device, num_envs = self.config, self.env.device, self.env.num_envs
        done, states = self.rollout.done, self.rollout.states
        assert states is not None
        starts = torch.cat((torch.zeros_like(done[:1]), done[:-1])).flatten()
        steps = torch.arange(self._length, device=device).unsqueeze(1) * num_envs
        epochs = self._epochs + torch.arange(config.epochs, device=device)
        for order in minibatch_orders(self.seed, self._env_index, epochs, config.minibatches):
            # The index of a sequence, sequence * num_envs + env, and that of its first sample, step * num_envs + env.
            for index in order.chunk(config.minibatches):
                first = index + index // num_envs * ((self._length - 1) * num_envs)
                rows = first + steps
                yield Sequences(packed.gather(rows.flatten()), starts[rows], states.flatten(0, 1)[index])

    def _evaluate(self, minibatch: Sequences) -> tuple[Samples, Tensor, Tensor]:
        samples = self._packing.unpack(minibatch.samples)
        of_actor, of_critic = (
            inputs.unflatten(0, minibatch.starts.shape) for inputs in self._inputs.network_inputs(samples.obs)
        )
        output, _ = self.actor(of_actor, minibatch.states[:, _ACTOR], minibatch.starts)
        value, _ = self.critic(of_critic, minibatch.states[:, _CRITIC], minibatch.starts)
        return samples, output.flatten(0, 1), value.flatten()
