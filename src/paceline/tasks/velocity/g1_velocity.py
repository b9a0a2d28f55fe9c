"""A humanoid follows a commanded velocity over flat ground."""

import math
from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from paceline.env.task import Start, Worlds
from paceline.env.training_settings import TrainingSettings
from paceline.robots.legged import G1
from paceline.tasks.registry import TaskEntry
from paceline.tasks.velocity.velocity_task import Velocity
from paceline.validation import above_zero, options

# How much it costs to bend a joint away from the home pose: little for those that walk, more for all others.
_STIFF = {"hip_pitch": 0.02, "knee": 0.02, "ankle_pitch": 0.02, "ankle_roll": 0.2, "wrist": 0.1, "elbow": 0.2}
_STIFF_OTHERWISE = 0.5
_LIFT = 0.08


def _stiffness(name: str) -> float:
    return next((cost for part, cost in _STIFF.items() if part in name), _STIFF_OTHERWISE)


@dataclass(frozen=True)
class G1Velocity(Velocity):
    """Commands are the pelvis's velocity forward and to the left, and its turn to the left. A clock paces the feet."""

    first_range: float = 0.5
    """The part of these that is asked for at first; a world that follows for a whole episode is asked for more."""
    stride_seconds: float = 0.8
    """Of two steps, a left and a right."""
    smallest_up: float = 0.6
    """The vertical part of the pelvis's own up; below it the episode ends."""
    smallest_height: float = 0.45
    """Of the pelvis, metres; below it the episode ends."""

    legged = G1

    def __post_init__(self) -> None:
        super().__post_init__()
        options(above_zero, self, "stride_seconds")

    def model(self) -> mujoco.MjModel:
        return G1.scene(self.robot).compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        # The compiled model's, because a robot from a file has its own; the first joint is free.
        low, high = (0.95 * self.model().jnt_range[1:]).T.tolist()
        return super().constants() | {
            "stiff": tuple(map(_stiffness, G1.joint_names)),
            "low": tuple(low),
            "high": tuple(high),
        }

    def memory(self) -> dict[str, int]:
        """`phase` is the left foot's, in strides: the foot is in the air for the first half."""
        return super().memory() | {"phase": 1}

    def start(self, worlds: Worlds, uniform: Tensor) -> Start:
        start = super().start(worlds, uniform)
        # The same number as the yaw, which has nothing to do with it.
        return start._replace(memory=start.memory | {"phase": uniform[:, :1]})

    def advance(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        phase = worlds.memory["phase"] + self.step_seconds / self.stride_seconds
        return super().advance(worlds, uniform) | {"phase": phase - phase.floor()}

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        turn = 2.0 * math.pi * worlds.memory["phase"]
        clock = self.moving(worlds).unsqueeze(1) * torch.cat((torch.sin(turn), torch.cos(turn)), dim=1)
        seen = super().observe(worlds)
        heights = [worlds.sensor(f"{foot}_position")[:, 2:] for foot in self.legged.feet]
        return {
            "policy": torch.cat((seen["policy"], clock), dim=1),
            "critic": torch.cat((seen["critic"], clock, *heights), dim=1),
        }

    def terminated(self, worlds: Worlds) -> Tensor:
        fallen = worlds.sensor("upvector")[:, 2] < self.smallest_up
        touched = worlds.sensor("torso_contact")[:, 0] + worlds.sensor("pelvis_contact")[:, 0] > 0.0
        return fallen | touched | (worlds.qpos[:, 2] < self.smallest_height)

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        velocity, gyro, up = worlds.sensor("velocity"), worlds.sensor("gyro"), worlds.sensor("upvector")
        command, moving, angles = worlds.memory["command"], self.moving(worlds), worlds.qpos[:, 7:]
        off = (velocity[:, :2] - command[:, :2]).square().sum(1)
        off_turn = (gyro[:, 2] - command[:, 2]).square()
        lifted, asked = self._feet(worlds)
        bent = (angles - worlds.constants["home"]).square()
        beyond = (angles - worlds.constants["high"]).relu() + (worlds.constants["low"] - angles).relu()
        each = {
            "velocity": 2.0 * torch.exp(-4.0 * off),
            "turn": 1.0 * torch.exp(-4.0 * off_turn),
            "stride": 1.0 * torch.exp(-100.0 * (lifted - asked).square().sum(1)),
            "step": 0.25 * (self.touching(worlds) == (asked <= 0.0)).float().sum(1),
            "alive": torch.ones_like(off),
            "bounce": -1.0 * velocity[:, 2].square(),
            "roll": -0.05 * gyro[:, :2].square().sum(1),
            "tilt": -2.0 * up[:, :2].square().sum(1),
            "height": -10.0 * (worlds.qpos[:, 2] - worlds.constants["height"][:, 0]).square(),
            "posture": -1.0 * (worlds.constants["stiff"] * bent).sum(1),
            "still": -0.5 * (1.0 - moving) * bent.sum(1),
            "limits": -2.0 * beyond.sum(1),
            "torque": -1e-5 * self.torque(worlds).square().sum(1),
            "joint_speed": -5e-4 * worlds.qvel[:, 6:].square().sum(1),
            "action_rate": -0.01 * (worlds.action - worlds.last_action).square().sum(1),
            "slip": -0.25 * self.slipping(worlds),
        }
        return {name: term * self.step_seconds for name, term in each.items()} | {"fall": -2.0 * terminated.float()}

    def _feet(self, worlds: Worlds) -> tuple[Tensor, Tensor]:
        """How high the feet are, and how high the clock wants them, metres, [world, 2] each."""
        lifted = torch.cat([worlds.sensor(f"{foot}_position")[:, 2:] for foot in self.legged.feet], dim=1)
        turn = 2.0 * math.pi * worlds.memory["phase"]
        wave = torch.cat((torch.sin(turn), -torch.sin(turn)), dim=1)
        return lifted, _LIFT * wave.relu() * self.moving(worlds).unsqueeze(1)

    def measure(self, worlds: Worlds) -> dict[str, Tensor]:
        return super().measure(worlds) | {"command_range": worlds.memory["range"][:, 0]}


ENTRY = TaskEntry(
    G1Velocity,
    summary="a humanoid of the G1's class follows a commanded velocity over flat ground",
    training=TrainingSettings(
        hidden_layers=(512, 256, 128),
        overrides={
            "rl_games": {"entropy_coef": 0.0},
            "skrl": {"entropy_loss_scale": 0.0},
        },
    ),
    max_iterations=1500,
    cpu_envs=512,
)
