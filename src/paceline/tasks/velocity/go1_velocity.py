"""A quadruped follows a commanded velocity over flat ground."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.env.task import EnvState
from paceline.env.training_settings import TrainingSettings
from paceline.robots.legged import GO1, GO1_LEGS
from paceline.tasks.registry import TaskEntry
from paceline.tasks.velocity.velocity_task import Cosine, VelocityTask, num_samples


@dataclass(frozen=True)
class Go1Rewards:
    """Weights of the reward terms. All but `termination` are multiplied by the duration of a control step."""

    track_lin_vel: float = 1.5  # Weight of exp(-4 e) for the squared error e of the horizontal velocity, (m/s)^2.
    track_ang_vel: float = 0.75  # Weight of exp(-4 e) for the squared error e of the yaw rate, (rad/s)^2.
    lin_vel_z: float = -2.0  # Weight of the squared vertical velocity of the base, (m/s)^2.
    ang_vel_xy: float = -0.05  # Weight of the squared roll and pitch rates of the base, (rad/s)^2.
    flat_orientation: float = -2.5  # Weight of the squared sine of the base's tilt.
    joint_torque: float = -2e-4  # Weight of the sum of squared joint torques, (N m)^2.
    joint_vel: float = -1e-3  # Weight of the sum of squared joint velocities, (rad/s)^2.
    action_rate: float = -0.01  # Weight of the sum of squared changes of the action from one control step to the next.
    feet_air_time: float = 0.5  # Weight of the swing time of a foot beyond 0.25 s, in the step in which the foot lands.
    feet_slip: float = -0.1  # Weight of the squared horizontal speed of the feet that touch the ground, (m/s)^2.
    thigh_contact: float = -1.0  # Weight of the number of thighs that touch the ground.
    stand_still: float = -0.1  # Weight of the sum of distances from the default joint angles, rad, at zero commands.
    termination: float = -1.0  # Reward for a fall.


@dataclass(frozen=True)
class Go1Velocity(VelocityTask):
    """A command is the velocity of the trunk forward and to the left, and its yaw rate."""

    min_upright: Cosine = 0.35
    """Minimum cosine of the trunk's tilt, -1 to 1. Below it the episode ends."""
    rewards: Go1Rewards = Go1Rewards()

    legged = GO1
    num_actions = 12
    num_reset_samples, num_step_samples = num_samples(num_actions)

    def terminated(self, state: EnvState) -> Tensor:
        fallen = state.sensor("upvector")[:, 2] < self.min_upright
        return fallen | (state.sensor("trunk_contact")[:, 0] > 0.0)

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        air_time, moving = state.task_state["last_air_time"], self.is_moving(state)
        thighs: Any = sum((state.sensor(f"{leg}_thigh_contact")[:, 0] > 0.0).float() for leg in GO1_LEGS)
        joint_error = (state.qpos[:, 7:] - state.constants["default_joint_pos"]).abs().sum(1)
        terms = self.shared_terms(state) | {
            "feet_air_time": moving * ((air_time - 0.25) * (air_time > 0.0)).sum(1),
            "thigh_contact": thighs,
            "stand_still": (1.0 - moving) * joint_error,
        }
        return self.weighted(terms, self.rewards, Go1Rewards.__match_args__, terminated)


ENTRY = TaskEntry(
    Go1Velocity,
    summary="a quadruped like the Unitree Go1 follows a commanded velocity over flat ground",
    training=TrainingSettings(entropy_weight=0.01, overrides={"rl_games": {"entropy_coef": 0.0}}),
    max_iterations=500,
    cpu_envs=512,
)
