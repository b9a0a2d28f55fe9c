"""Base class of the tasks in which a legged robot follows a commanded velocity."""

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Self

import mujoco
import numpy as np
import torch
from annotated_types import Ge, Gt, Interval, Le
from torch import Tensor

from paceline.env.observations import MAX_HISTORY_STEPS, is_valid_delay
from paceline.env.policy_interface import XYZ, ActionMapping, CommandRange, ObservationPart, joint_names
from paceline.env.randomization import Randomization
from paceline.env.task import CommandDisplay, Decimation, EnvState, ResetState, Task
from paceline.errors import UserError
from paceline.robots.legged import LeggedRobot
from paceline.validation import NonNegative, NonNegativeRange, Positive, Range, UnitInterval, check_options

_TIMESTEP = 0.005
_Speed = Annotated[float, Gt(0), Le(100)]
Cosine = Annotated[float, Interval(ge=-1, le=1)]
Fraction = Annotated[float, Gt(0), Le(1)]
# Samples for a command: whether to resample it, three velocities, whether to stand. A push has seven more: whether to
# push, six velocities.
_COMMAND_SAMPLES, _EVENT_SAMPLES = 5, 12
# Half-widths of the uniform observation noise: base velocity, gyro and up vector, then angle and speed of each joint.
_BASE_NOISE, _JOINT_POS_NOISE, _JOINT_VEL_NOISE = (*[0.1] * 3, *[0.2] * 3, *[0.05] * 3), 0.01, 1.5
_COMMAND_LABELS, _COMMAND_UNITS = ("forward", "left", "yaw"), ("m/s", "m/s", "rad/s")


def num_samples(joints: int) -> tuple[int, int]:
    """Return the number of uniform samples per reset and per control step."""
    return 9 + 2 * joints + _COMMAND_SAMPLES, _EVENT_SAMPLES + len(_BASE_NOISE) + 2 * joints


@dataclass(frozen=True)
class RandomizationRanges:
    """Ranges from which properties of the robot are sampled uniformly, for each env."""

    friction: NonNegativeRange = (0.4, 1.2)
    """Minimum and maximum sliding friction of the feet, at least 0. Sampled in every episode."""
    base_mass: Range = (-1.0, 2.0)
    """Minimum and maximum mass that is added to the base, kg. Sampled once per env."""
    base_com: Range = (-0.03, 0.03)
    """Minimum and maximum forward offset of the base's center of mass, m. Sampled once per env."""
    motor_strength: NonNegativeRange = (0.9, 1.1)
    """Minimum and maximum factor of each motor's gains, at least 0. Sampled once per env."""


