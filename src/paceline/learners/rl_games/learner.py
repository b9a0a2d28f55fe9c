"""RL-Games' agents for continuous and discrete actions on Paceline's envs and ranks, without its runner and its
distributed training."""

import io
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from rl_games.algos_torch.a2c_continuous import A2CAgent
from rl_games.algos_torch.a2c_discrete import DiscreteA2CAgent
from rl_games.algos_torch.running_mean_std import RunningMeanStd
from rl_games.algos_torch.torch_ext import mean_list, policy_kl
from rl_games.common.a2c_common import A2CBase
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.env.vec_env import TensorSpec, VecEnv
from paceline.learners.categorical import MostLikely
from paceline.learners.encoders import network_input
from paceline.learners.learner import Learner
from paceline.learners.networks import Encoder, Policy
from paceline.learners.optimizers import GradientHook, broadcast_parameters, set_learning_rate
from paceline.learners.rl_games.parameters import agent_parameters, pack_images
from paceline.learners.rl_games.recurrent import RnnStates, recurrent_policy
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rollout import RolloutEnv
from paceline.learners.settings import check_action_space
from paceline.tensors.flat import pack, unpack
from paceline.tensors.statistics import merge_, row_sums, standardize


class RlGames(Learner):
    """Learner whose agent uses the observation group "policy" or all images. It has a central value network for the
    group "critic" if the env has one."""

    def __init__(self, env: VecEnv, config: RlGamesSettings, seed: int, group: Group):
        super().__init__(env, seed, group)
        self.config = config
        torch.manual_seed(seed)
        actions = self._rollout_env.actions
        check_action_space(config, actions)
        self.agent = agent = (_DiscreteAgent if actions.choices else _ContinuousAgent)(self._rollout_env, config)
        trained: dict[str, Any] = {"model": agent}
        if agent.has_central_value:
            trained["central_value"] = agent.central_value_net
        self._optimizers = {name: each.optimizer for name, each in trained.items()}
        networks = {name: each.model for name, each in trained.items()}
        for network in networks.values():
            broadcast_parameters(group, network.parameters())
        self.parts = {"networks": networks, "optimizers": self._optimizers}
        self.env_parts = {name: states.tensor for name, states in agent.states.items()}

    def collect(self) -> None:
        self._rollout_env.begin_rollout(self.config.horizon_length)
        self.agent.collect()

    def update(self) -> dict[str, Any]:
        agent = self.agent
        agent.update_epoch()
        # Only the continuous agent has a loss for bounds, after that of the values.
        _, _, _, _, surrogates, values, *_, entropies, divergences, _rate, _factor = agent.train_epoch()
        std = {"policy/std": agent.std()} if isinstance(agent, _ContinuousAgent) else {}
        return {
            "loss/surrogate": mean_list(surrogates),
            "loss/value": agent.central_loss if agent.has_central_value else mean_list(values),
            "loss/entropy": mean_list(entropies),
            "policy/kl": mean_list(divergences),
            "policy/learning_rate": agent.last_lr,
            **std,
        }

    def policy(self) -> Policy:
        model, network = self.agent.model, self.agent.model.a2c_network
        config, images = self.config, self.agent.images
        before: list[nn.Module] = [model.running_mean_std] if model.normalize_input else []
        if (limit := config.clip_observations) and not images:
            before.insert(0, nn.Hardtanh(-limit, limit))
        after = self.agent.output_layers()
        if self.agent.is_rnn:
            return Policy(recurrent_policy(network, before, after, config))
        layers = nn.Sequential(*before, network.actor_mlp, *after)
        encoder = (_Encoder(network.actor_cnn, images.specs),) if images else ()
        return Policy(layers, () if images else ("policy",), *encoder)

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._set_central_learning_rate()
        self.agent.continue_from(self.iteration)

    def set_learning_rate(self, learning_rate: float) -> None:
        for optimizer in self._optimizers.values():
            set_learning_rate(optimizer, learning_rate)
        self._set_central_learning_rate()
        self.agent.continue_from(self.iteration)

    def _set_central_learning_rate(self) -> None:
        """Set the learning rate of the central value network, if it has its own. A linear schedule computes it."""
        rate, schedule = self.config.central_value_learning_rate, self.config.central_value_lr_schedule
        if rate and (schedule or self.config.lr_schedule) != "linear" and self.agent.has_central_value:
            set_learning_rate(self._optimizers["central_value"], rate)


