"""RSL-RL's recurrent model with states and minibatches of fixed shape."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from rsl_rl.models import RNNModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torch import Tensor

from paceline.learners.networks import reset_state_
from paceline.learners.recurrent import RecurrentNetwork, Rnn
from paceline.learners.rsl_rl.settings import RslRlSettings


class RecurrentModel(RNNModel):
    """RSL-RL's model, with its weights and parameter names, whose state is a tensor that is updated in place.

    The original splits a rollout where episodes end, into as many trajectories as there are, and stores the states of
    all steps. Here a sequence is the rollout of an env, from the state at its start, and the state is set to zero where
    an episode starts. A test compares the results.
    """

    def __init__(self, obs: TensorDict, *arguments: Any, config: RslRlSettings):
        names = ("rnn_type", "rnn_hidden_dim", "rnn_num_layers")
        super().__init__(obs, *arguments, **{name: getattr(config, name) for name in names})
        rnn = Rnn(config.rnn_type, self.obs_dim, config.rnn_hidden_dim, config.rnn_num_layers)
        rnn.load_state_dict(self.rnn.rnn.state_dict())
        cast("Any", self.rnn).rnn = rnn
        self.state = torch.zeros(*obs.batch_size, *rnn.state_shape, device=obs.device)
        """State before the next step, [env, part, layer, hidden]."""
        self._next_state = self.state

    def get_latent(self, obs: TensorDict, masks: Tensor | None = None, hidden_state: Any = None) -> Tensor:
        """Return the latent of a step, [env, hidden]; or, in the update, of sequences [step, env, ...] that start with
        `hidden_state`, with the starts of episodes as `masks`, bool [step, env]."""
        x = super(RNNModel, self).get_latent(obs)
        if masks is not None:
            return self.rnn.rnn(x, hidden_state, masks)[0]
        latent, self._next_state = self.rnn.rnn(x.unsqueeze(0), self.state)
        return latent.squeeze(0)

    def reset(self, dones: Tensor | None = None, hidden_state: Any = None) -> None:
        """Set the state after a step of the env. Without `dones` the latest call has no effect on the state."""
        if dones is not None:
            self.state.copy_(self._next_state)
            reset_state_(self.state, dones > 0)

    def get_hidden_state(self) -> None:
        """Return nothing, so that the storage keeps no states."""

    def network(self) -> RecurrentNetwork:
        """Return RNN and MLP without the normalizer."""
        return RecurrentNetwork(cast("Rnn", self.rnn.rnn), self.mlp)


def sequence_batches(
    storage: RolloutStorage, states: tuple[Tensor, Tensor], num_mini_batches: int, num_epochs: int
) -> Iterator[RolloutStorage.Batch]:
    """Yield minibatches of whole envs, the same in all epochs, as RSL-RL does. `states` are those of actor and critic
    at the start of the rollout."""
    size = storage.num_envs // num_mini_batches
    done = storage.dones.squeeze(-1) > 0
    starts = torch.cat((torch.zeros_like(done[:1]), done[:-1]))
    for _ in range(num_epochs):
        for first in range(0, num_mini_batches * size, size):
            envs = slice(first, first + size)
            yield RolloutStorage.Batch(
                observations=storage.observations[:, envs],
                actions=storage.actions[:, envs],
                values=storage.values[:, envs],
                advantages=storage.advantages[:, envs],
                returns=storage.returns[:, envs],
                old_actions_log_prob=storage.actions_log_prob[:, envs],
                old_distribution_params=tuple(each[:, envs] for each in storage.distribution_params or ()),
                hidden_states=(states[0][envs], states[1][envs]),
                masks=starts[:, envs],
            )
