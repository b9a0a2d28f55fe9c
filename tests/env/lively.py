"""A task with everything that a task may have, whose every number can be worked out by hand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.env.randomization import Randomization
from paceline.env.task import Start, Worlds
from tests.env.drift import Drift


@dataclass(frozen=True)
class Lively(Drift):
    """The block has a command, drawn anew every third step; a level, which rises with every episode; and is knocked
    back by 1 m/s in its fifth step. Its mass and its rail's armature differ from world to world."""

    randomization: tuple[Randomization, ...] = (
        Randomization("body_mass", 1.0, 2.0, names="block", when="once"),
        Randomization("dof_armature", 0.5, 1.0, names="rail", how="set"),
        Randomization("dof_damping", 0.0, 0.1, names="rail", how="add", when="once", every_seconds=0.12),
    )
    step_numbers: int = 1

    def memory(self) -> dict[str, int]:
        return {"command": 1, "level": 2, "steps": 1}

    def advance(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        due = (worlds.episode_step % 3 == 0).unsqueeze(1)
        return {
            "command": torch.where(due, uniform, worlds.memory["command"]),
            "steps": worlds.memory["steps"] + 1.0,
        }

    def start(self, worlds: Worlds, uniform: Tensor) -> Start:
        qpos, qvel = self.reset(uniform)
        return Start(qpos, qvel, {"level": worlds.memory["level"] + 1.0, "steps": torch.zeros_like(qpos)})

    def push(self, worlds: Worlds) -> Tensor:
        return -(worlds.episode_step == 5).float().unsqueeze(1)

    def measure(self, worlds: Worlds) -> dict[str, Tensor]:
        return {"speed": worlds.qvel[:, 0], "age": worlds.episode_step.float()}

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        return {"policy": torch.cat((worlds.qpos, worlds.qvel, *worlds.memory.values()), dim=1)}
