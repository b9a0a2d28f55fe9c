"""Balance a pole on a cart that is pushed left and right."""

import math
from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from paceline.env.policy_interface import ActionMapping, ObservationPart, joint_names
from paceline.env.task import Decimation, EnvState, ResetState, Task
from paceline.env.training_settings import TrainingSettings
from paceline.robots.scene import load
from paceline.tasks.registry import TaskEntry
from paceline.validation import PhysicsRate, Positive, check_options


@dataclass(frozen=True)
class CartpoleRewards:
    """Weights of the reward terms, per control step."""

    alive: float = 1.0  # Reward for every step that does not end the episode.
    termination: float = -2.0  # Reward for the step that ends the episode before the time limit.
    pole_angle: float = -1.0  # Weight of the squared angle of the pole, rad^2.
    cart_vel: float = -0.01  # Weight of the speed of the cart, m/s.
    pole_vel: float = -0.005  # Weight of the angular speed of the pole, rad/s.


@dataclass(frozen=True)
class Cartpole(Task):
    """Rewards and limits of Isaac Lab's Isaac-Cartpole-Direct-v0. The angle of an upright pole is zero."""

    episode_seconds: Positive = 5.0
    decimation: Decimation = 2
    physics_hz: PhysicsRate = 120.0
    """Physics steps per second, 1 to 100000."""
    max_force: Positive = 100.0
    """Force on the cart at an action of 1, N; above 0. Actions are clamped to -1 to 1."""
    max_cart_pos: Positive = 3.0
    """Maximum distance of the cart from the center, m; above 0. Beyond it the episode ends."""
    initial_pole_angle: Positive = 0.25 * math.pi
    """Maximum angle of the pole at the start of an episode, rad; above 0."""
    max_pole_angle: Positive = 0.5 * math.pi
    """Maximum angle of the pole, rad; above 0. Beyond it the episode ends."""
    rewards: CartpoleRewards = CartpoleRewards()

    num_actions = 1
    num_reset_samples = 1

    def __post_init__(self) -> None:
        check_options(self)

    def scene(self) -> mujoco.MjSpec:
        """Return the model before it is compiled."""
        spec = load("cartpole")
        spec.option.timestep = 1.0 / self.physics_hz
        spec.actuators[0].gear[0] = self.max_force
        return spec

    def model(self) -> mujoco.MjModel:
        return self.scene().compile()

    def control(self, state: EnvState) -> Tensor:
        return state.action.clamp(-1.0, 1.0)

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {"policy": torch.cat((state.qpos, state.qvel), dim=1)}

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        joints = joint_names(model)
        pos = ObservationPart("joint_pos", 2, ("m", "rad"), labels=joints, description="Zero for an upright pole.")
        return {"policy": (pos, ObservationPart("joint_vel", 2, ("m/s", "rad/s"), labels=joints))}

    def action_mapping(self, model: mujoco.MjModel) -> ActionMapping:
        return ActionMapping(scale=(1.0,), offset=(0.0,), clip=(-1.0, 1.0))

    def terminated(self, state: EnvState) -> Tensor:
        cart_pos, pole_angle = state.qpos.abs().unbind(1)
        return (cart_pos > self.max_cart_pos) | (pole_angle > self.max_pole_angle)

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        weights, (cart_vel, pole_vel) = self.rewards, state.qvel.abs().unbind(1)
        return {
            "alive": weights.alive * (~terminated).float(),
            "termination": weights.termination * terminated.float(),
            "pole_angle": weights.pole_angle * state.qpos[:, 1].square(),
            "cart_vel": weights.cart_vel * cart_vel,
            "pole_vel": weights.pole_vel * pole_vel,
        }

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        pole_angle, zero = (uniform - 0.5) * (2.0 * self.initial_pole_angle), torch.zeros_like(uniform)
        return ResetState(torch.cat((zero, pole_angle), dim=1), zero.expand(-1, 2))


ENTRY = TaskEntry(
    Cartpole,
    summary="balance a pole on a cart that is pushed left and right",
    training=TrainingSettings(
        horizon=32,
        epochs=4,
        hidden_layers=(32, 32),
        entropy_weight=0.0,
        overrides={
            "rsl_rl": {"entropy_coef": 0.005, "num_learning_epochs": 5, "num_steps_per_env": 16},
            "rl_games": {
                "bounds_loss_coef": 1e-4,
                "critic_coef": 4.0,
                "horizon_length": 16,
                "kl_threshold": 0.008,
                "learning_rate": 5e-4,
                "mini_epochs": 8,
                "reward_scale": 0.1,
                "separate": True,
            },
            "skrl": {
                "kl_threshold": 0.008,
                "learning_epochs": 8,
                "learning_rate": 5e-4,
                "mini_batches": 8,
                "rewards_shaper_scale": 0.1,
            },
        },
    ),
    max_iterations=120,
)
