"""The env as RSL-RL uses it, and the settings of RSL-RL."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from rsl_rl.env import VecEnv
from tensordict import TensorDict
from torch import Tensor

from mjlab.envs import ManagerBasedRlEnv  # pyright: ignore[reportMissingImports]


class RslRlVecEnvWrapper(VecEnv):
    def __init__(self, env: ManagerBasedRlEnv, clip_actions: float | None = None):
        self.env, self.cfg = env, env.cfg
        self.num_envs, self.num_actions, self.device = env.num_envs, env.num_actions, env.device
        self.max_episode_length = env.max_episode_length
        self.clip_actions = clip_actions
        self.env.reset()

    @property
    def unwrapped(self) -> ManagerBasedRlEnv:
        return self.env

    def get_observations(self) -> TensorDict:
        return TensorDict(cast("Any", self.env.obs), [self.num_envs])

    def reset(self) -> tuple[TensorDict, dict[str, Any]]:
        _, extras = self.env.reset()
        return self.get_observations(), extras

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        if self.clip_actions is not None:
            actions = actions.clamp(-self.clip_actions, self.clip_actions)
        _, reward, terminated, time_outs, extras = self.env.step(actions)
        if not self.env.cfg.is_finite_horizon:
            extras["time_outs"] = time_outs
        return self.get_observations(), reward, (terminated | time_outs).to(torch.long), extras

    def close(self) -> None:
        self.env.close()


@dataclass
class RslRlModelCfg:
    hidden_dims: tuple[int, ...] = (16, 16)
    activation: str = "elu"
    obs_normalization: bool = True
    distribution_cfg: dict[str, Any] | None = None


@dataclass
class RslRlPpoAlgorithmCfg:
    num_learning_epochs: int = 5
    num_mini_batches: int = 4
    learning_rate: float = 1e-3
    schedule: str = "fixed"
    gamma: float = 0.9
    lam: float = 0.95
    entropy_coef: float = 0.005
    desired_kl: float = 0.01
    max_grad_norm: float = 1.0
    value_loss_coef: float = 1.0
    use_clipped_value_loss: bool = True
    clip_param: float = 0.2


@dataclass
class RslRlOnPolicyRunnerCfg:
    num_steps_per_env: int = 6
    max_iterations: int = 7
    clip_actions: float | None = None
    obs_groups: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {"actor": ("actor",), "critic": ("critic", "actor")}
    )
    actor: RslRlModelCfg = field(default_factory=lambda: RslRlModelCfg(distribution_cfg={"init_std": 0.5}))
    critic: RslRlModelCfg = field(default_factory=lambda: RslRlModelCfg(hidden_dims=(32, 16)))
    algorithm: RslRlPpoAlgorithmCfg = field(default_factory=RslRlPpoAlgorithmCfg)
