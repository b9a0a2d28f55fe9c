"""A point on a rail that is pushed to its center."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

STEP_SECONDS = 0.1


@dataclass
class SceneCfg:
    num_envs: int = 1


@dataclass
class RewardTermCfg:
    weight: float = 1.0


@dataclass
class ManagerBasedRlEnvCfg:
    scene: SceneCfg = field(default_factory=SceneCfg)
    rewards: dict[str, RewardTermCfg] = field(default_factory=lambda: {"center": RewardTermCfg()})
    start: tuple[float, float] = (-0.5, 0.5)
    seed: int | None = None
    episode_length_s: float = 1.0
    is_finite_horizon: bool = False


class ManagerBasedRlEnv:
    """All observations are views of buffers that the next step overwrites."""

    num_actions = 1
    step_dt = STEP_SECONDS

    def __init__(self, cfg: ManagerBasedRlEnvCfg, device: str, render_mode: str | None = None):
        self.cfg, self.device, self.num_envs = cfg, device, cfg.scene.num_envs
        if cfg.seed is not None:
            torch.manual_seed(cfg.seed)
        self.max_episode_length = round(cfg.episode_length_s / STEP_SECONDS)
        self.common_step_counter = 0
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.extras: dict[str, Any] = {}
        self._buffer = torch.zeros(self.num_envs, 3)

    @property
    def unwrapped(self) -> "ManagerBasedRlEnv":
        return self

    @property
    def obs(self) -> dict[str, Tensor]:
        return {"actor": self._buffer[:, :2], "critic": self._buffer}

    def reset(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self._reset(torch.ones(self.num_envs, dtype=torch.bool))
        return self.obs, self.extras

    def _reset(self, done: Tensor) -> None:
        low, high = self.cfg.start
        mean_length = self.episode_length_buf[done].float().mean()
        self.extras["log"] = {"Episode_Reward/center": mean_length, "Curriculum/step": self.common_step_counter}
        self._buffer[done] = 0.0
        self._buffer[done, 0] = low + (high - low) * torch.rand(int(done.sum()))
        self.episode_length_buf[done] = 0

    def step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        self.extras["log"] = {}
        self._buffer[:, 1] += 5.0 * STEP_SECONDS * action[:, 0]
        self._buffer[:, 0] += STEP_SECONDS * self._buffer[:, 1]
        self.episode_length_buf += 1
        self.common_step_counter += 1
        self._buffer[:, 2] = self.episode_length_buf
        reward = self.cfg.rewards["center"].weight * (1.0 - self._buffer[:, 0].abs())
        terminated = self._buffer[:, 0].abs() > 1.0
        time_outs = self.episode_length_buf >= self.max_episode_length
        if (done := terminated | time_outs).any():
            self._reset(done)
        return self.obs, reward, terminated, time_outs, self.extras

    def close(self) -> None:
        pass
