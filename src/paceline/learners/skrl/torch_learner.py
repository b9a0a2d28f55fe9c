"""skrl's PPO on torch, on Paceline's envs and ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.env.vec_env import VecEnv
from paceline.learners.networks import Encoder
from paceline.learners.optimizers import GradientHook, broadcast_parameters, set_learning_rate
from paceline.learners.rollout import RolloutEnv
from paceline.learners.skrl.learner import (
    ObservationRows,
    SkrlLearner,
    UnscaledValues,
    agent_config,
    without_launcher,
)
from paceline.learners.skrl.settings import SkrlSettings
from paceline.learners.skrl.torch_networks import PolicyNetwork, make_networks
from paceline.tensors.statistics import merge_, row_sums

with without_launcher():
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.memories.torch import RandomMemory
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.resources.schedulers.torch import KLAdaptiveLR


class SkrlTorch(SkrlLearner):
    """skrl's PPO on torch."""

    agent: "_Agent"

    def __init__(self, env: VecEnv, config: SkrlSettings, seed: int, group: Group):
        rows = ObservationRows(env, "skrl", has_parts=bool(config.network))
        super().__init__(env, config, seed, group, rows)
        self.agent = _Agent(self._rollout_env, rows, config, seed, self.average_kl)
        broadcast_parameters(group, self.agent.networks.parameters())
        self.parts = {"networks": self.agent.networks, "optimizer": self.agent.optimizer}

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.agent.optimizer, learning_rate)


class _Agent(PPO):
    """Learns from the samples of all ranks. skrl's own distributed training, which has statistics per rank, is off."""

    policy: PolicyNetwork
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
        boxes = rows.spaces(rollout_env.actions, env.device)
        models = make_networks(boxes, rows, config, torch.Generator().manual_seed(seed))
        memory = _Memory(memory_size=config.rollouts, num_envs=env.num_envs, device=env.device)
        memory.observation_dtype = rows.dtype
        super().__init__(
            models=models,
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
        if config.mixed_precision:
            # bfloat16 has the range of float32, so gradients need no scale. With one, a rank could skip a step.
            torch.set_autocast_dtype(env.device.type, torch.bfloat16)
            self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        modules = {name: part for name, part in self.checkpoint_modules.items() if isinstance(part, nn.Module)}
        if self.policy is self.value:
            del modules["value"]
        self.networks = nn.ModuleDict(modules)
        """Networks and normalizers."""
        GradientHook(self.optimizer, rollout_env, config.grad_norm_clip or None)
        self._value_preprocessor = memory.values = UnscaledValues(self._value_preprocessor, group, correction=1)
        self.init()
        self.enable_training_mode()

    def log_std(self) -> Tensor:
        return self.policy.noise()["log_std"].detach()

    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def policy_networks(self) -> tuple[nn.Module, Encoder | None]:
        """Return a network that computes mean actions or logits from features and the normalized vector, and the
        encoder. If the network has parts, they are the encoder."""
        policy = self.policy
        return policy.network, policy.parts_encoder(self.checkpoint_modules) if policy.parts else policy.encoder


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
