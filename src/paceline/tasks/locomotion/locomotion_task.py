"""A robot runs towards a target far ahead: what the tasks `ant` and `humanoid` have in common."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import mujoco
import torch
from torch import Tensor

from paceline.env.task import Start, Worlds
from paceline.robots.gymnasium_robots import PHYSICS_HZ, GymnasiumRobot, scene
from paceline.validation import above_zero, finite_options, not_negative, options

_TARGET_METRES = 1000.0
# Before the joints: where the torso is and how it is turned, and how fast it moves and turns.
_TORSO_QPOS, _TORSO_QVEL = 7, 6
_START_ANGLE, _START_SPEED = 0.2, 0.1


class Torso(NamedTuple):
    """How the torso stands to the world and to the target, each [world] but the first."""

    velocity: Tensor
    """In the torso's frame, m/s, [world, 3]."""
    yaw: Tensor
    roll: Tensor
    to_target: Tensor
    """Left of the torso's yaw, within +-pi, as all angles."""
    up: Tensor
    """Cosine of the tilt."""
    heading: Tensor
    """Cosine of the angle between the torso's own forward and the target."""


@dataclass(frozen=True)
class Running:
    """Rewards, limits and observations as in Isaac Lab's Isaac-Ant-Direct-v0 and Isaac-Humanoid-Direct-v0; rewards are
    for a control step."""

    fall_height: float
    """Of the torso, metres; below it the episode ends."""
    fall_reward: float
    """In place of all other rewards of that step."""
    alive_reward: float
    """For every step without a fall."""
    action_cost: float
    """Of each action's square."""
    joint_speed_scale: float
    """In observations, and in the cost of energy."""
    turn_scale: float
    """Of the torso's angular velocity in observations."""
    progress_reward: float = 2.0
    """For each m/s towards the target."""
    up_reward: float = 0.1
    """While the tilt's cosine is above 0.93."""
    heading_reward: float = 0.5
    """While the heading's cosine is above 0.8; in proportion below."""
    energy_cost: float = 0.05
    """Of action times joint speed, as it is observed."""
    limit_cost: float = 1.0
    """For each joint in the last hundredth of its range."""
    episode_seconds: float = 15.0
    decimation: int = 2

    robot: ClassVar[GymnasiumRobot]
    step_numbers = 0

    def __post_init__(self) -> None:
        options(above_zero, self, "fall_height", "joint_speed_scale", "turn_scale")
        options(not_negative, self, "action_cost", "energy_cost", "limit_cost")
        finite_options(self)

    @property
    def num_actions(self) -> int:
        return len(self.robot.joints)

    @property
    def reset_numbers(self) -> int:
        return 2 * self.num_actions

    def model(self) -> mujoco.MjModel:
        return scene(self.robot).compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        joints = self.robot.joints.values()
        low, high = zip(*(map(math.radians, joint.range) for joint in joints), strict=True)
        return {
            "middle": tuple((a + b) / 2.0 for a, b in zip(low, high, strict=True)),
            "half": tuple((b - a) / 2.0 for a, b in zip(low, high, strict=True)),
            "low": low,
            "high": high,
            "start": tuple(math.radians(joint.start) for joint in joints),
            "stand": (0.0, 0.0, self.robot.start_height, 1.0, 0.0, 0.0, 0.0),
        }

    def memory(self) -> dict[str, int]:
        # How far the target is, and how fast that has become less, m/s.
        return {"distance": 1, "speed": 1}

    def start(self, worlds: Worlds, uniform: Tensor) -> Start:
        angles, speeds = (2.0 * uniform - 1.0).chunk(2, dim=1)
        constants = worlds.constants
        angles = constants["start"] + _START_ANGLE * angles
        angles = torch.maximum(torch.minimum(angles, constants["high"]), constants["low"])
        qpos = torch.cat((constants["stand"].expand(len(angles), -1), angles), dim=1)
        qvel = torch.cat((torch.zeros_like(qpos[:, :_TORSO_QVEL]), _START_SPEED * speeds), dim=1)
        return Start(qpos, qvel, {"distance": torch.full_like(qpos[:, :1], _TARGET_METRES)})

    def advance(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        distance = _to_target(worlds).norm(dim=1, keepdim=True)
        speed = (worlds.memory["distance"] - distance) * (PHYSICS_HZ / self.decimation)
        return {"distance": distance, "speed": speed}

    def control(self, worlds: Worlds) -> Tensor:
        return worlds.action.clamp(-1.0, 1.0)

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        torso = _torso(worlds)
        seen = (
            worlds.qpos[:, 2:3],
            torso.velocity,
            self.turn_scale * worlds.qvel[:, 3:_TORSO_QVEL],
            torch.stack((torso.yaw, torso.roll, torso.to_target, torso.up, torso.heading), dim=1),
            _within_range(worlds),
            self.joint_speed_scale * worlds.qvel[:, _TORSO_QVEL:],
            worlds.action,
        )
        return {"policy": torch.cat(seen, dim=1)}

    def terminated(self, worlds: Worlds) -> Tensor:
        return worlds.qpos[:, 2] < self.fall_height

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        torso, alive = _torso(worlds), (~terminated).float()
        # Not the clamped action: to ask for more than there is should cost more.
        power = (worlds.action * worlds.qvel[:, _TORSO_QVEL:]).abs().sum(1)
        # At the upper end alone, as in the published tasks: returns are to be comparable.
        at_limit = (_within_range(worlds) > 0.98).sum(1)
        each = {
            "progress": self.progress_reward * worlds.memory["speed"][:, 0],
            "alive": self.alive_reward,
            "up": self.up_reward * (torso.up > 0.93),
            "heading": self.heading_reward * (torso.heading / 0.8).clamp(max=1.0),
            "action": -self.action_cost * worlds.action.square().sum(1),
            "energy": -self.energy_cost * self.joint_speed_scale * power,
            "limits": -self.limit_cost * at_limit,
        }
        return {name: term * alive for name, term in each.items()} | {"fall": self.fall_reward * terminated.float()}

    def measure(self, worlds: Worlds) -> dict[str, Tensor]:
        """Towards the target, m/s."""
        return {"speed": worlds.memory["speed"][:, 0]}


def _to_target(worlds: Worlds) -> Tensor:
    """Along the ground from the torso, metres, [world, 2]."""
    x, y = worlds.qpos[:, :2].unbind(1)
    return torch.stack((_TARGET_METRES - x, -y), dim=1)


def _torso(worlds: Worlds) -> Torso:
    # From the state alone: sensors would cost a pass over all worlds, and be a physics step late in rewards.
    w, x, y, z = worlds.qpos[:, 3:_TORSO_QPOS].unbind(1)
    axis, velocity = worlds.qpos[:, 4:_TORSO_QPOS], worlds.qvel[:, :3]
    across = 2.0 * torch.linalg.cross(velocity, axis)
    own_velocity = velocity + w.unsqueeze(1) * across + torch.linalg.cross(across, axis)
    forward_x, forward_y, up = 1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + y * y)
    yaw, roll = torch.atan2(forward_y, forward_x), torch.atan2(2.0 * (w * x + y * z), up)
    ahead, left = _to_target(worlds).unbind(1)
    aside = torch.atan2(left, ahead) - yaw
    heading = (forward_x * ahead + forward_y * left) * torch.rsqrt(ahead * ahead + left * left)
    return Torso(own_velocity, yaw, roll, torch.atan2(aside.sin(), aside.cos()), up, heading)


def _within_range(worlds: Worlds) -> Tensor:
    """Joint angles, from -1 to 1 over each one's range, [world, joints]."""
    return (worlds.qpos[:, _TORSO_QPOS:] - worlds.constants["middle"]) / worlds.constants["half"]
