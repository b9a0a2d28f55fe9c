"""Code that the skrl learners on torch and JAX share. The trainer of skrl, which logs and saves, is not used."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.distributed.launcher import without_launcher as without_launcher  # the learners import it from here
from paceline.env.vec_env import ActionSpec, Step, VecEnv
from paceline.learners.categorical import with_choices
from paceline.learners.encoders import ImageEncoder, images_of
from paceline.learners.image_packing import ImagePacking
from paceline.learners.learner import Learner
from paceline.learners.networks import Policy
from paceline.learners.rollout import vector_widths
from paceline.learners.settings import check_action_space, refuse
from paceline.learners.skrl.settings import SkrlSettings
from paceline.tensors.statistics import row_sums, standardize

_NO_SCHEDULE = {"timestep": 0, "timesteps": 0}
"""Arguments by which skrl schedules its logs and files, which are not used."""


class ObservationRows:
    """Rows [env, size] of the group "policy", if there is one, and all images: an observation of skrl is a vector. If
    the network has parts, the rows have all groups of vectors except "critic"."""

    def __init__(self, env: VecEnv, learner: str, has_parts: bool = False):
        images = images_of(env)
        widths = vector_widths(env, learner, tuple(images), has_parts)
        self.vector_widths = {name: width for name, width in widths.items() if name != "critic"}
        """Width of each group of vectors that the rows have."""
        self.vectors = tuple(self.vector_widths)
        """Groups of vectors that the rows have."""
        self.groups = tuple(name for name in env.observation_spec if name in (*self.vectors, *images))
        """All groups that the rows have, in the order of the env."""
        total = {"policy": sum(self.vector_widths.values())} if self.vectors else {}
        self.widths = total | {name: widths[name] for name in ("critic",) if name in widths}
        """Width of the vectors in a row, as "policy", and of the group "critic", if they exist."""
        self.images = ImagePacking(images) if images else None
        self.size = self.widths.get("policy", 0) + (self.images.size if self.images else 0)
        """Number of columns."""
        self.dtype = self.images.dtype if self.images and not self.vectors else torch.float32

    def pack(self, obs: dict[str, Tensor]) -> Tensor:
        parts = [obs[name] for name in self.vectors]
        if self.images:
            parts.append(self.images.pack(obs).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def unpack(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the groups of rows [batch, size]: vectors, and images [batch, channel, height, width] in the dtype of
        the rows."""
        sizes = list(self.vector_widths.values())
        *vectors, packed = rows.tensor_split(list(accumulate(sizes)) or [0], dim=1)
        groups = dict(zip(self.vectors, vectors, strict=False))
        return groups | (self.images.unpack(packed.unflatten(1, self.images.shape)) if self.images else {})

    def spaces(self, actions: ActionSpec, device: Any) -> dict[str, Any]:
        """Return the result of `spaces` for these observations."""
        return spaces(self.widths | {"policy": self.size}, actions, device)


def spaces(widths: dict[str, int], actions: ActionSpec, device: Any) -> dict[str, Any]:
    """Return spaces and device as keyword arguments of skrl's classes. skrl calls the group "critic" states."""
    sizes = {"observation_space": widths["policy"], "state_space": widths.get("critic")}
    boxes = {name: Box(-np.inf, np.inf, (size,)) if size else None for name, size in sizes.items()}
    return {"device": device, **boxes, "action_space": _action_space(actions)}


def _action_space(actions: ActionSpec) -> Space[Any]:
    if len(actions.choices) == 1:
        return Discrete(actions.choices[0])
    return MultiDiscrete(list(actions.choices)) if actions.choices else Box(-np.inf, np.inf, (actions.width,))


def make_encoder(images: ImagePacking | None, config: SkrlSettings, generator: torch.Generator) -> ImageEncoder | None:
    """Return an encoder of the images, or None if there are none."""
    if images is None:
        return None
    refuse(config, "image_training", "targets", "policy", "ppo")
    layers = (config.image_channels, config.image_kernels, config.image_strides)
    return ImageEncoder(images.specs, *layers, config.image_features, config.image_pooling, generator)


def agent_config(
    kind: Any, config: SkrlSettings, widths: dict[str, int], make_scaler: Callable[[int], Any], **more: Any
) -> Any:
    """Return the configuration of an agent: skrl's PPO_CFG, which is `kind`, with `more` options and a preprocessor
    that `make_scaler(width)` returns for each normalized input."""
    scaled = {"value": 1} if config.value_normalization else {}
    if config.observation_normalization:
        names = {"policy": "observation", "critic": "state"}
        scaled |= {names[group]: width for group, width in widths.items()}
    options = {name: value for name, value in vars(config).items() if name in kind.__dataclass_fields__}
    for name, width in scaled.items():
        options |= {f"{name}_preprocessor": make_scaler, f"{name}_preprocessor_kwargs": {"width": width}}
    # Otherwise one rank could stop an epoch that the others continue.
    options["kl_threshold"] = 0.0
    # Multiply also with a scale of 1: skrl adds to the result in place, and must not change the tensor of the env.
    options["rewards_shaper"] = lambda rewards, *_, **__: rewards * config.rewards_shaper_scale
    cfg = kind(**options | more)
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    return cfg


