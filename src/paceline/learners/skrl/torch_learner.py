"""skrl's PPO on torch, on Paceline's envs and ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.env.vec_env import VecEnv
from paceline.learners.encoders import ImageEncoder
from paceline.learners.image_packing import ImagePacking
from paceline.learners.networks import Encoder, mlp
from paceline.learners.optimizers import GradientHook, broadcast_parameters, set_learning_rate
from paceline.learners.rollout import RolloutEnv
from paceline.learners.skrl.learner import (
    ObservationRows,
    SkrlLearner,
    UnscaledValues,
    agent_config,
    make_encoder,
    without_launcher,
)
from paceline.learners.skrl.settings import SkrlSettings
from paceline.tensors.statistics import merge_, row_sums

with without_launcher():
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.resources.schedulers.torch import KLAdaptiveLR


class SkrlTorch(SkrlLearner):
    """skrl's PPO on torch."""

    agent: "_Agent"

    def __init__(self, env: VecEnv, config: SkrlSettings, seed: int, group: Group):
        rows = ObservationRows(env, "skrl")
        super().__init__(env, config, seed, group, rows)
        self.agent = _Agent(self._rollout_env, rows, config, seed, self.average_kl)
        broadcast_parameters(group, self.agent.networks.parameters())
        self.parts = {"networks": self.agent.networks, "optimizer": self.agent.optimizer}

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.agent.optimizer, learning_rate)


class _Agent(PPO):
    """Learns from the samples of all ranks. skrl's own distributed training, which has statistics per rank, is off."""

    policy: "_Policy"
    value: "_Value"
    memory: "_Memory"

    def __init__(
        self,
        rollout_env: RolloutEnv,
        rows: ObservationRows,
        config: SkrlSettings,
        seed: int,
        average_kl: Callable[[float], float],
    ):
        env, group = rollout_env.env, rollout_env.group
        boxes = rows.spaces(env.num_actions, env.device)
        networks = (rows.images, config, torch.Generator().manual_seed(seed))
        memory = _Memory(memory_size=config.rollouts, num_envs=env.num_envs, device=env.device)
        memory.observation_dtype = rows.dtype
        super().__init__(
            models={"policy": _Policy(boxes, *networks), "value": _Value(boxes, *networks)},
            memory=memory,
            cfg=agent_config(
                PPO_CFG,
                config,
                rows.widths,
                partial(_Scaler, group=group, device=env.device),
                learning_rate_scheduler=_Scheduler,
                learning_rate_scheduler_kwargs={"config": config, "average_kl": average_kl},
                # The gradient is clipped after it is averaged over ranks.
                grad_norm_clip=0.0,
            ),
            **boxes,
        )
        modules = {name: part for name, part in self.checkpoint_modules.items() if isinstance(part, nn.Module)}
        self.networks = nn.ModuleDict(modules)
        """Networks and normalizers."""
        GradientHook(self.optimizer, rollout_env, config.grad_norm_clip)
        self._value_preprocessor = memory.values = UnscaledValues(self._value_preprocessor, group, correction=1)
        self.init()
        self.enable_training_mode()

    def log_std(self) -> Tensor:
        return self.policy.log_std.detach()

    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def policy_networks(self) -> tuple[nn.Module, Encoder | None]:
        """Return a network that computes mean actions from features and the normalized vector, and the encoder."""
        return self.policy.network, self.policy.encoder


