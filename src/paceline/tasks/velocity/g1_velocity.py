"""A humanoid follows a commanded velocity over flat ground."""

import math
from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from paceline.env.policy_interface import ObservationPart
from paceline.env.task import EnvState, ResetState
from paceline.env.training_settings import TrainingSettings
from paceline.robots.legged import G1
from paceline.tasks.registry import TaskEntry
from paceline.tasks.velocity.velocity_task import Cosine, Fraction, VelocityTask, num_samples
from paceline.validation import Positive

# Weight of each joint in the reward term `posture`: small for joints that move in walking, 0.5 for all others.
_POSTURE = {"hip_pitch": 0.02, "knee": 0.02, "ankle_pitch": 0.02, "ankle_roll": 0.2, "wrist": 0.1, "elbow": 0.2}
_SWING_HEIGHT = 0.08
"""Height of a foot in the middle of its swing, m."""


@dataclass(frozen=True)
class G1Rewards:
    """Weights of the reward terms. All but `termination` are multiplied by the duration of a control step."""

    track_lin_vel: float = 2.0  # Weight of exp(-4 e) for the squared error e of the horizontal velocity, (m/s)^2.
    track_ang_vel: float = 1.0  # Weight of exp(-4 e) for the squared error e of the yaw rate, (rad/s)^2.
    feet_height: float = 1.0  # Weight of exp(-100 e) for the squared error e of the foot heights, m^2.
    feet_contact: float = 0.25  # Weight of the number of feet whose contact matches the phase of the gait.
    alive: float = 1.0  # Reward for every step.
    lin_vel_z: float = -1.0  # Weight of the squared vertical velocity of the pelvis, (m/s)^2.
    ang_vel_xy: float = -0.05  # Weight of the squared roll and pitch rates of the pelvis, (rad/s)^2.
    flat_orientation: float = -2.0  # Weight of the squared sine of the pelvis's tilt.
    base_height: float = -10.0  # Weight of the squared distance of the pelvis from its default height, m^2.
    posture: float = -1.0  # Weight of the weighted sum of squared distances from the default joint angles, rad^2.
    stand_still: float = -0.5  # Weight of the squared distances from the default joint angles, rad^2, at zero commands.
    joint_limits: float = -2.0  # Weight of the sum of angles beyond 95% of the joint ranges, rad.
    joint_torque: float = -1e-5  # Weight of the sum of squared joint torques, (N m)^2.
    joint_vel: float = -5e-4  # Weight of the sum of squared joint velocities, (rad/s)^2.
    action_rate: float = -0.01  # Weight of the sum of squared changes of the action from one control step to the next.
    feet_slip: float = -0.25  # Weight of the squared horizontal speed of the feet that touch the ground, (m/s)^2.
    termination: float = -2.0  # Reward for a fall.


