"""A hand turns a cube on its palm to one goal rotation after the other."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import mujoco
import torch
from annotated_types import Gt, Le
from torch import Tensor

from paceline.env.policy_interface import QUATERNION, XYZ, ActionMapping, ObservationPart, joint_names
from paceline.env.task import CommandDisplay, Decimation, EnvState, ResetState, Task
from paceline.env.training_settings import TrainingSettings
from paceline.robots import shadow_hand
from paceline.tasks.registry import TaskEntry
from paceline.tensors import rotations
from paceline.validation import NonNegative, PhysicsRate, Positive, UnitInterval, check_options

_JOINTS = shadow_hand.NUM_JOINTS
# Columns of the cube in `qpos` and `qvel`, after the joints of the hand.
CUBE_POS, CUBE_ROTATION = slice(_JOINTS, _JOINTS + 3), slice(_JOINTS + 3, None)
_CUBE_VEL = slice(_JOINTS, _JOINTS + 3)
_DROP_HEIGHT = 0.04
"""Height from which the cube is dropped onto the palm, m."""


@dataclass(frozen=True)
class ShadowHandRewards:
    """Weights of the reward terms. All are multiplied by --env.reward-scale."""

    distance: float = -10.0  # Weight of the distance of the cube from its place on the palm, m.
    rotation: float = 1.0  # Weight of 1 / (a + 0.1) for the angle a between the cube and its goal, rad.
    action: float = -2e-4  # Weight of the sum of squared actions.
    success: float = 250.0  # Reward for reaching the goal.
    fall: float = 0.0  # Reward for a fall of the cube.


@dataclass(frozen=True)
class ShadowHandRepose(Task):
    """Observations, rewards and limits of Isaac Lab's Isaac-Repose-Cube-Shadow-Direct-v0."""

    episode_seconds: Positive = 10.0
    decimation: Decimation = 2
    physics_hz: PhysicsRate = 120.0
    """Physics steps per second, 1 to 100000."""
    policy_observations: Literal["state", "fingertips"] = "state"
    """Observations of the policy: all 157 numbers of the state, or the 42 that cameras could provide (fingertips).
    The 42 are the positions of fingertips and cube, the rotation from cube to goal, and the latest action.
    In both cases the critic observes the state and the forces on the fingertips."""
    success_tolerance: Positive = 0.1
    """Maximum angle between the cube and its goal at which the goal is reached, rad; above 0."""
    action_moving_average: Annotated[float, Gt(0), Le(1)] = 1.0
    """Weight of the newest action in the moving average that the joint targets follow; above 0, at most 1.
    After a reset the targets are zero."""
    fall_distance: Positive = 0.24
    """Distance of the cube from its place on the palm at which the episode ends, m; above 0."""
    reward_scale: Positive = 0.01
    """Factor of all rewards, above 0."""
    reset_position_noise: NonNegative = 0.01
    """Maximum offset of the initial position of the cube along each axis, m; at least 0."""
    reset_joint_pos_noise: UnitInterval = 0.2
    """Fraction of the joint ranges from which the initial joint angles are sampled, 0 to 1."""
    rewards: ShadowHandRewards = ShadowHandRewards()

    num_actions = shadow_hand.NUM_ACTUATORS
    num_reset_samples = 3 + 2 + 2 + _JOINTS
    num_step_samples = 2

    def __post_init__(self) -> None:
        check_options(self)

    def model(self) -> mujoco.MjModel:
        return shadow_hand.scene(self.physics_hz).compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        model = self.model()
        (low, high), (min_target, max_target) = model.jnt_range[:_JOINTS].T, model.actuator_ctrlrange.T
        start = model.body("cube").pos
        rows = {
            "min_joint_pos": low,
            "joint_range": high - low,
            "target_center": 0.5 * (min_target + max_target),
            "target_half_range": 0.5 * (max_target - min_target),
            "initial_cube_pos": start,
            "in_hand_pos": start - (0.0, 0.0, _DROP_HEIGHT),
        }
        return {name: tuple(row.tolist()) for name, row in rows.items()}

    def state_spec(self) -> dict[str, int]:
        # Goal rotation, angle from cube to goal in rad, whether the latest control step reached the goal, and the
        # number of goals reached in this episode.
        return {"goal": 4, "angle": 1, "reached": 1, "successes": 1}

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        position, rotation, goal, joint_pos = uniform.split((3, 2, 2, _JOINTS), dim=1)
        constants = state.constants
        joint_pos = self.reset_joint_pos_noise * (constants["min_joint_pos"] + joint_pos * constants["joint_range"])
        position = constants["initial_cube_pos"] + self.reset_position_noise * (2.0 * position - 1.0)
        qpos = torch.cat((joint_pos, position, _random_rotation(rotation)), dim=1)
        task_state = {"goal": _random_rotation(goal), "successes": torch.zeros_like(uniform[:, :1])}
        return ResetState(qpos, torch.zeros_like(state.qvel), task_state)

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        # Computed once for reward, metrics and `resample`.
        difference = rotations.difference(state.qpos[:, CUBE_ROTATION], state.task_state["goal"])
        angle = rotations.angle(difference).unsqueeze(1)
        reached = angle <= self.success_tolerance
        return {"angle": angle, "reached": reached.float(), "successes": state.task_state["successes"] + reached}

    def resample(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        reached = state.task_state["reached"] > 0.0
        return {"goal": torch.where(reached, _random_rotation(uniform), state.task_state["goal"])}

    def control(self, state: EnvState) -> Tensor:
        constants = state.constants
        target = constants["target_center"] + constants["target_half_range"] * state.action.clamp(-1.0, 1.0)
        return state.sim.ctrl + self.action_moving_average * (target - state.sim.ctrl)

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        constants, goal = state.constants, state.task_state["goal"]
        position, rotation = state.qpos[:, CUBE_POS], state.qpos[:, CUBE_ROTATION]
        joint_pos, joint_vel, fingertips, *motion, action = self.observe_hand(state)
        to_goal = rotations.difference(rotation, goal)
        full = (
            joint_pos,
            joint_vel,
            position,
            rotation,
            state.qvel[:, _CUBE_VEL],
            0.2 * state.sensor("cube_spin"),
            constants["in_hand_pos"].expand_as(position),
            goal,
            to_goal,
            fingertips,
            *motion,
            action,
        )
        policy = full if self.policy_observations == "state" else (fingertips, position, to_goal, action)
        return {
            "policy": torch.cat(policy, dim=1),
            "critic": torch.cat((*full, _fingertips(state, "wrench")), dim=1),
        }

    def observe_hand(self, state: EnvState) -> tuple[Tensor, ...]:
        """Return the observations of the hand: joint positions and velocities, positions, rotations, velocities and
        spins of the fingertips, and the latest action."""
        joint_pos = (state.qpos[:, :_JOINTS] - state.constants["min_joint_pos"]) / state.constants["joint_range"]
        fingertips = (_fingertips(state, kind) for kind in ("position", "rotation", "velocity", "spin"))
        return 2.0 * joint_pos - 1.0, 0.2 * state.qvel[:, :_JOINTS], *fingertips, state.action.clamp(-1.0, 1.0)

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        joint_pos, joint_vel, fingertips, *motion, action = self.hand_parts(model)
        position = ObservationPart("cube_pos", 3, "m", labels=XYZ, description="Position in the world.")
        to_goal = "Rotation, about the axes of the world, that turns the goal into the cube."
        to_goal = ObservationPart("goal_to_cube", 4, labels=QUATERNION, description=to_goal)
        in_hand = "Place of the cube on the palm, in the world. It is constant."
        spin = "Angular velocity in the axes of the world."
        full = (
            joint_pos,
            joint_vel,
            position,
            ObservationPart("cube_rotation", 4, labels=QUATERNION, description="Rotation in the world."),
            ObservationPart("cube_vel", 3, "m/s", labels=XYZ, description="Velocity in the axes of the world."),
            ObservationPart("cube_ang_vel", 3, "rad/s", 0.2, labels=XYZ, description=spin),
            ObservationPart("in_hand_pos", 3, "m", labels=XYZ, description=in_hand),
            ObservationPart("goal_rotation", 4, labels=QUATERNION, description="Goal for the rotation of the cube."),
            to_goal,
            fingertips,
            *motion,
            action,
        )
        policy = full if self.policy_observations == "state" else (fingertips, position, to_goal, action)
        axes, units = ("fx", "fy", "fz", "tx", "ty", "tz"), (*["N"] * 3, *["N m"] * 3)
        wrench = _fingertip_part("wrench", axes, units * len(shadow_hand.FINGERS), "Net force and torque of contacts.")
        return {"policy": policy, "critic": (*full, wrench)}

    def hand_parts(self, model: mujoco.MjModel) -> tuple[ObservationPart, ...]:
        """Return the parts of `observe_hand`."""
        names, (low, high) = joint_names(model)[:_JOINTS], model.jnt_range[:_JOINTS].T
        scale, center = tuple((2.0 / (high - low)).tolist()), tuple((0.5 * (low + high)).tolist())
        motors, latest = _motor_joints(model), "Latest action; zero at the start."
        return (
            ObservationPart("joint_pos", _JOINTS, "rad", scale, center, labels=names),
            ObservationPart("joint_vel", _JOINTS, "rad/s", 0.2, labels=names),
            _fingertip_part("pos", XYZ, "m", "Position in the world."),
            _fingertip_part("rotation", QUATERNION, "", "Rotation in the world."),
            _fingertip_part("vel", XYZ, "m/s", "Velocity in the axes of the world."),
            _fingertip_part("ang_vel", XYZ, "rad/s", "Angular velocity in the axes of the world."),
            ObservationPart("actions", len(motors), clip=(-1.0, 1.0), labels=motors, description=latest),
        )

    def action_mapping(self, model: mujoco.MjModel) -> ActionMapping:
        low, high = model.actuator_ctrlrange.T
        half_range, center = tuple((0.5 * (high - low)).tolist()), tuple((0.5 * (low + high)).tolist())
        return ActionMapping(half_range, center, clip=(-1.0, 1.0), smoothing=self.action_moving_average)

    def terminated(self, state: EnvState) -> Tensor:
        return _distance(state) >= self.fall_distance

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        weights = self.rewards
        terms = {
            "distance": weights.distance * _distance(state),
            "rotation": weights.rotation * (1.0 / (state.task_state["angle"][:, 0] + 0.1)),
            "action": weights.action * state.action.square().sum(1),
            "success": weights.success * state.task_state["reached"][:, 0],
            "fall": weights.fall * terminated.float(),
        }
        return {name: self.reward_scale * term for name, term in terms.items()}

    def metrics(self, state: EnvState) -> dict[str, Tensor]:
        values = state.task_state
        # The mean over an episode must be its number of successes, so the sum over the first t steps is t times the
        # number of successes in them.
        successes = values["successes"] + values["reached"] * (state.episode_step - 1).unsqueeze(1)
        return {"successes": successes[:, 0], "angle_to_goal": values["angle"][:, 0]}

    def command_display(self, state: EnvState) -> CommandDisplay:
        return CommandDisplay({}, rotation=state.task_state["goal"])


def _fingertip_part(kind: str, axes: tuple[str, ...], unit: str | tuple[str, ...], meaning: str) -> ObservationPart:
    labels = tuple(f"{finger} {axis}" for finger in shadow_hand.FINGERS for axis in axes)
    return ObservationPart(f"fingertip_{kind}", len(labels), unit, labels=labels, description=meaning)


def _motor_joints(model: mujoco.MjModel) -> tuple[str, ...]:
    """Return the names of the joints that have a motor, in the order of the actions."""
    return tuple(model.joint(joint).name for joint in model.actuator_trnid[:, 0])


def _distance(state: EnvState) -> Tensor:
    """Return the distance of the cube from its place on the palm, m, [env]."""
    return (state.qpos[:, CUBE_POS] - state.constants["in_hand_pos"]).norm(dim=1)


def _random_rotation(uniform: Tensor) -> Tensor:
    """Return rotations from samples [env, 2], distributed as in the published task."""
    x, y = (math.pi * (2.0 * uniform - 1.0)).unbind(1)
    return rotations.about_x_after_y(x, y)


def _fingertips(state: EnvState, kind: str) -> Tensor:
    """Return the sensors of one kind of all fingers, which have adjacent columns, [env, n]."""
    first, last = shadow_hand.FINGERS[0], shadow_hand.FINGERS[-1]
    return state.sim.sensordata[:, state.sensors[f"{first}_{kind}"].start : state.sensors[f"{last}_{kind}"].stop]


_OVERRIDES = {
    "rl_games": {"bounds_loss_coef": 1e-4, "critic_coef": 4.0, "entropy_coef": 0.0, "schedule_type": "standard"},
    "skrl": {"entropy_loss_scale": 0.0},
}
ENTRY = TaskEntry(
    ShadowHandRepose,
    summary="a Shadow Hand turns a cube on its palm to a sequence of goal rotations",
    training=TrainingSettings(
        horizon=16, hidden_layers=(512, 256, 128), learning_rate=5e-4, desired_kl=0.016, overrides=_OVERRIDES
    ),
    max_iterations=3000,
    cpu_envs=512,
    gpu_envs=8192,
)
