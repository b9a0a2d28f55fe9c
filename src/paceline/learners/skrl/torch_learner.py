"""skrl's PPO on torch, on our envs and ranks. Its trainer, which logs and saves by itself, is not used."""

import copy
from typing import Any, cast

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.env.vec_env import Step, VecEnv
from paceline.learners.networks import mlp
from paceline.learners.rollout import (
    Clock,
    Stepper,
    load_optimizer_state,
    optimizer_state,
    same_on_all_ranks,
    set_learning_rate,
    vector_widths,
)
from paceline.learners.skrl.imports import without_launcher
from paceline.learners.skrl.settings import SkrlSettings
from paceline.tensors.statistics import moments, standardized

with without_launcher():
    from skrl.agents.torch import ExperimentCfg
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.resources.schedulers.torch import KLAdaptiveLR

# What skrl's preprocessors call our groups of observations.
_GROUPS = {"policy": "observation", "critic": "state"}
# By these skrl plans its logs and files, of which there are none here.
_NO_PLAN = {"timestep": 0, "timesteps": 0}


class SkrlTorch:
    """A `Learner`; the critic sees the group "critic", which skrl calls states, where the env has one."""

    def __init__(self, env: VecEnv, config: SkrlSettings, seed: int, group: Group):
        self.env, self.config, self.iteration = env, config, 0
        self._stepper = Stepper(env, seed, group)
        self._agent = _Agent(self._stepper, config, seed)
        models = {"policy": self._agent.policy, "value": self._agent.value}
        self._networks = nn.ModuleDict(models | self._agent.normalizers())
        same_on_all_ranks(group, list(self._networks.parameters()))

    def learn(self) -> dict[str, float]:
        agent, stepper = self._agent, self._stepper
        stepper.begin(self.iteration, self.config.rollouts)
        clock = Clock(self.env.device)
        self._collect()
        clock.lap()
        agent.tracking_data.clear()
        agent.scheduler.divergences.clear()
        agent.update(**_NO_PLAN)
        clock.lap()
        losses: dict[str, Any] = {
            "loss/surrogate": agent.tracking_data["Loss / Policy loss"],
            "loss/value": agent.tracking_data["Loss / Value loss"],
            "loss/entropy": agent.policy.get_entropy(role="policy"),
            "policy/kl": agent.scheduler.divergences,
            "policy/learning_rate": agent.optimizer.param_groups[0]["lr"],
            "policy/std": agent.tracking_data["Policy / Standard deviation"],
        }
        self.iteration += 1
        return stepper.report(losses, clock)

    def first_non_finite(self) -> str | None:
        return self._stepper.first_non_finite()

    def policy(self) -> nn.Module:
        scaler = self._agent.normalizers().get("observation_scaler")
        return _Deployed(self._agent.policy.network, scaler).cpu().eval().requires_grad_(False)

    def state(self) -> dict[str, Any]:
        return {
            "networks": {name: tensor.clone() for name, tensor in self._networks.state_dict().items()},
            "optimizer": optimizer_state(self._agent.optimizer),
            "iteration": self.iteration,
            "envs": self._stepper.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        self._networks.load_state_dict(state["networks"])
        load_optimizer_state(self._agent.optimizer, state["optimizer"])
        self._stepper.load_state(state["envs"])

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self._agent.optimizer, learning_rate)

    def load_policy(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        acting = ("policy", "observation_scaler")
        networks = nn.ModuleDict({name: module for name, module in self._networks.items() if name in acting})
        found = state["networks"].items()
        networks.load_state_dict({name: tensor for name, tensor in found if name.startswith(acting)})

    @torch.no_grad()
    def _collect(self) -> None:
        obs = self._stepper.obs
        for _ in range(self.config.rollouts):
            actions, _ = self._agent.act(obs["policy"], obs.get("critic"), **_NO_PLAN)
            step = self._stepper.step(actions)
            self._agent.record(obs, actions, step)
            obs = step.obs


class _Agent(PPO):
    """Learns from the samples of all ranks. Stock's own ranks are off: they keep their statistics apart."""

    policy: "_Policy"
    value: "_Value"
    memory: "_Memory"
    scheduler: "_Scheduler"

    def __init__(self, stepper: Stepper, config: SkrlSettings, seed: int):
        env, widths = stepper.env, vector_widths(stepper.env, "skrl")
        spaces: dict[str, Any] = {
            "observation_space": _space(widths["policy"]),
            "state_space": _space(widths["critic"]) if "critic" in widths else None,
            "action_space": _space(env.num_actions),
            "device": env.device,
        }
        generator = torch.Generator().manual_seed(seed)
        super().__init__(
            models={"policy": _Policy(spaces, config, generator), "value": _Value(spaces, config, generator)},
            memory=_Memory(config.rollouts, stepper),
            cfg=_settings(config, stepper),
            **spaces,
        )
        self.scaler = _GradientsOfAllRanks(stepper)
        self._scale_values, self._value_preprocessor = self._value_preprocessor, self._keep_and_scale_values
        self.init()
        self.enable_training_mode()

    def record(self, obs: dict[str, Tensor], actions: Tensor, step: Step) -> None:
        cut, ended = step.truncated.unsqueeze(1), step.terminated.unsqueeze(1)
        # Of an episode that was cut, its own last observations and not the next one's first.
        beyond = {name: torch.where(cut, step.final_obs[name], after) for name, after in step.obs.items()}
        self.record_transition(
            observations=obs["policy"],
            states=cast("Tensor", obs.get("critic")),
            actions=actions,
            rewards=step.reward.unsqueeze(1),
            next_observations=beyond["policy"],
            next_states=cast("Tensor", beyond.get("critic")),
            # Stock, where it does not bootstrap a cut episode, has it go on into the next.
            terminated=ended if self.cfg.time_limit_bootstrap else ended | cut,
            truncated=cut,
            infos={},
            **_NO_PLAN,
        )

    def normalizers(self) -> dict[str, nn.Module]:
        found = {
            "observation_scaler": self._observation_preprocessor,
            "state_scaler": self._state_preprocessor,
            "value_scaler": self._scale_values,
        }
        return {name: scaler for name, scaler in found.items() if isinstance(scaler, nn.Module)}

    def _keep_and_scale_values(self, values: Tensor, *, train: bool = False, inverse: bool = False) -> Tensor:
        if train:
            self.memory.unscaled.append(values.clone())
        return self._scale_values(values, train=train, inverse=inverse)


def _settings(config: SkrlSettings, stepper: Stepper) -> PPO_CFG:
    widths = vector_widths(stepper.env, "skrl")
    # PPO_CFG's own kl_threshold stays off: by it a rank would leave an epoch that the others go on with.
    same = ("rollouts", "learning_epochs", "mini_batches", "discount_factor", "learning_rate", "grad_norm_clip")
    same += ("ratio_clip", "value_clip", "entropy_loss_scale", "value_loss_scale", "time_limit_bootstrap")
    scaled = {"value": 1} if config.value_normalization else {}
    if config.observation_normalization:
        scaled |= {skrls: widths[ours] for ours, skrls in _GROUPS.items() if ours in widths}
    scalers: dict[str, Any] = {f"{name}_preprocessor": _Scaler for name in scaled}
    for name, width in scaled.items():
        scalers[f"{name}_preprocessor_kwargs"] = {"width": width, "device": stepper.env.device, "group": stepper.group}
    return PPO_CFG(
        **{name: getattr(config, name) for name in same},
        gae_lambda=config.gae_lambda,
        learning_rate_scheduler=_Scheduler,
        learning_rate_scheduler_kwargs={"config": config, "stepper": stepper},
        # By 1.0 as well: stock adds to the result in place, and must not have the env's own tensor.
        rewards_shaper=lambda rewards, *_: rewards * config.rewards_shaper_scale,
        experiment=ExperimentCfg(write_interval=0, checkpoint_interval=0),
        **scalers,
    )


def _space(width: int) -> Box:
    return Box(-np.inf, np.inf, (width,))


class _Policy(GaussianMixin, Model):
    def __init__(self, spaces: dict[str, Any], config: SkrlSettings, generator: torch.Generator):
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self)
        sizes = (self.num_observations, config.layers, self.num_actions)
        self.network = mlp(*sizes, config.activations, 0.01, generator)
        self.log_std = nn.Parameter(torch.full((self.num_actions,), config.initial_log_std))

    # The mixin gives the role by position, whatever Model says.
    def compute(self, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.network(inputs["observations"]), {"log_std": self.log_std}


class _Value(DeterministicMixin, Model):
    def __init__(self, spaces: dict[str, Any], config: SkrlSettings, generator: torch.Generator):
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self._sees = "states" if spaces["state_space"] else "observations"
        self.network = mlp(
            self.num_states or self.num_observations, config.layers, 1, config.activations, 1.0, generator
        )

    # The mixin gives the role by position, whatever Model says.
    def compute(self, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.network(inputs[self._sees]), {}


class _Memory(RandomMemory):
    """Advantages are normalised over the samples of all ranks, not by each rank over its own."""

    def __init__(self, rollouts: int, stepper: Stepper):
        super().__init__(memory_size=rollouts, num_envs=stepper.env.num_envs, device=stepper.env.device)
        self._group = stepper.group
        self.unscaled: list[Tensor] = []
        """Values and returns, as the update hands them to be scaled: what lies between them are the advantages."""

    def set_tensor_by_name(self, name: str, tensor: Tensor) -> None:
        if name == "advantages":
            values, returns = self.unscaled
            self.unscaled = []
            tensor = standardized(self._group.sum_, returns - values)
        super().set_tensor_by_name(name, tensor)

    def sample(
        self, names: list[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Tensor]]:
        # Stock draws the order on the host, and on a GPU would send it over for every tensor of every minibatch.
        parts = torch.randperm(batch_size, device=self.device).tensor_split(mini_batches)
        found = [self.tensors_view.get(name) for name in names]
        return [[cast("Tensor", None) if rows is None else rows[part] for rows in found] for part in parts]


class _Scaler(RunningStandardScaler):
    """Has seen the samples of all ranks, and is the same on each."""

    running_mean: Tensor

    def __init__(self, width: int, device: torch.device, group: Group):
        super().__init__(width, device=device)
        self._group = group

    def forward(
        self, x: Tensor | None, *, train: bool = False, inverse: bool = False, no_grad: bool = True
    ) -> Tensor | None:
        if train and x is not None:
            count, mean, variance = moments(self._group.sum_, x, self.running_mean)
            self._parallel_variance(mean, variance, cast("int", count))
        return super().forward(x, inverse=inverse, no_grad=no_grad)


class _Scheduler(KLAdaptiveLR):
    """Follows the divergence of all ranks together, so that they keep one learning rate; and remembers it."""

    def __init__(self, optimizer: Optimizer, *, config: SkrlSettings, stepper: Stepper):
        self._adapts = config.learning_rate_scheduler != "none"
        self._group, self._share, self._device = stepper.group, stepper.share, stepper.env.device
        self.divergences: list[float] = []
        super().__init__(optimizer, kl_threshold=config.kl_threshold)

    def step(self, kl: Tensor | float | None = None, *, epoch: int | None = None) -> None:
        if kl is None:  # torch's constructor
            return
        kl = float(self._group.sum_(torch.as_tensor(kl * self._share, dtype=torch.float64, device=self._device)))
        self.divergences.append(kl)
        if self._adapts:
            super().step(kl)


class _GradientsOfAllRanks(torch.amp.GradScaler):
    """Averages over them where stock would undo the scaling of mixed precision: after the gradient, before its norm is
    clipped."""

    def __init__(self, stepper: Stepper):
        super().__init__(stepper.env.device.type, enabled=False)
        self._group, self._share = stepper.group, stepper.share

    def unscale_(self, optimizer: Optimizer) -> None:
        if self._group.alone:
            return
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        flat = self._group.sum_(torch.cat([gradient.flatten() for gradient in gradients]).mul_(self._share))
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


class _Deployed(nn.Module):
    """The policy's mean for raw observations. The scaler clips, so that it cannot be folded into the first layer."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Sequential, scaler: nn.Module | None):
        super().__init__()
        self.network = copy.deepcopy(network)
        self._most = float("inf")
        mean, std = torch.zeros(()), torch.ones(())
        if isinstance(scaler, _Scaler):
            mean, std = scaler.running_mean.float(), scaler.running_variance.float().sqrt() + scaler.epsilon
            self._most = scaler.clip_threshold
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, obs: Tensor) -> Tensor:
        return self.network(((obs - self.mean) / self.std).clamp(-self._most, self._most))