class UnscaledValues:
    """Value preprocessor that keeps its inputs. An update of skrl scales the values and then the returns of the
    rollout. The advantages, which skrl does not expose, are the returns minus the values, both before scaling."""

    def __init__(self, scale: Callable[..., Any], group: Group, correction: int):
        self._scale, self._group, self._correction, self._kept = scale, group, correction, list[Any]()

    def __call__(self, values: Any, *, train: bool = False, inverse: bool = False) -> Any:
        if train:
            self._kept.append(values + 0.0)
        return self._scale(values, train=train, inverse=inverse)

    def take_advantages(self) -> Tensor:
        """Return the advantages, standardized over the samples of all ranks."""
        values, returns = map(torch.from_dlpack, self._kept)
        self._kept.clear()
        advantages = returns - values
        return standardize(advantages, self._group.sum_(row_sums(advantages)), self._correction)


class SkrlLearner(Learner):
    """Learner whose actor uses the observation group "policy" and all images. The critic uses the group "critic" if the
    env has one, and the groups of the actor otherwise."""

    agent: Any
    """skrl's PPO with the methods `log_std`, for continuous actions, `learning_rate` and `policy_networks`."""

    def __init__(self, env: VecEnv, config: SkrlSettings, seed: int, group: Group, rows: ObservationRows):
        super().__init__(env, seed, group)
        check_action_space(config, self._rollout_env.actions)
        self.config, self._rows = config, rows
        self._divergences: list[float] = []

    def average_kl(self, kl: float) -> float:
        """Return the KL divergence of an epoch over all ranks, and record it."""
        self._divergences.append(self._rollout_env.average(kl))
        return self._divergences[-1]

    def from_torch(self, tensor: Tensor) -> Any:
        """Convert a tensor to an array of the framework."""
        return tensor

    @torch.no_grad()
    def collect(self) -> None:
        """Collect a rollout into the memory of the agent."""
        self._divergences.clear()
        self.agent.tracking_data.clear()
        obs = self._rollout_env.begin_rollout(self.config.rollouts)
        for _ in range(self.config.rollouts):
            inputs = self.inputs(obs)
            actions, _ = self.agent.act(*inputs, **_NO_SCHEDULE)
            step = self._rollout_env.step(torch.from_dlpack(actions))
            self._record(obs, inputs, actions, step)
            obs = step.obs

    def _record(self, obs: dict[str, Tensor], inputs: tuple[Any, Any], actions: Any, step: Step) -> None:
        truncated, terminated = step.truncated.unsqueeze(1), step.terminated.unsqueeze(1)
        # A truncated episode is bootstrapped from its own last observations, not from the first ones of the next. There
        # are no images of the state before a reset: those before the step are used.
        last = obs | step.final_obs
        next_inputs = self.inputs(
            {
                name: torch.where(step.truncated.view(-1, *[1] * (after.dim() - 1)), last[name], after)
                for name, after in step.obs.items()
            }
        )
        # Without bootstrapping, skrl would continue a truncated episode into the next one.
        ended = terminated if self.config.time_limit_bootstrap else terminated | truncated
        self.agent.record_transition(
            observations=inputs[0],
            states=inputs[1],
            actions=actions,
            rewards=self.from_torch(step.reward.unsqueeze(1)),
            next_observations=next_inputs[0],
            next_states=next_inputs[1],
            terminated=self.from_torch(ended),
            truncated=self.from_torch(truncated),
            infos={},
            **_NO_SCHEDULE,
        )

    def inputs(self, obs: dict[str, Tensor]) -> tuple[Any, Any]:
        """Return the rows of the actor and the group "critic", which skrl calls observations and states. The latter may
        be None."""
        return self.from_torch(self._rows.pack(obs)), self.from_torch(obs["critic"]) if "critic" in obs else None

    def update(self) -> dict[str, Any]:
        agent = self.agent
        agent.update(**_NO_SCHEDULE)
        if self._rollout_env.actions.choices:
            # An estimate, from the actions of the rollout.
            entropy, std = -torch.from_dlpack(agent.memory.get_tensor_by_name("log_prob")), {}
        else:
            log_std = agent.log_std()
            entropy, std = (log_std + 0.5 * math.log(2.0 * math.pi * math.e)).sum(), {"policy/std": log_std.exp()}
        return {
            "loss/surrogate": agent.tracking_data["Loss / Policy loss"],
            "loss/value": agent.tracking_data["Loss / Value loss"],
            "loss/entropy": entropy,
            "policy/kl": self._divergences,
            "policy/learning_rate": agent.learning_rate(),
            **std,
        }

    def policy(self) -> Policy:
        network, encoder = self.agent.policy_networks()
        network = with_choices(network, self._rollout_env.actions.choices)
        if self.config.network:
            return Policy(network, (), encoder)
        if scaler := self.agent.checkpoint_modules.get("observation_preprocessor"):
            features = self.config.image_features if encoder else 0
            network = nn.Sequential(Normalizer(scaler, features), network)
        return Policy(network, self._rows.vectors, encoder)


class Normalizer(nn.Module):
    """Normalizes vectors and clips them as a scaler of skrl does, on torch or JAX. The features of images, which come
    first, do not change."""

    mean: Tensor
    std: Tensor

    def __init__(self, scaler: Any, features: int):
        super().__init__()
        mean, variance = (torch.from_dlpack(each).float() for each in (scaler.running_mean, scaler.running_variance))
        self.register_buffer("mean", mean)
        self.register_buffer("std", variance.sqrt() + scaler.epsilon)
        self._limit, self._features = scaler.clip_threshold, features

    def forward(self, x: Tensor) -> Tensor:
        features, obs = x[:, : self._features], x[:, self._features :]
        obs = ((obs - self.mean) / self.std).clamp(-self._limit, self._limit)
        return torch.cat((features, obs), dim=1) if self._features else obs
