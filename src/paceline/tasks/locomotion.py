"""An ant and a humanoid run toward a distant target."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import mujoco
import torch
from torch import Tensor

from paceline.env.policy_interface import XYZ, ActionMapping, ObservationPart, joint_names
from paceline.env.task import Decimation, EnvState, ResetState, Task
from paceline.env.training_settings import TrainingSettings
from paceline.robots.gymnasium_robots import scene
from paceline.tasks.registry import TaskEntry
from paceline.validation import Positive, check_options

_PHYSICS_HZ = 120.0
_TARGET_DISTANCE = 1000.0
"""Distance of the target from the origin along the x axis, m."""
# Number of coordinates of the torso, which come before those of the joints.
_TORSO_QPOS, _TORSO_QVEL = 7, 6
_RESET_JOINT_POS, _RESET_JOINT_VEL = 0.2, 0.1
"""Half-widths of the initial joint angles, rad, and velocities, rad/s."""


class Torso(NamedTuple):
    """Pose and velocity of the torso; all but `velocity` are [env]. Angles are within +-pi."""

    velocity: Tensor  # Velocity in the frame of the torso, m/s, [env, 3].
    yaw: Tensor
    roll: Tensor
    target_angle: Tensor  # Angle from the yaw to the direction of the target, positive to the left.
    up: Tensor  # Cosine of the tilt.
    heading: Tensor  # Cosine of the angle between the forward axis of the torso and the direction of the target.


@dataclass(frozen=True)
class LocomotionRewards:
    """Weights of the reward terms, per control step."""

    alive: float  # Reward for every step without a fall.
    action: float  # Weight of the sum of squared actions.
    termination: float  # Reward for a fall. It replaces all other rewards of the step.
    progress: float = 2.0  # Weight of the speed toward the target, m/s.
    upright: float = 0.1  # Reward if the cosine of the tilt is above 0.93.
    heading: float = 0.5  # Reward if the cosine of the heading is above 0.8. Below, it is proportional to the cosine.
    energy: float = -0.05  # Weight of the sum of absolute products of action and observed joint speed.
    joint_limits: float = -1.0  # Weight of the number of joints in the last 1% of their range.


@dataclass(frozen=True)
class LocomotionTask(Task):
    """Rewards, limits and observations of Isaac Lab's Isaac-Ant-Direct-v0 and Isaac-Humanoid-Direct-v0."""

    robot: ClassVar[str]

    min_height: Positive
    """Minimum height of the torso, m; above 0. Below it the episode ends."""
    joint_vel_scale: Positive
    """Factor of the joint velocities in observations and in the energy reward; above 0."""
    ang_vel_scale: Positive
    """Factor of the torso's angular velocity in observations; above 0."""
    rewards: LocomotionRewards
    episode_seconds: Positive = 15.0
    decimation: Decimation = 2

    def __post_init__(self) -> None:
        check_options(self)

    def model(self) -> mujoco.MjModel:
        return scene(self.robot).compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        model = self.model()
        # The first joint is free.
        (low, high), home = model.jnt_range[1:].T, model.key("home").qpos
        rows = {
            "joint_pos_center": (low + high) / 2.0,
            "joint_pos_half_range": (high - low) / 2.0,
            "min_joint_pos": low,
            "max_joint_pos": high,
            "default_joint_pos": home[_TORSO_QPOS:],
            "default_torso_pose": home[:_TORSO_QPOS],
        }
        return {name: tuple(row.tolist()) for name, row in rows.items()}

    def state_spec(self) -> dict[str, int]:
        # Distance of the target, m, and the speed toward it in the latest control step, m/s.
        return {"distance": 1, "speed": 1}

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        pos, vel = (2.0 * uniform - 1.0).chunk(2, dim=1)
        constants = state.constants
        joint_pos = constants["default_joint_pos"] + _RESET_JOINT_POS * pos
        joint_pos = torch.maximum(torch.minimum(joint_pos, constants["max_joint_pos"]), constants["min_joint_pos"])
        qpos = torch.cat((constants["default_torso_pose"].expand(len(pos), -1), joint_pos), dim=1)
        qvel = torch.cat((torch.zeros_like(qpos[:, :_TORSO_QVEL]), _RESET_JOINT_VEL * vel), dim=1)
        return ResetState(qpos, qvel, {"distance": torch.full_like(qpos[:, :1], _TARGET_DISTANCE)})

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        distance = _to_target(state).norm(dim=1, keepdim=True)
        speed = (state.task_state["distance"] - distance) * (_PHYSICS_HZ / self.decimation)
        return {"distance": distance, "speed": speed}

    def control(self, state: EnvState) -> Tensor:
        return state.action.clamp(-1.0, 1.0)

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        torso = _torso(state)
        parts = (
            state.qpos[:, 2:3],
            torso.velocity,
            self.ang_vel_scale * state.qvel[:, 3:_TORSO_QVEL],
            torch.stack((torso.yaw, torso.roll, torso.target_angle, torso.up, torso.heading), dim=1),
            _normalized_joint_pos(state),
            self.joint_vel_scale * state.qvel[:, _TORSO_QVEL:],
            state.action,
        )
        return {"policy": torch.cat(parts, dim=1)}

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        (low, high), joints = model.jnt_range[1:].T, joint_names(model)
        scale, center = tuple((2.0 / (high - low)).tolist()), tuple((0.5 * (low + high)).tolist())
        spin = "Angular velocity in the frame of the torso."
        target = "Angle from the yaw to the direction of the target, positive to the left."
        policy = (
            ObservationPart("torso_height", 1, "m"),
            ObservationPart("torso_lin_vel", 3, "m/s", labels=XYZ, description="Velocity in the frame of the torso."),
            ObservationPart("torso_ang_vel", 3, "rad/s", self.ang_vel_scale, labels=XYZ, description=spin),
            ObservationPart("yaw", 1, "rad"),
            ObservationPart("roll", 1, "rad"),
            ObservationPart("target_angle", 1, "rad", description=target),
            ObservationPart("upright", 1, description="Cosine of the tilt."),
            ObservationPart("heading", 1, description="Cosine of the angle from the forward axis to the target."),
            ObservationPart("joint_pos", len(joints), "rad", scale, center, labels=joints),
            ObservationPart("joint_vel", len(joints), "rad/s", self.joint_vel_scale, labels=joints),
            ObservationPart("actions", len(joints), labels=joints, description="Latest action; zero at the start."),
        )
        return {"policy": policy}

    def action_mapping(self, model: mujoco.MjModel) -> ActionMapping:
        return ActionMapping((1.0,) * self.num_actions, (0.0,) * self.num_actions, clip=(-1.0, 1.0))

    def terminated(self, state: EnvState) -> Tensor:
        return state.qpos[:, 2] < self.min_height

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        weights, torso, alive = self.rewards, _torso(state), (~terminated).float()
        # The action is not clamped here, so that a larger action costs more.
        power = (state.action * state.qvel[:, _TORSO_QVEL:]).abs().sum(1)
        # Only the upper end of the range counts, as in the published tasks, so that returns are comparable.
        at_limit = (_normalized_joint_pos(state) > 0.98).sum(1)
        terms = {
            "progress": weights.progress * state.task_state["speed"][:, 0],
            "alive": weights.alive,
            "upright": weights.upright * (torso.up > 0.93),
            "heading": weights.heading * (torso.heading / 0.8).clamp(max=1.0),
            "action": weights.action * state.action.square().sum(1),
            "energy": weights.energy * self.joint_vel_scale * power,
            "joint_limits": weights.joint_limits * at_limit,
        }
        termination = weights.termination * terminated.float()
        return {name: term * alive for name, term in terms.items()} | {"termination": termination}

    def metrics(self, state: EnvState) -> dict[str, Tensor]:
        return {"speed": state.task_state["speed"][:, 0]}