class _Policy(GaussianMixin, Model):
    def __init__(
        self,
        boxes: dict[str, Any],
        images: ImagePacking | None,
        config: SkrlSettings,
        generator: torch.Generator,
    ):
        Model.__init__(self, **boxes)
        GaussianMixin.__init__(self)
        self._images, self.encoder = images, make_encoder(images, config, generator)
        inputs = self.num_observations + (config.image_features - images.size if images else 0)
        self.network = mlp(inputs, config.layers, self.num_actions, config.activations, 0.01, generator)
        self.log_std = nn.Parameter(torch.full((self.num_actions,), config.initial_log_std))

    # The mixin passes the role by position, unlike the declaration in Model.
    def compute(self, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.network(_encoded(inputs["observations"], self._images, self.encoder)), {"log_std": self.log_std}


class _Value(DeterministicMixin, Model):
    def __init__(
        self,
        boxes: dict[str, Any],
        images: ImagePacking | None,
        config: SkrlSettings,
        generator: torch.Generator,
    ):
        Model.__init__(self, **boxes)
        DeterministicMixin.__init__(self)
        self._input = "states" if boxes["state_space"] else "observations"
        self._images = None if boxes["state_space"] else images
        self.encoder = make_encoder(self._images, config, generator)
        inputs = self.num_states or self.num_observations + (config.image_features - images.size if images else 0)
        self.network = mlp(inputs, config.layers, 1, config.activations, 1.0, generator)

    # The mixin passes the role by position, unlike the declaration in Model.
    def compute(self, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.network(_encoded(inputs[self._input], self._images, self.encoder)), {}


def _encoded(rows: Tensor, images: ImagePacking | None, encoder: ImageEncoder | None) -> Tensor:
    """Return the features of the images, if there are any, and the vector of each row."""
    if images is None or encoder is None:
        return rows
    vector, packed = rows.tensor_split([rows.shape[1] - images.size], dim=1)
    return torch.cat((encoder(images.unpack(packed.unflatten(1, images.shape))), vector), dim=1)


class _Memory(RandomMemory):
    """Replaces the advantages by those that are standardized over all ranks."""

    values: UnscaledValues
    observation_dtype: torch.dtype

    def create_tensor(self, name: str, *, dtype: torch.dtype | None = None, **options: Any) -> bool:
        return super().create_tensor(name, dtype=self.observation_dtype if name == "observations" else dtype, **options)

    def set_tensor_by_name(self, name: str, tensor: Tensor) -> None:
        super().set_tensor_by_name(name, self.values.take_advantages() if name == "advantages" else tensor)

    def sample(
        self, names: list[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Tensor]]:
        # skrl samples the order on the host and copies it to the GPU for every tensor of every minibatch.
        parts = torch.randperm(batch_size, device=self.device).tensor_split(mini_batches)
        found = [self.tensors_view.get(name) for name in names]
        return [[cast("Tensor", None) if rows is None else rows[part] for rows in found] for part in parts]


class _Scaler(RunningStandardScaler):
    """Scaler of the first `width` columns with the statistics of the samples of all ranks."""

    running_mean: Tensor
    running_variance: Tensor
    current_count: Tensor

    def __init__(self, width: int, group: Group, device: torch.device):
        super().__init__(width, device=device)
        self._group, self._width = group, width

    def forward(
        self, x: Tensor | None, *, train: bool = False, inverse: bool = False, no_grad: bool = True
    ) -> Tensor | None:
        if x is None:
            return None
        x, images = x.tensor_split([self._width], dim=-1)
        if train:
            sums = self._group.sum_(row_sums(x, self.running_mean))
            merge_(self.current_count, self.running_mean, self.running_variance, sums)
        x = cast("Tensor", super().forward(x, inverse=inverse, no_grad=no_grad))
        return torch.cat((x, images), dim=-1) if images.shape[-1] else x


class _Scheduler(KLAdaptiveLR):
    """Adapts the learning rate, the same on all ranks, to the KL divergence over all ranks."""

    def __init__(self, optimizer: Optimizer, *, config: SkrlSettings, average_kl: Callable[[float], float]):
        self._adaptive, self._average_kl = config.learning_rate_scheduler != "none", average_kl
        super().__init__(optimizer, kl_threshold=config.kl_threshold)

    def step(self, kl: Tensor | float | None = None, *, epoch: int | None = None) -> None:
        if kl is None:  # torch's constructor
            return
        average = self._average_kl(cast("float", kl))
        if self._adaptive:
            super().step(average)
