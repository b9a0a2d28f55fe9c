"""A quadruped follows a commanded velocity over flat ground."""

from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from paceline.env.task import Worlds
from paceline.env.training_settings import TrainingSettings
from paceline.robots.legged import GO1, GO1_LEGS
from paceline.tasks.registry import TaskEntry
from paceline.tasks.velocity.velocity_task import Velocity


@dataclass(frozen=True)
class Go1Velocity(Velocity):
    """Commands are the trunk's velocity forward and to the left, and its turn to the left."""

    smallest_up: float = 0.35
    """The vertical part of the trunk's own up; below it the episode ends."""

    legged = GO1

    def model(self) -> mujoco.MjModel:
        return GO1.scene(self.robot).compile()

    def terminated(self, worlds: Worlds) -> Tensor:
        fallen = worlds.sensor("upvector")[:, 2] < self.smallest_up
        return fallen | (worlds.sensor("trunk_contact")[:, 0] > 0.0)

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        velocity, gyro, up = worlds.sensor("velocity"), worlds.sensor("gyro"), worlds.sensor("upvector")
        command, landed, moving = worlds.memory["command"], worlds.memory["landed"], self.moving(worlds)
        off = (velocity[:, :2] - command[:, :2]).square().sum(1)
        off_turn = (gyro[:, 2] - command[:, 2]).square()
        thighs = sum((worlds.sensor(f"{leg}_thigh_contact")[:, 0] > 0.0).float() for leg in GO1_LEGS)
        bent = (worlds.qpos[:, 7:] - worlds.constants["home"]).abs().sum(1)
        each = {
            "velocity": 1.5 * torch.exp(-4.0 * off),
            "turn": 0.75 * torch.exp(-4.0 * off_turn),
            "bounce": -2.0 * velocity[:, 2].square(),
            "roll": -0.05 * gyro[:, :2].square().sum(1),
            "tilt": -2.5 * up[:, :2].square().sum(1),
            "torque": -2e-4 * self.torque(worlds).square().sum(1),
            "joint_speed": -1e-3 * worlds.qvel[:, 6:].square().sum(1),
            "action_rate": -0.01 * (worlds.action - worlds.last_action).square().sum(1),
            # For swings of a quarter of a second and more, less for shorter ones.
            "swing": 0.5 * moving * ((landed - 0.25) * (landed > 0.0)).sum(1),
            "slip": -0.1 * self.slipping(worlds),
            "thigh_contact": -1.0 * thighs,
            "still": -0.1 * (1.0 - moving) * bent,
        }
        return {name: term * self.step_seconds for name, term in each.items()} | {"fall": -1.0 * terminated.float()}


ENTRY = TaskEntry(
    Go1Velocity,
    summary="a quadruped of the Go1's class follows a commanded velocity over flat ground",
    training=TrainingSettings(
        entropy_weight=0.01,
        overrides={
            "rl_games": {"entropy_coef": 0.0},
        },
    ),
    max_iterations=500,
    cpu_envs=512,
)