class _Agent(A2CBase):
    """Agent whose gradients, KL divergence, advantages and normalizers are those of the samples of all ranks. It is
    combined with one of the agents of RL-Games."""

    model: Any
    optimizer: Any
    central_value_net: Any
    dataset: Any

    def __init__(self, rollout_env: RolloutEnv, config: RlGamesSettings):
        self._group, self._normalize_advantage = rollout_env.group, config.normalize_advantage
        self.images = pack_images(rollout_env.env)
        # RL-Games prints each part that it builds, and always opens a log.
        with redirect_stdout(io.StringIO()), TemporaryDirectory(prefix="paceline_") as folder:
            super().__init__("paceline", agent_parameters(rollout_env, self.images, config, folder))
            cast("Any", self.writer).close()
            self.writer = None
            self._normalizers = self._replace_normalizers()
        # bfloat16 has the range of float32, so gradients need no scale. With one, a rank could skip a step.
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.init_tensors()
        trained = {"rnn_state": self} | (
            {"central_rnn_state": self.central_value_net} if self.has_central_value else {}
        )
        self.states = {name: RnnStates(each) for name, each in trained.items() if each.is_rnn}
        """States of recurrent networks by name."""
        self.central_loss = 0.0
        max_norm = config.grad_norm if config.truncate_grads else None
        self._gradient_hook = GradientHook(self.optimizer, rollout_env, max_norm)
        if self.has_central_value:
            self.central_value_net.writter = None
            truncate = config.central_value_truncate_grads
            truncate = config.truncate_grads if truncate is None else truncate
            GradientHook(self.central_value_net.optimizer, rollout_env, config.grad_norm if truncate else None)

    @torch.no_grad()
    def collect(self) -> None:
        """Collect the rollout that `train_epoch` uses."""
        self.reset_envs()
        self.set_eval()
        if not self.is_rnn:
            self._batch = super().play_steps()
            return
        # The states are zero where the last step has ended an episode.
        self.dones = torch.zeros_like(self.dones)
        for states in self.states.values():
            states.load()
        self._batch = super().play_steps_rnn()

    def get_action_values(self, obs: dict[str, Tensor]) -> dict[str, Any]:
        # Before the step, because a stop may be requested instead of it, and then the envs are saved as they are.
        for states in self.states.values():
            states.store()
        return super().get_action_values(obs)

    def get_values(self, obs: dict[str, Tensor]) -> Tensor:
        """Return the values after the last step, which begins the next rollout: RL-Games would change the states of the
        central value network."""
        for states in self.states.values():
            states.store()
        values = super().get_values(obs)
        for states in self.states.values():
            states.load()
        return values

    def _preproc_obs(self, obs_batch: Tensor) -> Tensor:
        """Scale images when the network uses them; the rollout keeps them as they are in the env."""
        return network_input(self.images.unpack(obs_batch), self.images.specs) if self.images else obs_batch

    def play_steps(self) -> dict[str, Any]:
        return self._batch

    def play_steps_rnn(self) -> dict[str, Any]:
        return self._batch

    def prepare_dataset(self, batch_dict: dict[str, Any]) -> None:
        values, returns = batch_dict["values"], batch_dict["returns"]
        advantages = (returns - values).sum(1)
        rows = {
            "obses": batch_dict["obses"],
            "states": batch_dict.get("states"),
            "values": torch.cat((values, returns)),
        }
        sums = [row_sums(rows[name], normalizer.running_mean) for name, normalizer in self._normalizers.items()]
        sums.append(row_sums(advantages.unsqueeze(1)))
        *normalizer_sums, advantage_sums = unpack(self._group.sum_(pack(sums)), sums)
        for normalizer, each in zip(self._normalizers.values(), normalizer_sums, strict=True):
            merge_(normalizer.count, normalizer.running_mean, normalizer.running_var, each)
        super().prepare_dataset(batch_dict)
        if self._normalize_advantage:
            self.dataset.values_dict["advantages"] = standardize(advantages.unsqueeze(1), advantage_sums).squeeze(1)

    def train_actor_critic(self, input_dict: dict[str, Tensor], opt_step: bool = True) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # RL-Games computes the KL divergence after the sum over ranks; here it is averaged together with the gradient.
        found: Any = super().train_actor_critic(input_dict)
        surrogate, value, entropy, _, *rest = found
        return surrogate, value, entropy, self._gradient_hook.kl, *rest

    def train_central_value(self) -> float:
        self.central_loss = super().train_central_value()
        return self.central_loss

    def continue_from(self, iteration: int) -> None:
        """Set the iteration and the learning rate of the optimizers, which RL-Games does not restore."""
        self.epoch_num, self.last_lr = iteration, self.optimizer.param_groups[0]["lr"]
        if self.has_central_value:
            central = self.central_value_net
            central.epoch_num, central.lr = iteration, central.optimizer.param_groups[0]["lr"]

    def _replace_normalizers(self) -> dict[str, "_Normalizer"]:
        """Replace RL-Games' normalizers; return the new ones by the name of their data in a batch."""
        models, made = {"obses": self.model}, {}
        if self.has_central_value:
            models["states"] = self.central_value_net.model
        for name, model in models.items():
            if model.normalize_input:
                made[name] = model.running_mean_std = _Normalizer(model.obs_shape).to(self.ppo_device)
        if self.normalize_value:
            # One for all models: with a central value network, RL-Games never updates that of the agent.
            made["values"] = self.value_mean_std = _Normalizer((1,)).to(self.ppo_device)
            for model in models.values():
                model.value_mean_std = self.value_mean_std
        return made


