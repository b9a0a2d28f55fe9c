"""skrl's PPO on torch, on Paceline's envs and ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.distributed.launcher import without_launcher
from paceline.env.vec_env import VecEnv
from paceline.learners.networks import Encoder, reset_state_
from paceline.learners.optimizers import GradientHook, broadcast_parameters, set_learning_rate
from paceline.learners.recurrent import RecurrentNetwork
from paceline.learners.rollout import RolloutEnv
from paceline.learners.skrl.learner import (
    ObservationRows,
    SharedMemory,
    SkrlLearner,
    UnscaledValues,
    agent_config,
)
from paceline.learners.skrl.recurrent import RecurrentLayer, Sequences
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
        self.env_parts = {f"{name}_state": layer.state for name, layer in self.agent.recurrent.items()}

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
        layers = {name: getattr(network, "recurrent", None) for name, network in modules.items()}
        self.recurrent = {name: layer for name, layer in layers.items() if isinstance(layer, RecurrentLayer)}
        """Recurrent layers of policy and value."""
        memory.sequences = Sequences([*self.recurrent.values()], config) if self.recurrent else None
        GradientHook(self.optimizer, rollout_env, config.grad_norm_clip or None)
        self._value_preprocessor = memory.values = UnscaledValues(self._value_preprocessor, group, correction=1)
        self.init()
        self.enable_training_mode()

    def act(self, *inputs: Any, **options: Any) -> tuple[Tensor, dict[str, Any]]:
        if self.memory.sequences:
            self.memory.sequences.begin_step(self.memory.memory_index)
        return super().act(*inputs, **options)

    def record_transition(self, *, terminated: Tensor, truncated: Tensor, **transition: Any) -> None:
        # The value of the last observation of an episode uses the state after the step.
        for layer in self.recurrent.values():
            layer.advance()
        super().record_transition(terminated=terminated, truncated=truncated, **transition)
        for layer in self.recurrent.values():
            reset_state_(layer.state, (terminated | truncated).squeeze(1))

    def log_std(self) -> Tensor:
        return self.policy.noise()["log_std"].detach()

    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def policy_networks(self) -> tuple[nn.Module, Encoder | None]:
        """Return a network that computes mean actions or logits from features and the normalized vector, and the
        encoder. If the network has parts, they are the encoder."""
        policy = self.policy
        network = RecurrentNetwork(policy.recurrent.rnn, policy.network) if policy.recurrent else policy.network
        return network, policy.parts_encoder(self.checkpoint_modules) if policy.parts else policy.encoder


class _Memory(SharedMemory, RandomMemory):
    sequences: Sequences | None = None
    """Sequences of a rollout, if a network is recurrent."""

    def sample(self, names: list[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1) -> Any:
        if self.sequences:
            done = (self.tensors["terminated"] | self.tensors["truncated"]).squeeze(2)
            return self.sequences.minibatches(done, [self.tensors.get(name) for name in names], mini_batches)
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
