"""Robots on legs follow a commanded velocity: what their tasks have in common."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import mujoco
import torch
from torch import Tensor

from paceline.env.randomization import Randomization
from paceline.env.task import MOST_REMEMBERED_STEPS, Command, Senses, Start, Worlds
from paceline.errors import UserError
from paceline.robots.legged import LeggedRobot
from paceline.validation import above_zero, at_least_one, finite_options, not_negative, options, within_unit

_TIMESTEP = 0.005
_FASTEST = 100.0
"""Of commands, m/s and rad/s."""
# Numbers drawn: whether to command anew, the command, and whether to stand; whether to push, and the push.
_COMMAND_NUMBERS, _PUSH_NUMBERS = 5, 7
# Half-widths of what is added to what the policy senses: velocity, gyro and up, then each joint's angle and speed.
_TRUNK_NOISE, _ANGLE_NOISE, _SPEED_NOISE = (*[0.1] * 3, *[0.2] * 3, *[0.05] * 3), 0.01, 1.5


@dataclass(frozen=True)
class Velocity(ABC):
    """Commands are the trunk's velocity forward and to the left, and its turn to the left.

    The model has the sensors `velocity`, `gyro` and `upvector`, in the trunk's own frame.
    """

    legged: ClassVar[LeggedRobot]

    episode_seconds: float = 20.0
    decimation: int = 4
    forward_speed: float = 1.0
    """Largest that is asked for, in either direction, m/s."""
    sideways_speed: float = 0.5
    """m/s."""
    turn_speed: float = 1.0
    """rad/s."""
    first_range: float = 1.0
    """The part of these that is asked for at first; a world that follows for a whole episode is asked for more."""
    standing: float = 0.1
    """How many of the commands are to stand still."""
    command_seconds: float = 5.0
    """A command holds for so long on average."""
    push_seconds: float = 8.0
    """From one push to the next, on average; 0 for none."""
    push_speed: float = 0.5
    """Largest change of the trunk's velocity by a push, m/s."""
    action_scale: float = 0.25
    """An action of 1 asks for this part of the joint's largest torque, if it does not move."""
    noise: float = 1.0
    """Of observations; 0 for none."""
    history: int = 1
    """How many observations the policy sees at once."""
    delay: tuple[int, int] = (0, 0)
    """By how many control steps it sees them late: the fewest and the most."""
    randomize: bool = True
    """Whether friction, masses and motors differ from world to world."""
    robot: str = ""
    """Path of an MJCF model of the same family, in place of ours."""

    def __post_init__(self) -> None:
        speeds = "forward_speed", "sideways_speed", "turn_speed"
        options(partial(above_zero, most=_FASTEST), self, *speeds)
        options(above_zero, self, "command_seconds", "action_scale", "first_range")
        options(within_unit, self, "first_range", "standing")
        options(not_negative, self, "noise", "push_seconds", "push_speed")
        options(partial(at_least_one, most=MOST_REMEMBERED_STEPS), self, "history")
        finite_options(self)
        if not 0 <= self.delay[0] <= self.delay[1] <= MOST_REMEMBERED_STEPS:
            fewest, most = self.delay
            raise UserError(
                f"--env.delay {fewest} {most} must be the fewest and the most control steps, at most "
                f"{MOST_REMEMBERED_STEPS}: try --env.delay 0 2"
            )

    @property
    def senses(self) -> Senses:
        return Senses(self.history, self.delay)

    @property
    def randomization(self) -> tuple[Randomization, ...]:
        if not self.randomize:
            return ()
        legged = self.legged
        return (
            Randomization("geom_friction", 0.4, 1.2, names=legged.foot_geoms, how="set", column=0, together=True),
            Randomization("body_mass", -1.0, 2.0, names=legged.torso, how="add", when="once"),
            Randomization("body_ipos", -0.03, 0.03, names=legged.torso, how="add", column=0, when="once"),
            # Stronger and weaker motors: stiffness and damping alike.
            Randomization("actuator_gainprm", 0.9, 1.1, also="actuator_biasprm", when="once"),
        )

    @property
    def num_actions(self) -> int:
        return len(self.legged.joint_names)

    @property
    def reset_numbers(self) -> int:
        return 1 + 2 + 6 + 2 * self.num_actions + _COMMAND_NUMBERS

    @property
    def step_numbers(self) -> int:
        return _COMMAND_NUMBERS + _PUSH_NUMBERS + self._sensed

    @property
    def _sensed(self) -> int:
        """How many of the policy's observations are sensed, and so noisy."""
        return len(_TRUNK_NOISE) + 2 * self.num_actions

    @property
    def step_seconds(self) -> float:
        return _TIMESTEP * self.decimation

    def constants(self) -> dict[str, tuple[float, ...]]:
        robot = self.legged
        return {
            "home": robot.default_joint_pos,
            "height": (self._height(),),
            "noise": (*_TRUNK_NOISE, *[_ANGLE_NOISE] * self.num_actions, *[_SPEED_NOISE] * self.num_actions),
            # Radians of an action of 1.
            "scale": robot.action_scale(self.action_scale),
            "kp": robot.kp,
            "kd": robot.kd,
            "torque": robot.effort_limit,
            "fastest": (self.forward_speed, self.sideways_speed, self.turn_speed),
        }

    @abstractmethod
    def model(self) -> mujoco.MjModel: ...

    @abstractmethod
    def terminated(self, worlds: Worlds) -> Tensor: ...

    @abstractmethod
    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]: ...

    def _height(self) -> float:
        """Of the trunk, standing; another robot's legs may be longer."""
        return float(self.model().key("home").qpos[2]) if self.robot else self.legged.default_height

    def memory(self) -> dict[str, int]:
        feet = len(self.legged.feet)
        return {
            "command": 3,
            # The part of the fastest commands that is asked for, and by how much they were missed, m/s times steps.
            "range": 1,
            "missed": 1,
            # Seconds that each foot is in the air, and those of the swing that this step ended.
            "air": feet,
            "landed": feet,
            "push": 6,
            "noise": self._sensed,
        }

    def start(self, worlds: Worlds, uniform: Tensor) -> Start:
        joints, home = self.num_actions, worlds.constants["home"]
        yaw, place, speed, angles, speeds, command = uniform.split((1, 2, 6, joints, joints, _COMMAND_NUMBERS), dim=1)
        half = math.pi * (yaw - 0.5)
        nothing = torch.zeros_like(half)
        height = (worlds.constants["height"] + 0.02).expand_as(half)
        pose = (place - 0.5, height, torch.cos(half), nothing, nothing, torch.sin(half), home + 0.4 * (angles - 0.5))
        asked = self._range(worlds)
        feet = nothing.expand(-1, len(self.legged.feet))
        memory = {"command": self._command(worlds, asked, command[:, 1:]), "range": asked, "missed": nothing}
        memory |= {"air": feet, "landed": feet, "push": nothing.expand(-1, 6)}
        return Start(torch.cat(pose, dim=1), torch.cat((speed - 0.5, speeds - 0.5), dim=1), memory)

    def advance(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        _, push, noise = uniform.split((_COMMAND_NUMBERS, _PUSH_NUMBERS, self._sensed), dim=1)
        memory, touching = worlds.memory, self.touching(worlds)
        air, nothing = memory["air"], torch.zeros_like(memory["air"])
        pushed = push[:, :1] * self.push_seconds < self.step_seconds
        strength = self.push_speed * (2.0 * push[:, 1:] - 1.0)
        return {
            "missed": memory["missed"] + self._miss(worlds).unsqueeze(1),
            "landed": torch.where(touching, air, nothing),
            "air": torch.where(touching, nothing, air + self.step_seconds),
            "push": torch.where(pushed & (self.push_seconds > 0.0), strength, torch.zeros_like(strength)),
            "noise": 2.0 * noise - 1.0,
        }

    def resample(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        numbers, command = uniform[:, :_COMMAND_NUMBERS], worlds.memory["command"]
        due = numbers[:, :1] < self.step_seconds / self.command_seconds
        sampled = self._command(worlds, worlds.memory["range"], numbers[:, 1:])
        return {"command": torch.where(due, sampled, command)}

    def _range(self, worlds: Worlds) -> Tensor:
        """Wider for worlds that followed to the end of their episode, narrower for those that fell; [world, 1]."""
        before, steps = worlds.memory["range"], worlds.episode_step.unsqueeze(1)
        if self.first_range == 1.0:
            return torch.ones_like(before)
        fell = self.terminated(worlds).unsqueeze(1)
        to_the_end = ((steps + 0.5) * self.step_seconds > self.episode_seconds) & ~fell
        followed = worlds.memory["missed"] < 0.25 * steps
        change = 0.1 * (to_the_end & followed) - 0.05 * ~to_the_end
        return torch.where(before > 0.0, (before + change).clamp(self.first_range, 1.0), self.first_range)

    def _command(self, worlds: Worlds, asked: Tensor, uniform: Tensor) -> Tensor:
        sides = 2.0 * uniform[:, :3] - 1.0
        return sides * worlds.constants["fastest"] * asked * (uniform[:, 3:4] >= self.standing)

    def at_its_end(self) -> Self:
        return replace(self, first_range=1.0)

    def control(self, worlds: Worlds) -> Tensor:
        return worlds.constants["home"] + worlds.action * worlds.constants["scale"]

    def push(self, worlds: Worlds) -> Tensor:
        knock = worlds.memory["push"]
        return torch.cat((knock, torch.zeros_like(worlds.qvel[:, 6:])), dim=1)

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        trunk = worlds.sensor("velocity"), worlds.sensor("gyro"), worlds.sensor("upvector")
        sensed = torch.cat((*trunk, worlds.qpos[:, 7:] - worlds.constants["home"], worlds.qvel[:, 6:]), dim=1)
        rest = torch.cat((worlds.memory["command"], worlds.action), dim=1)
        noisy = sensed + self.noise * worlds.constants["noise"] * worlds.memory["noise"]
        feet = torch.cat((self.touching(worlds).float(), worlds.memory["air"]), dim=1)
        return {
            "policy": torch.cat((noisy, rest), dim=1),
            "critic": torch.cat((sensed, rest, feet, worlds.qpos[:, 2:3]), dim=1),
        }

    def measure(self, worlds: Worlds) -> dict[str, Tensor]:
        turn = worlds.sensor("gyro")[:, 2] - worlds.memory["command"][:, 2]
        return {"velocity_error": self._miss(worlds), "turn_error": turn.abs()}

    def shown(self, worlds: Worlds) -> Command:
        command, velocity, gyro = worlds.memory["command"], worlds.sensor("velocity"), worlds.sensor("gyro")
        numbers = {
            "forward m/s": (command[:, 0], velocity[:, 0]),
            "left m/s": (command[:, 1], velocity[:, 1]),
            "turn rad/s": (command[:, 2], gyro[:, 2]),
        }
        return Command(numbers, velocity=(command[:, :2], velocity[:, :2]))

    def _miss(self, worlds: Worlds) -> Tensor:
        """How far the velocity over ground is from the commanded one, m/s, [world]."""
        return (worlds.sensor("velocity")[:, :2] - worlds.memory["command"][:, :2]).norm(dim=1)

    def moving(self, worlds: Worlds) -> Tensor:
        """1 where it is told to go somewhere, 0 where it is told to stand, [world]."""
        return (worlds.memory["command"].norm(dim=1) > 0.1).float()

    def torque(self, worlds: Worlds) -> Tensor:
        """What motors of nominal strength would give; N m, [world, joint]."""
        kp, kd, most = (worlds.constants[name] for name in ("kp", "kd", "torque"))
        asked = kp * (worlds.sim.ctrl - worlds.qpos[:, 7:]) - kd * worlds.qvel[:, 6:]
        return torch.maximum(torch.minimum(asked, most), -most)

    def touching(self, worlds: Worlds) -> Tensor:
        """Whether each foot is on the ground, bool [world, foot]."""
        return torch.cat([worlds.sensor(f"{foot}_contact") for foot in self.legged.feet], dim=1) > 0.0

    def slipping(self, worlds: Worlds) -> Tensor:
        """The squared speed over ground of the feet that stand on it, (m/s)^2, [world]."""
        speeds = [worlds.sensor(f"{foot}_velocity")[:, :2].square().sum(1) for foot in self.legged.feet]
        return (self.touching(worlds) * torch.stack(speeds, dim=1)).sum(1)