@dataclass(frozen=True)
class VelocityTask(Task):
    """A command is the velocity of the base forward and to the left, and its yaw rate."""

    legged: ClassVar[LeggedRobot]

    episode_seconds: Positive = 20.0
    decimation: Decimation = 4
    """Number of physics steps of 5 ms per control step, at least 1."""
    max_forward_speed: _Speed = 1.0
    """Maximum commanded speed forward and backward, m/s; above 0, at most 100."""
    max_lateral_speed: _Speed = 0.5
    """Maximum commanded speed to the left and to the right, m/s; above 0, at most 100."""
    max_yaw_rate: _Speed = 1.0
    """Maximum commanded yaw rate in both directions, rad/s; above 0, at most 100."""
    initial_command_scale: Fraction = 1.0
    """Initial fraction of the maximum commands; above 0, at most 1. It grows with success; 1 disables the growth."""
    standing_fraction: UnitInterval = 0.1
    """Fraction of the commands that are zero, 0 to 1."""
    command_seconds: Positive = 5.0
    """Mean time until a new command is sampled, s; above 0."""
    push_seconds: NonNegative = 8.0
    """Mean time between pushes, s; at least 0. 0 disables pushes."""
    max_push_speed: NonNegative = 0.5
    """Maximum change of the base velocity by a push, m/s and rad/s; at least 0."""
    action_scale: Positive = 0.25
    """Fraction of a joint's maximum torque that an action of 1 commands at rest; above 0."""
    observation_noise_scale: NonNegative = 1.0
    """Factor of the observation noise; at least 0. 0 disables the noise."""
    history: Annotated[int, Ge(1), Le(MAX_HISTORY_STEPS)] = 1
    """Number of consecutive observations that the policy receives, 1 to 1000."""
    delay: tuple[int, int] = (0, 0)
    """Minimum and maximum delay of the observations of the policy, in control steps, 0 to 1000."""
    randomize: bool = True
    """Randomize friction, masses and motors."""
    randomization: RandomizationRanges = RandomizationRanges()
    robot: str = ""
    """Path of an MJCF model of the same robot family, which replaces the built-in model."""

    def __post_init__(self) -> None:
        check_options(self)
        if not is_valid_delay(self.delay):
            low, high = self.delay
            allowed = f"the minimum and the maximum in control steps, at most {MAX_HISTORY_STEPS}"
            raise UserError(f"--env.delay {low} {high} must be {allowed}: try --env.delay 0 2")

    observation_history = property(attrgetter("history"))  # pyright: ignore[reportAssignmentType]
    observation_delay = property(attrgetter("delay"))  # pyright: ignore[reportAssignmentType]

    @property
    def step_seconds(self) -> float:
        """Duration of a control step, s."""
        return _TIMESTEP * self.decimation

    def randomized_fields(self) -> tuple[Randomization, ...]:
        if not self.randomize:
            return ()
        ranges, soles, base = self.randomization, f"({'|'.join(self.legged.feet)}).*", self.legged.torso
        return (
            Randomization("geom_friction", *ranges.friction, names=soles, how="set", column=0, together=True),
            Randomization("body_mass", *ranges.base_mass, names=base, how="add", when="once"),
            Randomization("body_ipos", *ranges.base_com, names=base, how="add", column=0, when="once"),
            # Gain and bias change together: stiffness and damping have the same factor.
            Randomization("actuator_gainprm", *ranges.motor_strength, also="actuator_biasprm", when="once"),
        )

    def model(self) -> mujoco.MjModel:
        return self.legged.scene(self.robot).compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        model, joints = self.legged.scene(self.robot).compile(), self.num_actions
        home, kp, max_torque = model.key("home").qpos, model.actuator_gainprm[:, 0], model.actuator_forcerange[:, 1]
        rows = {
            "default_height": home[2:3],
            "default_joint_pos": home[7:],
            "action_scale": self._action_scale(model),
            "kp": kp,
            "kd": -model.actuator_biasprm[:, 2],
            "max_torque": max_torque,
        }
        return {name: tuple(row.tolist()) for name, row in rows.items()} | {
            "observation_noise": (*_BASE_NOISE, *[_JOINT_POS_NOISE] * joints, *[_JOINT_VEL_NOISE] * joints),
            "max_command": (self.max_forward_speed, self.max_lateral_speed, self.max_yaw_rate),
        }

    def _action_scale(self, model: mujoco.MjModel) -> np.ndarray:
        """Return the angle that an action of 1 adds to the target of each joint, rad."""
        return self.action_scale * model.actuator_forcerange[:, 1] / model.actuator_gainprm[:, 0]

    def state_spec(self) -> dict[str, int]:
        feet = len(self.legged.feet)
        return {
            "command": 3,  # Velocity forward and to the left, m/s, and yaw rate, rad/s.
            "command_scale": 1,  # Fraction of the maximum commands.
            "tracking_error": 1,  # Sum of the velocity errors of the episode's steps, m/s.
            "feet_air_time": feet,  # Time since each foot left the ground, s.
            "last_air_time": feet,  # Duration of a swing in the step that ends it, s.
            "push": 6,  # Change of the base velocity, m/s and rad/s.
            "observation_noise": len(_BASE_NOISE) + 2 * self.num_actions,
        }

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        joints, default = self.num_actions, state.constants["default_joint_pos"]
        yaw, position, velocity, joint_pos, joint_vel, command = uniform.split(
            (1, 2, 6, joints, joints, _COMMAND_SAMPLES), dim=1
        )
        half_yaw = math.pi * (yaw - 0.5)
        zero = torch.zeros_like(half_yaw)
        height = (state.constants["default_height"] + 0.02).expand_as(half_yaw)
        rotation = torch.cos(half_yaw), zero, zero, torch.sin(half_yaw)
        qpos = torch.cat((position - 0.5, height, *rotation, default + 0.4 * (joint_pos - 0.5)), dim=1)
        scale, feet = self._next_command_scale(state), zero.expand(-1, len(self.legged.feet))
        task_state = {
            "command": self._sample_command(state, scale, command[:, 1:]),
            "command_scale": scale,
            "tracking_error": zero,
            "feet_air_time": feet,
            "last_air_time": feet,
            "push": zero.expand(-1, 6),
        }
        return ResetState(qpos, torch.cat((velocity - 0.5, joint_vel - 0.5), dim=1), task_state)

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        push, noise = uniform[:, _COMMAND_SAMPLES:_EVENT_SAMPLES], uniform[:, _EVENT_SAMPLES:]
        previous, contact = state.task_state, self.feet_contact(state)
        air_time, zero = previous["feet_air_time"], torch.zeros_like(previous["feet_air_time"])
        pushed = push[:, :1] * self.push_seconds < self.step_seconds
        velocity = self.max_push_speed * (2.0 * push[:, 1:] - 1.0)
        return {
            "tracking_error": previous["tracking_error"] + self._tracking_error(state).unsqueeze(1),
            "last_air_time": torch.where(contact, air_time, zero),
            "feet_air_time": torch.where(contact, zero, air_time + self.step_seconds),
            "push": torch.where(pushed & (self.push_seconds > 0.0), velocity, torch.zeros_like(velocity)),
            "observation_noise": 2.0 * noise - 1.0,
        }

    def resample(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        samples, command = uniform[:, :_COMMAND_SAMPLES], state.task_state["command"]
        due = samples[:, :1] < self.step_seconds / self.command_seconds
        sampled = self._sample_command(state, state.task_state["command_scale"], samples[:, 1:])
        return {"command": torch.where(due, sampled, command)}

    def ending(self, state: EnvState) -> tuple[Tensor, Tensor]:
        """Return whether the robot fell and whether the time limit is reached, each bool [env, 1]."""
        fell, steps = self.terminated(state).unsqueeze(1), state.episode_step.unsqueeze(1)
        return fell, (steps + 0.5) * self.step_seconds > self.episode_seconds

    def _next_command_scale(self, state: EnvState) -> Tensor:
        """Return a larger scale for envs whose robot followed its commands to the time limit, a smaller one for those
        whose robot fell, [env, 1]."""
        scale = state.task_state["command_scale"]
        if self.initial_command_scale == 1.0:
            return torch.ones_like(scale)
        fell, time_out = self.ending(state)
        succeeded = time_out & ~fell
        followed = state.task_state["tracking_error"] < 0.25 * state.episode_step.unsqueeze(1)
        change = 0.1 * (succeeded & followed) - 0.05 * ~succeeded
        updated = (scale + change).clamp(self.initial_command_scale, 1.0)
        return torch.where(scale > 0.0, updated, self.initial_command_scale)

    def _sample_command(self, state: EnvState, scale: Tensor, uniform: Tensor) -> Tensor:
        direction = 2.0 * uniform[:, :3] - 1.0
        return direction * state.constants["max_command"] * scale * (uniform[:, 3:4] >= self.standing_fraction)

    def for_evaluation(self) -> Self:
        return replace(self, initial_command_scale=1.0)

    def control(self, state: EnvState) -> Tensor:
        return state.constants["default_joint_pos"] + state.action * state.constants["action_scale"]

    def push_velocity(self, state: EnvState) -> Tensor:
        return torch.cat((state.task_state["push"], torch.zeros_like(state.qvel[:, 6:])), dim=1)

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        base = state.sensor("velocity"), state.sensor("gyro"), state.sensor("upvector")
        joint_pos = state.qpos[:, 7:] - state.constants["default_joint_pos"]
        sensed = torch.cat((*base, joint_pos, state.qvel[:, 6:]), dim=1)
        exact = torch.cat((state.task_state["command"], state.action), dim=1)
        noise = self.observation_noise_scale * state.constants["observation_noise"]
        noisy = sensed + noise * state.task_state["observation_noise"]
        feet = torch.cat((self.feet_contact(state).float(), state.task_state["feet_air_time"]), dim=1)
        return {
            "policy": torch.cat((noisy, exact), dim=1),
            "critic": torch.cat((sensed, exact, feet, state.qpos[:, 2:3]), dim=1),
        }

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        joints, feet, home = joint_names(model), self.legged.feet, model.key("home").qpos
        num_joints, gravity = len(joints), "Direction of gravity in the frame of the base, a unit vector."
        spin = "Angular velocity in the frame of the base."
        policy = (
            ObservationPart("base_lin_vel", 3, "m/s", labels=XYZ, description="Velocity in the frame of the base."),
            ObservationPart("base_ang_vel", 3, "rad/s", labels=XYZ, description=spin),
            ObservationPart("projected_gravity", 3, scale=-1.0, labels=XYZ, description=gravity),
            ObservationPart("joint_pos", num_joints, "rad", offset=tuple(home[7:].tolist()), labels=joints),
            ObservationPart("joint_vel", num_joints, "rad/s", labels=joints),
            ObservationPart("command", 3, _COMMAND_UNITS, labels=_COMMAND_LABELS),
            ObservationPart("actions", num_joints, labels=joints, description="Latest action; zero at the start."),
        )
        critic = (
            ObservationPart("feet_contact", len(feet), labels=feet, description="1 if the foot touches the ground."),
            ObservationPart("feet_air_time", len(feet), "s", labels=feet, description="Time since the last contact."),
            ObservationPart("base_height", 1, "m", description="Height above the origin of the world."),
        )
        return {"policy": policy, "critic": (*policy, *critic)}

    def action_mapping(self, model: mujoco.MjModel) -> ActionMapping:
        scale, default = self._action_scale(model), model.key("home").qpos[7:]
        return ActionMapping(tuple(scale.tolist()), tuple(default.tolist()))

    def command_ranges(self) -> dict[str, CommandRange]:
        high = (self.max_forward_speed, self.max_lateral_speed, self.max_yaw_rate)
        low = tuple(-speed for speed in high)
        return {"twist": CommandRange(_COMMAND_LABELS, _COMMAND_UNITS, low, high, "command")}

    def shared_terms(self, state: EnvState) -> dict[str, Tensor]:
        """Return the reward terms of all robots without their weights, each [env]."""
        velocity, gyro, up = state.sensor("velocity"), state.sensor("gyro"), state.sensor("upvector")
        command, joint_vel, constants = state.task_state["command"], state.qvel[:, 6:], state.constants
        # Torques of motors of nominal strength.
        torque = constants["kp"] * (state.sim.ctrl - state.qpos[:, 7:]) - constants["kd"] * joint_vel
        torque = torch.maximum(torch.minimum(torque, constants["max_torque"]), -constants["max_torque"])
        feet_speed = [state.sensor(f"{foot}_velocity")[:, :2].square().sum(1) for foot in self.legged.feet]
        return {
            "track_lin_vel": torch.exp(-4.0 * (velocity[:, :2] - command[:, :2]).square().sum(1)),
            "track_ang_vel": torch.exp(-4.0 * (gyro[:, 2] - command[:, 2]).square()),
            "lin_vel_z": velocity[:, 2].square(),
            "ang_vel_xy": gyro[:, :2].square().sum(1),
            "flat_orientation": up[:, :2].square().sum(1),
            "joint_torque": torque.square().sum(1),
            "joint_vel": joint_vel.square().sum(1),
            "action_rate": (state.action - state.last_action).square().sum(1),
            "feet_slip": (self.feet_contact(state) * torch.stack(feet_speed, dim=1)).sum(1),
        }

    def weighted(
        self, terms: dict[str, Tensor], weights: Any, names: tuple[str, ...], terminated: Tensor
    ) -> dict[str, Tensor]:
        """Return the weighted reward terms in the order of `names`, the fields of `weights`. All but `termination`,
        which is added here, are multiplied by the duration of a control step."""
        if set(names) != {*terms, "termination"}:
            raise ValueError(f"reward terms {sorted(set(names) ^ {*terms, 'termination'})} have no weight or no value")
        per_second = [name for name in names if name != "termination"]
        scaled = {name: getattr(weights, name) * terms[name] * self.step_seconds for name in per_second}
        return scaled | {"termination": weights.termination * terminated.float()}

    def metrics(self, state: EnvState) -> dict[str, Tensor]:
        yaw_rate_error = state.sensor("gyro")[:, 2] - state.task_state["command"][:, 2]
        return {"velocity_error": self._tracking_error(state), "turn_error": yaw_rate_error.abs()}

    def command_display(self, state: EnvState) -> CommandDisplay:
        command, velocity, gyro = state.task_state["command"], state.sensor("velocity"), state.sensor("gyro")
        numbers = {
            "forward m/s": (command[:, 0], velocity[:, 0]),
            "left m/s": (command[:, 1], velocity[:, 1]),
            "yaw rad/s": (command[:, 2], gyro[:, 2]),
        }
        return CommandDisplay(numbers, velocity=(command[:, :2], velocity[:, :2]))

    def _tracking_error(self, state: EnvState) -> Tensor:
        """Return the distance of the horizontal velocity from the commanded one, m/s, [env]."""
        return (state.sensor("velocity")[:, :2] - state.task_state["command"][:, :2]).norm(dim=1)

    def is_moving(self, state: EnvState) -> Tensor:
        """Return 1 where the command is to move and 0 where it is to stand, float32 [env]."""
        return (state.task_state["command"].norm(dim=1) > 0.1).float()

    def feet_contact(self, state: EnvState) -> Tensor:
        """Return whether each foot touches the ground, bool [env, foot]."""
        return torch.cat([state.sensor(f"{foot}_contact") for foot in self.legged.feet], dim=1) > 0.0