def _to_target(state: EnvState) -> Tensor:
    """Return the horizontal vector from the torso to the target, m, [env, 2]."""
    x, y = state.qpos[:, :2].unbind(1)
    return torch.stack((_TARGET_DISTANCE - x, -y), dim=1)


def _torso(state: EnvState) -> Torso:
    # Computed from the state: sensors would cost a pass over all envs and be one physics step late in rewards.
    w, x, y, z = state.qpos[:, 3:_TORSO_QPOS].unbind(1)
    axis, velocity = state.qpos[:, 4:_TORSO_QPOS], state.qvel[:, :3]
    cross = 2.0 * torch.linalg.cross(velocity, axis)
    local_velocity = velocity + w.unsqueeze(1) * cross + torch.linalg.cross(cross, axis)
    forward_x, forward_y, up = 1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + y * y)
    yaw, roll = torch.atan2(forward_y, forward_x), torch.atan2(2.0 * (w * x + y * z), up)
    target_x, target_y = _to_target(state).unbind(1)
    angle = torch.atan2(target_y, target_x) - yaw
    inverse_distance = torch.rsqrt(target_x * target_x + target_y * target_y)
    heading = (forward_x * target_x + forward_y * target_y) * inverse_distance
    return Torso(local_velocity, yaw, roll, torch.atan2(angle.sin(), angle.cos()), up, heading)