class _ContinuousAgent(_Agent, A2CAgent):
    def __init__(self, rollout_env: RolloutEnv, config: RlGamesSettings):
        super().__init__(rollout_env, config)
        self.model.register_forward_hook(self._keep_std)
        self._clips, self._action_limit = config.clip_actions, config.action_limit

    def train_actor_critic(self, input_dict: dict[str, Tensor], opt_step: bool = True) -> tuple[Any, ...]:
        self._old_distribution = input_dict["mu"], input_dict["sigma"]
        return super().train_actor_critic(input_dict)

    def calc_losses(self, *arguments: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *_, mean, _entropy, _masks = arguments
        self._gradient_hook.kl = policy_kl(mean.detach(), self._std, *self._old_distribution)
        return super().calc_losses(*arguments)

    def std(self) -> Tensor:
        """Return the standard deviation of the actions, [actions], or of those of the rollout if they depend on the
        observations, [sample, actions]."""
        network = self.model.a2c_network
        return network.sigma.detach().exp() if network.fixed_sigma else self._batch["sigmas"]

    def _keep_std(self, _model: nn.Module, _inputs: Any, outputs: dict[str, Tensor]) -> None:
        self._std = outputs["sigmas"].detach()

    def output_layers(self) -> list[nn.Module]:
        """Return the layers that compute actions from the last hidden layer."""
        layers: list[nn.Module] = [self.model.a2c_network.mu]
        if self._clips:
            layers += [nn.Hardtanh(-1.0, 1.0), _Scale(self._action_limit or 1.0)]
        elif limit := self._action_limit:
            layers.append(nn.Hardtanh(-limit, limit))
        return layers


class _DiscreteAgent(_Agent, DiscreteA2CAgent):
    def __init__(self, rollout_env: RolloutEnv, config: RlGamesSettings):
        super().__init__(rollout_env, config)
        self._choices = rollout_env.actions.choices
        self._surrogate_loss, self.actor_loss_func = self.actor_loss_func, self._loss_with_kl

    def _loss_with_kl(self, old_neglogp: Tensor, neglogp: Tensor, *arguments: Any) -> Tensor:
        # The estimate of RL-Games, from the log-probabilities of the actions.
        self._gradient_hook.kl = 0.5 * (old_neglogp - neglogp.detach()).square().mean()
        return self._surrogate_loss(old_neglogp, neglogp, *arguments)

    def output_layers(self) -> list[nn.Module]:
        """Return the layers that compute actions from the last hidden layer."""
        logits = self.model.a2c_network.logits
        return [_Logits(logits) if isinstance(logits, nn.ModuleList) else logits, MostLikely(self._choices)]


class _Scale(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self._factor


class _Logits(nn.Module):
    """Logits of all columns of an action, concatenated."""

    def __init__(self, columns: nn.ModuleList):
        super().__init__()
        self._columns = columns

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([column(x) for column in self._columns], dim=-1)


class _Normalizer(RunningMeanStd):
    """Normalizer that is updated once per iteration. That of RL-Games is updated with each minibatch of every epoch,
    and only with those of this rank."""

    def train(self, mode: bool = True) -> "_Normalizer":
        return super().train(False)


class _Encoder(Encoder):
    """Convolutions of a network."""

    def __init__(self, cnn: nn.Module, specs: dict[str, TensorSpec]):
        super().__init__()
        self.groups = tuple(specs)
        self._cnn, self._specs = cnn, specs

    def forward(self, images: dict[str, Tensor]) -> Tensor:
        return self._cnn(network_input(images, self._specs)).flatten(1)
