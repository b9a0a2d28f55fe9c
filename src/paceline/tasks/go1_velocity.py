"""A quadruped follows a commanded velocity over flat ground."""

import math
from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from paceline.checks import above_zero
from paceline.env.randomization import Randomization
from paceline.env.task import Start, Worlds
from paceline.robots import go1
from paceline.settings.ppo import PpoConfig
from paceline.settings.rl_games import RlGamesConfig
from paceline.settings.rsl_rl import RslRlConfig
from paceline.settings.skrl import SkrlConfig
from paceline.tasks.registry import TaskEntry

# Half-widths of what is added to each of the policy's observations: velocity, gyro, up, joint angles, joint speeds.
_NOISE = (*[0.1] * 3, *[0.2] * 3, *[0.05] * 3, *[0.01] * 12, *[1.5] * 12)
_JOINTS = len(go1.JOINTS)
# Numbers drawn: whether to command anew, the command, and whether to stand; whether to push, and the push.
_COMMAND_NUMBERS, _PUSH_NUMBERS = 5, 7


@dataclass(frozen=True)
class Go1Velocity:
    """Commands are the trunk's velocity forward and to the left, and its turn to the left."""

    episode_seconds: float = 20.0
    decimation: int = 4
    forward_speed: float = 1.0
    """Largest that is asked for, in either direction, m/s."""
    sideways_speed: float = 0.5
    turn_speed: float = 1.0
    """rad/s."""
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
    smallest_up: float = 0.35
    """The vertical part of the trunk's own up; below it the episode ends."""
    randomize: bool = True
    """Whether friction, masses and gains differ from world to world."""

    actions = _JOINTS
    reset_numbers = 1 + 2 + 6 + 2 * _JOINTS + _COMMAND_NUMBERS
    step_numbers = _COMMAND_NUMBERS + _PUSH_NUMBERS + len(_NOISE)

    def __post_init__(self) -> None:
        for name in ("forward_speed", "sideways_speed", "turn_speed", "command_seconds", "action_scale"):
            above_zero(f"--env.{name.replace('_', '-')}", getattr(self, name))

    @property
    def randomization(self) -> tuple[Randomization, ...]:
        if not self.randomize:
            return ()
        return (
            Randomization("geom_friction", 0.4, 1.2, names=".*_foot", how="set", column=0, together=True),
            Randomization("body_mass", -1.0, 2.0, names="trunk", how="add", when="once"),
            Randomization("body_ipos", -0.03, 0.03, names="trunk", how="add", column=0, when="once"),
        )

    def model(self) -> mujoco.MjModel:
        return go1.scene().compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        joints = (go1.GO1.hip_joint, go1.GO1.thigh_joint, go1.GO1.calf_joint) * len(go1.LEGS)
        return {
            "home": go1.GO1.home_angles,
            "noise": _NOISE,
            # Radians of an action of 1.
            "scale": tuple(self.action_scale * joint.torque / joint.kp for joint in joints),
            "kp": tuple(joint.kp for joint in joints),
            "kd": tuple(joint.kd for joint in joints),
            "torque": tuple(joint.torque for joint in joints),
        }

    def memory(self) -> dict[str, int]:
        return {"command": 3, "air": 4, "landed": 4, "push": 6, "noise": len(_NOISE)}

    def start(self, worlds: Worlds, uniform: Tensor) -> Start:
        yaw, place, speed, angles, speeds, command = uniform.split((1, 2, 6, _JOINTS, _JOINTS, _COMMAND_NUMBERS), dim=1)
        half = math.pi * (yaw - 0.5)
        home = worlds.constants["home"]
        nothing = torch.zeros_like(half)
        qpos = torch.cat(
            (
                place - 0.5,
                torch.full_like(half, go1.GO1.home_height + 0.02),
                torch.cos(half),
                nothing,
                nothing,
                torch.sin(half),
                home + 0.4 * (angles - 0.5),
            ),
            dim=1,
        )
        qvel = torch.cat((speed - 0.5, speeds - 0.5), dim=1)
        memory = {"command": self._command(command[:, 1:]), "air": nothing.expand(-1, 4)}
        memory |= {"landed": nothing.expand(-1, 4), "push": nothing.expand(-1, 6)}
        return Start(qpos, qvel, memory)

    def advance(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        command, push, noise = uniform.split((_COMMAND_NUMBERS, _PUSH_NUMBERS, len(_NOISE)), dim=1)
        memory, touching = worlds.memory, self._touching(worlds)
        anew = command[:, :1] < self._control_seconds / self.command_seconds
        pushed = push[:, :1] * self.push_seconds < self._control_seconds
        # Sideways and turning as well, less than forward.
        strength = self.push_speed * (2.0 * push[:, 1:] - 1.0)
        return {
            "command": torch.where(anew, self._command(command[:, 1:]), memory["command"]),
            "landed": torch.where(touching, memory["air"], torch.zeros_like(memory["air"])),
            "air": torch.where(touching, torch.zeros_like(memory["air"]), memory["air"] + self._control_seconds),
            "push": torch.where(pushed & (self.push_seconds > 0.0), strength, torch.zeros_like(strength)),
            "noise": 2.0 * noise - 1.0,
        }

    def _command(self, uniform: Tensor) -> Tensor:
        sides = 2.0 * uniform[:, :3] - 1.0
        forward, sideways, turn = sides.unbind(1)
        asked = torch.stack(
            (self.forward_speed * forward, self.sideways_speed * sideways, self.turn_speed * turn), dim=1
        )
        return asked * (uniform[:, 3:4] >= self.standing)

    @property
    def _control_seconds(self) -> float:
        return 0.005 * self.decimation

    def control(self, worlds: Worlds) -> Tensor:
        return worlds.constants["home"] + worlds.action * worlds.constants["scale"]

    def push(self, worlds: Worlds) -> Tensor:
        knock = worlds.memory["push"]
        return torch.cat((knock, torch.zeros_like(worlds.qvel[:, 6:])), dim=1)

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        angles = worlds.qpos[:, 7:] - worlds.constants["home"]
        sensed = torch.cat(
            (
                worlds.sensor("velocity"),
                worlds.sensor("gyro"),
                worlds.sensor("upvector"),
                angles,
                worlds.qvel[:, 6:],
            ),
            dim=1,
        )
        rest = torch.cat((worlds.memory["command"], worlds.action), dim=1)
        noisy = sensed + self.noise * worlds.constants["noise"] * worlds.memory["noise"]
        feet = torch.cat((self._touching(worlds).float(), worlds.memory["air"]), dim=1)
        return {
            "policy": torch.cat((noisy, rest), dim=1),
            "critic": torch.cat((sensed, rest, feet, worlds.qpos[:, 2:3]), dim=1),
        }

    def terminated(self, worlds: Worlds) -> Tensor:
        fallen = worlds.sensor("upvector")[:, 2] < self.smallest_up
        return fallen | (worlds.sensor("trunk_contact")[:, 0] > 0.0)

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        velocity, gyro, up = worlds.sensor("velocity"), worlds.sensor("gyro"), worlds.sensor("upvector")
        command, memory = worlds.memory["command"], worlds.memory
        moving = (command.norm(dim=1) > 0.1).float()
        off = (velocity[:, :2] - command[:, :2]).square().sum(1)
        off_turn = (gyro[:, 2] - command[:, 2]).square()
        feet = torch.stack([worlds.sensor(f"{leg}_foot_velocity")[:, :2].square().sum(1) for leg in go1.LEGS], dim=1)
        thighs = sum((worlds.sensor(f"{leg}_thigh_contact")[:, 0] > 0.0).float() for leg in go1.LEGS)
        touching = self._touching(worlds).float()
        landed = memory["landed"]
        bent = (worlds.qpos[:, 7:] - worlds.constants["home"]).abs().sum(1)
        each = {
            "velocity": 1.5 * torch.exp(-4.0 * off),
            "turn": 0.75 * torch.exp(-4.0 * off_turn),
            "bounce": -2.0 * velocity[:, 2].square(),
            "roll": -0.05 * gyro[:, :2].square().sum(1),
            "tilt": -2.5 * up[:, :2].square().sum(1),
            "torque": -2e-4 * self._torque(worlds).square().sum(1),
            "joint_speed": -1e-3 * worlds.qvel[:, 6:].square().sum(1),
            "action_rate": -0.01 * (worlds.action - worlds.last_action).square().sum(1),
            # For swings of a quarter of a second and more, less for shorter ones.
            "swing": 0.5 * moving * ((landed - 0.25) * (landed > 0.0)).sum(1),
            "slip": -0.1 * (touching * feet).sum(1),
            "thigh_contact": -1.0 * thighs,
            "still": -0.1 * (1.0 - moving) * bent,
        }
        return {name: term * self._control_seconds for name, term in each.items()} | {"fall": -1.0 * terminated.float()}

    def measure(self, worlds: Worlds) -> dict[str, Tensor]:
        command = worlds.memory["command"]
        off = (worlds.sensor("velocity")[:, :2] - command[:, :2]).norm(dim=1)
        return {"velocity_error": off, "turn_error": (worlds.sensor("gyro")[:, 2] - command[:, 2]).abs()}

    def _torque(self, worlds: Worlds) -> Tensor:
        """What the motors give, as the model has it; N m."""
        kp, kd, most = (worlds.constants[name] for name in ("kp", "kd", "torque"))
        asked = kp * (worlds.sim.ctrl - worlds.qpos[:, 7:]) - kd * worlds.qvel[:, 6:]
        return torch.maximum(torch.minimum(asked, most), -most)

    def _touching(self, worlds: Worlds) -> Tensor:
        """Whether each foot is on the ground, bool [world, 4]."""
        return torch.cat([worlds.sensor(f"{leg}_foot_contact") for leg in go1.LEGS], dim=1) > 0.0


ENTRY = TaskEntry(
    Go1Velocity,
    summary="a quadruped of the Go1's class follows a commanded velocity over flat ground",
    ppo=PpoConfig(horizon=24, epochs=5, minibatches=4, hidden=(256, 128, 64), entropy_weight=0.01),
    rsl_rl=RslRlConfig(entropy_coef=0.01),
    rl_games=RlGamesConfig(),
    skrl=SkrlConfig(entropy_loss_scale=0.01),
    max_iterations=500,
    cpu_envs=512,
)
