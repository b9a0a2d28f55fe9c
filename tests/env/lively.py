"""A task with all optional hooks, all of whose numbers can be computed by hand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.env.randomization import Randomization
from paceline.env.task import EnvState, ResetState
from tests.env.drift import Drift


@dataclass(frozen=True)
class Lively(Drift):
    """The block has a command, which is sampled every third step, and a level, which rises with every episode. It is
    pushed back by 1 m/s in its fifth step. Its mass and the armature of its rail are randomized."""

    fields: tuple[Randomization, ...] = (
        Randomization("body_mass", 1.0, 2.0, names="block", when="once"),
        Randomization("dof_armature", 0.5, 1.0, names="rail", how="set"),
        Randomization("dof_damping", 0.0, 0.1, names="rail", how="add", when="once", every_seconds=0.12),
    )
    num_step_samples: int = 1

    def randomized_fields(self) -> tuple[Randomization, ...]:
        return self.fields

    def state_spec(self) -> dict[str, int]:
        return {"command": 1, "level": 2, "steps": 1}

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        due = (state.episode_step % 3 == 0).unsqueeze(1)
        return {
            "command": torch.where(due, uniform, state.task_state["command"]),
            "steps": state.task_state["steps"] + 1.0,
        }

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        reset = super().reset(state, uniform)
        task_state = {"level": state.task_state["level"] + 1.0, "steps": torch.zeros_like(reset.qpos)}
        return reset._replace(task_state=task_state)

    def push_velocity(self, state: EnvState) -> Tensor:
        return -(state.episode_step == 5).float().unsqueeze(1)

    def metrics(self, state: EnvState) -> dict[str, Tensor]:
        return {"speed": state.qvel[:, 0], "age": state.episode_step.float()}

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {"policy": torch.cat((state.qpos, state.qvel, *state.task_state.values()), dim=1)}