def _normalized_joint_pos(state: EnvState) -> Tensor:
    """Return the joint angles scaled from each joint's range to -1 to 1, [env, joint]."""
    joint_pos, constants = state.qpos[:, _TORSO_QPOS:], state.constants
    return (joint_pos - constants["joint_pos_center"]) / constants["joint_pos_half_range"]


@dataclass(frozen=True)
class Ant(LocomotionTask):
    """Gymnasium's ant with the joint ranges, armatures and torques of Isaac-Ant-Direct-v0."""

    min_height: Positive = 0.31
    joint_vel_scale: Positive = 0.2
    ang_vel_scale: Positive = 1.0
    rewards: LocomotionRewards = LocomotionRewards(alive=0.5, action=-0.005, termination=-2.0)

    robot = "ant"
    num_actions = 8
    num_reset_samples = 2 * num_actions


@dataclass(frozen=True)
class Humanoid(LocomotionTask):
    """Gymnasium's humanoid, which has no ankles, with the joint ranges, springs, armatures and torques of
    Isaac-Humanoid-Direct-v0."""

    min_height: Positive = 0.8
    joint_vel_scale: Positive = 0.1
    ang_vel_scale: Positive = 0.25
    rewards: LocomotionRewards = LocomotionRewards(alive=2.0, action=-0.01, termination=-1.0)

    robot = "humanoid"
    num_actions = 17
    num_reset_samples = 2 * num_actions


# Values reach a thousand. With their changes clipped to 0.2, the critic of PPO would not learn.
ANT = TaskEntry(
    Ant,
    summary="a four-legged ant runs toward a target",
    training=TrainingSettings(
        horizon=16,
        epochs=4,
        minibatches=2,
        learning_rate=3e-4,
        desired_kl=0.008,
        clip_value=False,
        entropy_weight=0.0,
        overrides={
            "rsl_rl": {
                "desired_kl": 0.01,
                "hidden_dims": (400, 200, 100),
                "learning_rate": 5e-4,
                "num_learning_epochs": 5,
                "num_mini_batches": 4,
                "num_steps_per_env": 32,
            },
            "rl_games": {"bounds_loss_coef": 1e-4, "clip_value": True, "reward_scale": 0.01},
            "skrl": {"rewards_shaper_scale": 0.01, "value_clip": 0.2, "value_loss_scale": 1.0},
        },
    ),
    max_iterations=500,
    cpu_envs=512,
)
HUMANOID = TaskEntry(
    Humanoid,
    summary="a humanoid runs toward a target",
    training=TrainingSettings(
        horizon=32,
        learning_rate=5e-4,
        desired_kl=0.008,
        clip_value=False,
        entropy_weight=0.0,
        overrides={
            "rsl_rl": {"learning_rate": 1e-4},
            "rl_games": {"bounds_loss_coef": 1e-4, "clip_value": True, "critic_coef": 4.0, "reward_scale": 0.01},
            "skrl": {"rewards_shaper_scale": 0.01, "value_clip": 0.2},
        },
    ),
    max_iterations=1000,
    cpu_envs=512,
)