@dataclass(frozen=True)
class G1Velocity(VelocityTask):
    """A command is the velocity of the pelvis forward and to the left, and its yaw rate. A phase sets the gait."""

    initial_command_scale: Fraction = 0.5
    stride_seconds: Positive = 0.8
    """Period of the gait (one step of each foot), s; above 0."""
    min_upright: Cosine = 0.6
    """Minimum cosine of the pelvis's tilt, -1 to 1. Below it the episode ends."""
    min_height: float = 0.45
    """Minimum height of the pelvis, m. Below it the episode ends."""
    rewards: G1Rewards = G1Rewards()

    legged = G1
    num_actions = 29
    num_reset_samples, num_step_samples = num_samples(num_actions)

    def constants(self) -> dict[str, tuple[float, ...]]:
        model = self.model()
        # The first joint is free.
        names = [model.joint(i).name for i in range(1, model.njnt)]
        low, high = (0.95 * model.jnt_range[1:]).T.tolist()
        weights = (next((weight for part, weight in _POSTURE.items() if part in name), 0.5) for name in names)
        return super().constants() | {
            "posture_weight": tuple(weights),
            "min_joint_pos": tuple(low),
            "max_joint_pos": tuple(high),
        }

    def state_spec(self) -> dict[str, int]:
        # Phase of the left foot, 0 to 1; it swings in the first half.
        return super().state_spec() | {"phase": 1}

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        reset = super().reset(state, uniform)
        # Reuse the sample of the yaw: on flat ground the yaw has no effect on the gait.
        return reset._replace(task_state=reset.task_state | {"phase": uniform[:, :1]})

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        phase = state.task_state["phase"] + self.step_seconds / self.stride_seconds
        return super().update_state(state, uniform) | {"phase": phase - phase.floor()}

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        angle = 2.0 * math.pi * state.task_state["phase"]
        gait_phase = self.is_moving(state).unsqueeze(1) * torch.cat((torch.sin(angle), torch.cos(angle)), dim=1)
        groups = super().observe(state)
        return {
            "policy": torch.cat((groups["policy"], gait_phase), dim=1),
            "critic": torch.cat((groups["critic"], gait_phase, self._feet_height(state)), dim=1),
        }

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        groups, phase = super().observation_parts(model), f"Phase of a gait of {self.stride_seconds:g} s per stride."
        phase = f"{phase} Both are zero if the norm of the command is at most 0.1."
        gait = ObservationPart("gait_phase", 2, labels=("sin", "cos"), description=phase)
        feet = ObservationPart("feet_height", 2, "m", labels=self.legged.feet)
        return {"policy": (*groups["policy"], gait), "critic": (*groups["critic"], gait, feet)}

    def terminated(self, state: EnvState) -> Tensor:
        fallen = state.sensor("upvector")[:, 2] < self.min_upright
        contact = state.sensor("torso_contact")[:, 0] + state.sensor("pelvis_contact")[:, 0] > 0.0
        return fallen | contact | (state.qpos[:, 2] < self.min_height)

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        joint_pos, constants, target = state.qpos[:, 7:], state.constants, self._target_feet_height(state)
        joint_error = (joint_pos - constants["default_joint_pos"]).square()
        low, high = constants["min_joint_pos"], constants["max_joint_pos"]
        beyond_limits = (joint_pos - high).relu() + (low - joint_pos).relu()
        terms = self.shared_terms(state) | {
            "feet_height": torch.exp(-100.0 * (self._feet_height(state) - target).square().sum(1)),
            "feet_contact": (self.feet_contact(state) == (target <= 0.0)).float().sum(1),
            "alive": torch.ones_like(target[:, 0]),
            "base_height": (state.qpos[:, 2] - constants["default_height"][:, 0]).square(),
            "posture": (constants["posture_weight"] * joint_error).sum(1),
            "stand_still": (1.0 - self.is_moving(state)) * joint_error.sum(1),
            "joint_limits": beyond_limits.sum(1),
        }
        return self.weighted(terms, self.rewards, G1Rewards.__match_args__, terminated)

    def _feet_height(self, state: EnvState) -> Tensor:
        """Return the height of each foot, m, [env, 2]."""
        return torch.cat([state.sensor(f"{foot}_position")[:, 2:] for foot in self.legged.feet], dim=1)

    def _target_feet_height(self, state: EnvState) -> Tensor:
        """Return the height of each foot in the gait, m, [env, 2]; zero in stance."""
        angle = 2.0 * math.pi * state.task_state["phase"]
        wave = torch.cat((torch.sin(angle), -torch.sin(angle)), dim=1)
        return _SWING_HEIGHT * wave.relu() * self.is_moving(state).unsqueeze(1)

    def metrics(self, state: EnvState) -> dict[str, Tensor]:
        return super().metrics(state) | {"command_range": state.task_state["command_scale"][:, 0]}


ENTRY = TaskEntry(
    G1Velocity,
    summary="a humanoid like the Unitree G1 follows a commanded velocity over flat ground",
    training=TrainingSettings(
        hidden_layers=(512, 256, 128),
        overrides={"rl_games": {"entropy_coef": 0.0}, "skrl": {"entropy_loss_scale": 0.0}},
    ),
    max_iterations=1500,
    cpu_envs=512,
)
