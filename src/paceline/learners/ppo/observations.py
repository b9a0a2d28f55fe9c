"""Observations of PPO as inputs of its networks: groups, normalizers, the image encoder and the images of a rollout."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.env.vec_env import TensorSpec, VecEnv
from paceline.errors import UserError
from paceline.learners.categorical import with_choices
from paceline.learners.encoders import TARGETS, ImageEncoder, images_of
from paceline.learners.networks import Policy, fold_normalizer, vector_input
from paceline.learners.ppo.samples import Rollout
from paceline.learners.ppo.settings import PpoSettings
from paceline.learners.rollout import vector_widths
from paceline.tensors.statistics import RunningStatistics


class Observations:
    """Computes the inputs of actor and critic from observation groups. The actor uses "policy" and the images. The
    critic uses "critic" if the env has it, and the groups of the actor otherwise.

    Rows of samples are padded with zeros to a multiple of `alignment` columns.
    """

    def __init__(self, env: VecEnv, config: PpoSettings, generator: torch.Generator, alignment: int):
        images, device = images_of(env), env.device
        widths = vector_widths(env, "ppo", tuple(images))
        self._normalizes, self._alignment = config.normalize_observations, alignment
        self.actor_groups = ("policy",) if "policy" in widths else ()
        """Groups of vectors that the actor uses."""
        self.critic_groups = ("critic",) if "critic" in widths else self.actor_groups
        """Groups of vectors that the critic uses."""
        self.critic_uses_images = bool(images) and "critic" not in widths
        self.regresses = bool(images) and config.image_training == "targets"
        """True if the encoder is trained by regression and not by the loss of the policy."""
        targets = _num_targets(env) if self.regresses else 0
        self.encoder = _make_encoder(images, config, targets, generator).to(device) if images else None
        features = (targets or config.image_features) if images else 0
        self.actor_width = sum(widths[name] for name in self.actor_groups) + features
        """Width of the input of the actor."""
        of_critic = features if self.critic_uses_images else 0
        self.critic_width = sum(widths[name] for name in self.critic_groups) + of_critic
        """Width of the input of the critic."""
        self.images = {name: _storage(spec, config.horizon + 1, env) for name, spec in images.items()}
        """Images of a rollout, [step, env, height, width, channel]."""
        self.normalizers = {name: RunningStatistics(width, device) for name, width in widths.items()}
        if self.regresses:
            self.normalizers[TARGETS] = RunningStatistics(targets, device)
            # For the update the predictions are a part of the vector of the policy.
            widths["policy"] += targets
        self.sample_groups = (*widths, *(() if self.regresses else images))
        """Groups that samples have."""
        self.sample_widths = {name: width + -width % alignment for name, width in widths.items()}
        """Widths of the vectors that samples have, with padding."""

    def encoder_of_policy_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the encoder if the loss of the policy trains it."""
        return list(self.encoder.parameters()) if self.encoder and not self.regresses else []

    def store_images(self, index: int, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy images, which the env overwrites, into the rollout. Return the observations with the copies."""
        for name, images in self.images.items():
            images[index].copy_(obs[name].permute(0, 2, 3, 1))
        return obs | {name: images[index].permute(0, 3, 1, 2) for name, images in self.images.items()}

    def normalize(self, group: str, obs: Tensor) -> Tensor:
        return self.normalizers[group].normalize(obs) if self._normalizes else obs

    def normalized(self, obs: dict[str, Tensor], groups: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the normalized vectors of some groups."""
        return {name: self.normalize(name, obs[name]) for name in groups}

    def network_inputs(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the inputs of actor and critic from normalized observations, which include the predictions of an
        encoder that is trained by regression."""
        features = self.encoder(obs) if self.encoder and not self.regresses else None
        of_critic = features if self.critic_uses_images else None
        return vector_input(obs, self.actor_groups, features), vector_input(obs, self.critic_groups, of_critic)

    def pad(self, rows: Tensor) -> Tensor:
        """Add columns of zeros up to a multiple of the alignment."""
        padding = -rows.shape[-1] % self._alignment
        return functional.pad(rows, (0, padding)) if padding else rows

    def of_samples(self, name: str, rollout: Rollout) -> Tensor:
        """Return the observations of a group in the samples of a rollout."""
        rows = rollout.obs[name][:-1]
        if name in self.images:
            return rows
        rows = self.normalize(name, rows)
        return self.pad(torch.cat((rollout.features, rows), dim=-1) if rollout.features is not None else rows)

    def make_policy(
        self, actor: nn.Module, choices: tuple[int, ...], normalizers: dict[str, RunningStatistics]
    ) -> Policy:
        """Return the policy over observations that are not normalized, from the actor and normalizers of its groups.
        `choices` are those of `ActionDistribution`."""
        groups = self.actor_groups
        if self._normalizes and groups:
            used = [normalizers[name] for name in groups]
            mean, std = torch.cat([each.mean for each in used]), torch.cat([each.std() for each in used])
            actor = fold_normalizer(actor, mean, std)
        return Policy(with_choices(actor, choices), groups, self.encoder)


def _make_encoder(
    images: dict[str, TensorSpec], config: PpoSettings, targets: int, generator: torch.Generator
) -> ImageEncoder:
    layers = config.image_channels, config.image_kernels, config.image_strides
    sizes = config.image_features, config.image_pooling, generator, targets
    return ImageEncoder(images, *layers, *sizes, getattr(torch, config.image_dtype))


def _num_targets(env: VecEnv) -> int:
    """Return the number of targets of the regression. Raise UserError if the env lacks a group."""
    missing = {"policy", "critic", TARGETS} - env.observation_spec.keys()
    if missing:
        raise UserError(
            f"--ppo.image-training targets: the task has no observation group {', '.join(sorted(missing))}; use "
            "--ppo.image-training policy, or add the group to Task.observe"
        )
    return env.observation_spec[TARGETS].shape[0]


def _storage(spec: TensorSpec, steps: int, env: VecEnv) -> Tensor:
    """Return memory for images, [step, env, height, width, channel]."""
    channels, height, width = spec.shape
    return torch.zeros((steps, env.num_envs, height, width, channels), dtype=spec.dtype, device=env.device)
