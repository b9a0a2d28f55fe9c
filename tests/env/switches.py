"""Tasks with discrete actions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.env.task import EnvState
from tests.env.drift import Drift


@dataclass(frozen=True)
class Switch(Drift):
    """The right one of three choices depends on the position of the block: 0 near the start, 2 near the end."""

    action_choices = (3,)

    def control(self, state: EnvState) -> Tensor:
        return torch.zeros_like(state.action)

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {"policy": torch.cat((state.qpos, state.qvel), dim=1)}

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        return {"right": (state.action[:, 0] == 2.0 * (state.qpos[:, 0] > -0.2)).float()}


@dataclass(frozen=True)
class Switches(Switch):
    """Two choices; the second one is the opposite of the first."""

    num_actions = 2
    action_choices = (3, 2)

    def control(self, state: EnvState) -> Tensor:
        return torch.zeros_like(state.action[:, :1])

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        left = (state.qpos[:, 0] <= -0.2).float()
        return super().reward(state, terminated) | {"left": (state.action[:, 1] == left).float()}


def accuracy(actions: Tensor, position: Tensor) -> float:
    """Return the fraction of right choices, for positions that are not close to the change."""
    sure = (position + 0.2).abs() > 0.2
    return float((actions[sure, 0] == 2 * (position[sure] > -0.2)).float().mean())
