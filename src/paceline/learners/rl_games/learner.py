"""RL-Games' continuous agent on our envs and ranks. Its runner and its own distribution over ranks are not used."""

import copy
import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from gymnasium.spaces import Box
from rl_games.algos_torch.a2c_continuous import A2CAgent
from rl_games.algos_torch.running_mean_std import RunningMeanStd
from rl_games.algos_torch.torch_ext import mean_list, policy_kl
from rl_games.common.algo_observer import AlgoObserver
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.env.vec_env import VecEnv
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rollout import (
    Clock,
    Stepper,
    load_optimizer_state,
    optimizer_state,
    same_on_all_ranks,
    set_learning_rate,
    vector_widths,
)
from paceline.tensors.statistics import sums


class RlGames:
    """A `Learner`; where the env has a group "critic", a central value network of its own sees that."""

    def __init__(self, env: VecEnv, config: RlGamesSettings, seed: int, group: Group):
        self.env, self.config, self.iteration = env, config, 0
        self._stepper = Stepper(env, seed, group)
        torch.manual_seed(seed)
        self._agent = agent = _Agent(self._stepper, config)
        self._networks: dict[str, nn.Module] = {"model": agent.model}
        self._optimizers: dict[str, Optimizer] = {"model": agent.optimizer}
        if agent.has_central_value:
            self._networks["central_value"] = agent.central_value_net.model
            self._optimizers["central_value"] = agent.central_value_net.optimizer
        same_on_all_ranks(group, [each for network in self._networks.values() for each in network.parameters()])

    def learn(self) -> dict[str, float]:
        agent = self._agent
        self._stepper.begin(self.iteration, self.config.horizon_length)
        agent.clock = clock = Clock(self.env.device)
        agent.reset_envs()
        agent.update_epoch()
        *_, surrogates, values, _bounds, entropies, divergences, _rate, _factor = agent.train_epoch()
        clock.lap()
        losses: dict[str, float | Tensor] = {
            "loss/surrogate": mean_list(surrogates),
            "loss/value": agent.central_loss if agent.has_central_value else mean_list(values),
            "loss/entropy": mean_list(entropies),
            "policy/kl": mean_list(divergences),
            "policy/learning_rate": agent.last_lr,
            "policy/std": agent.std(),
        }
        self.iteration += 1
        return self._stepper.report(losses, clock)

    def first_non_finite(self) -> str | None:
        return self._stepper.first_non_finite()

    def policy(self) -> nn.Module:
        model = self._agent.model
        normalizer = [model.running_mean_std] if self.config.normalize_input else []
        layers = nn.Sequential(*normalizer, model.a2c_network.actor_mlp, model.a2c_network.mu)
        return copy.deepcopy(layers).cpu().eval().requires_grad_(False)

    def state(self) -> dict[str, Any]:
        return {
            "networks": {
                name: {key: tensor.clone() for key, tensor in network.state_dict().items()}
                for name, network in self._networks.items()
            },
            "optimizers": {name: optimizer_state(optimizer) for name, optimizer in self._optimizers.items()},
            "iteration": self.iteration,
            "envs": self._stepper.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.load_policy(state)
        for name, network in self._networks.items():
            network.load_state_dict(state["networks"][name])
        for name, optimizer in self._optimizers.items():
            load_optimizer_state(optimizer, state["optimizers"][name])
        self._agent.go_on_from(self.iteration)
        self._stepper.load_state(state["envs"])

    def set_learning_rate(self, learning_rate: float) -> None:
        for optimizer in self._optimizers.values():
            set_learning_rate(optimizer, learning_rate)
        self._agent.go_on_from(self.iteration)

    def load_policy(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        self._agent.model.load_state_dict(state["networks"]["model"])


class _Agent(A2CAgent):
    """All ranks as one: gradients, divergence, advantages and normalisers are those of all their samples."""

    clock: Clock

    def __init__(self, stepper: Stepper, config: RlGamesSettings):
        self._group, self._normalize_advantage = stepper.group, config.normalize_advantage
        # It tells of each part that it builds, and always opens a log.
        with redirect_stdout(io.StringIO()), TemporaryDirectory(prefix="paceline_") as folder:
            super().__init__("paceline", _parameters(stepper, config, folder))
            cast("Any", self.writer).close()
            self.writer = None
            self._normalizers = self._replace_normalizers()
        self.init_tensors()
        self.central_loss = 0.0
        largest = config.grad_norm if config.truncate_grads else None
        self._gradient = _Gradient(self.optimizer, stepper, largest)
        if self.has_central_value:
            self.central_value_net.writter = None
            _Gradient(self.central_value_net.optimizer, stepper, largest)

    def prepare_dataset(self, batch_dict: dict[str, Any]) -> None:
        self.clock.lap()
        values, returns = batch_dict["values"], batch_dict["returns"]
        advantages = (returns - values).sum(1)
        rows = {
            "obses": batch_dict["obses"],
            "states": batch_dict.get("states"),
            "values": torch.cat((values, returns)),
        }
        parts = {name: (rows[name], normalizer.running_mean) for name, normalizer in self._normalizers.items()}
        found = _sums(self._group, parts | {"advantages": (advantages.unsqueeze(1), 0.0)})
        for name, normalizer in self._normalizers.items():
            normalizer.take_in(*found[name])
        super().prepare_dataset(batch_dict)
        if self._normalize_advantage:
            count, total = found["advantages"]
            mean, square = (total / count).squeeze(1).unbind(0)
            # Rounding may take what never varies below zero.
            variance = (square - mean.square()).clamp(min=0.0) * count / (count - 1.0).clamp(min=1.0)
            self.dataset.values_dict["advantages"] = (advantages - mean.float()) / (variance.sqrt().float() + 1e-8)

    def train_actor_critic(self, input_dict: dict[str, Tensor], opt_step: bool = True) -> tuple[Any, ...]:
        self._before = input_dict["mu"], input_dict["sigma"]
        surrogate, value, entropy, _, *rest = super().train_actor_critic(input_dict)
        return surrogate, value, entropy, self._gradient.beside, *rest

    def calc_losses(self, *arguments: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *_, mean, _entropy, _masks = arguments
        # Stock measures it once the gradients have met; here it travels with them.
        self._gradient.beside = policy_kl(mean.detach(), self.std(), *self._before)
        return super().calc_losses(*arguments)

    def train_central_value(self) -> float:
        self.central_loss = super().train_central_value()
        return self.central_loss

    def std(self) -> Tensor:
        return self.model.a2c_network.sigma.detach().exp()

    def go_on_from(self, iteration: int) -> None:
        """What is not in the networks and optimisers; stock forgets the learning rate."""
        self.epoch_num, self.last_lr = iteration, self.optimizer.param_groups[0]["lr"]
        if self.has_central_value:
            central = self.central_value_net
            central.epoch_num, central.lr = iteration, central.optimizer.param_groups[0]["lr"]

    def _replace_normalizers(self) -> dict[str, "_Normalizer"]:
        """Ours in place of stock's; by what of a batch each takes in."""
        models, made = {"obses": self.model}, {}
        if self.has_central_value:
            models["states"] = self.central_value_net.model
        for name, model in models.items():
            if model.normalize_input:
                made[name] = model.running_mean_std = _Normalizer(model.obs_shape).to(self.ppo_device)
        if self.normalize_value:
            # One for all: beside a central value network, stock's agent would never learn its own.
            made["values"] = self.value_mean_std = _Normalizer((1,)).to(self.ppo_device)
            for model in models.values():
                model.value_mean_std = self.value_mean_std
        return made


class _Normalizer(RunningMeanStd):
    """Learns from what it is told to take in. Stock's, in training mode, takes in each minibatch that passes, again in
    every epoch, and only this rank's."""

    def train(self, mode: bool = True) -> "_Normalizer":
        return super().train(False)

    def take_in(self, count: Tensor, total: Tensor) -> None:
        """So many rows, by the sums of their deviations from the present mean, and of the squares of these."""
        shift, square = (total / count).unbind(0)
        # Rounding may take what never varies below zero, and its root would not be a number.
        variance = (square - shift.square()).clamp(min=0.0)
        merged = self._update_mean_var_count_from_moments(
            self.running_mean, self.running_var, self.count, self.running_mean + shift, variance, cast("Any", count)
        )
        self.running_mean, self.running_var, self.count = merged


class _Gradient:
    """An optimiser's, before each of its steps: the mean over all ranks' samples, in one collective, then clipped."""

    def __init__(self, optimizer: Optimizer, stepper: Stepper, largest_norm: float | None):
        self._parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
        self._group, self._share, self._largest_norm = stepper.group, stepper.share, largest_norm
        self.beside = torch.zeros((), device=self._parameters[0].device)
        """A number whose mean is taken with it."""
        optimizer.register_step_pre_hook(self._meet)

    def _meet(self, *_: Any) -> None:
        if not self._group.alone:
            parts = [self.beside, *(p.grad for p in self._parameters if p.grad is not None)]
            message = torch.cat([part.flatten() for part in parts]).mul_(self._share)
            means = self._group.sum_(message).split([part.numel() for part in parts])
            for part, mean in zip(parts, means, strict=True):
                part.copy_(mean.view_as(part))
        if self._largest_norm is not None:
            clip_grad_norm_(self._parameters, self._largest_norm)


class _Worlds:
    """A `Stepper` in the form that the agent calls."""

    def __init__(self, stepper: Stepper):
        self._stepper = stepper

    def reset(self) -> dict[str, Tensor]:
        """The agent asks once per iteration, and goes on where it was."""
        return _renamed(self._stepper.obs)

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
        step = self._stepper.step(actions)
        return _renamed(step.obs), step.reward, step.terminated | step.truncated, {"time_outs": step.truncated}

    def set_train_info(self, *_: Any) -> None: ...


def _renamed(obs: dict[str, Any]) -> dict[str, Any]:
    names = {"policy": "obs", "critic": "states"}
    return {names[name]: rows for name, rows in obs.items() if name in names}


def _sums(group: Group, parts: Mapping[str, tuple[Tensor, Tensor | float]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Over all ranks, in one collective: of each part's rows, how many there are and their `sums` about an origin."""
    own: list[Tensor] = []
    for rows, origin in parts.values():
        own += [torch.full((), len(rows), dtype=torch.float64, device=rows.device), sums(rows, origin)]
    message = group.sum_(torch.cat([tensor.flatten() for tensor in own]))
    split = message.split([tensor.numel() for tensor in own])
    whole = [tensor.view_as(like) for tensor, like in zip(split, own, strict=True)]
    return dict(zip(parts, zip(whole[::2], whole[1::2], strict=True), strict=True))


def _parameters(stepper: Stepper, config: RlGamesSettings, folder: str) -> dict[str, Any]:
    """As a file for RL-Games would have them."""
    env, spaces = stepper.env, {}
    for name, width in _renamed(vector_widths(env, "rl_games")).items():
        spaces["observation_space" if name == "obs" else "state_space"] = Box(-torch.inf, torch.inf, (width,))
    mlp = {"units": config.units, "activation": config.activation, "initializer": {"name": "default"}}
    actions = {
        "mu_activation": "None",
        "sigma_activation": "None",
        "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": 0.0},
        "fixed_sigma": True,
    }
    # What concerns all ranks' samples is not for the library to do with this one's.
    settings = asdict(config) | {"normalize_advantage": False, "truncate_grads": False}
    central = settings | {"network": {"name": "actor_critic", "central_value": True, "mlp": mlp}}
    network = {"name": "actor_critic", "separate": config.separate, "space": {"continuous": actions}, "mlp": mlp}
    settings |= {
        "name": "paceline",
        "env_name": "paceline",
        "train_dir": folder,
        "device": str(env.device),
        "num_actors": env.num_envs,
        "vec_env": _Worlds(stepper),
        "env_info": spaces | {"action_space": Box(-1.0, 1.0, (env.num_actions,))},
        "features": {"observer": AlgoObserver()},
        "reward_shaper": lambda reward: reward * config.reward_scale,
        # The tasks clamp by themselves.
        "clip_actions": False,
        # There is no recurrence; by default the number of samples would have to be a multiple of 4.
        "seq_length": 1,
        "central_value_config": central if "state_space" in spaces else None,
    }
    return {"model": {"name": "continuous_a2c_logstd"}, "network": network, "config": settings}
