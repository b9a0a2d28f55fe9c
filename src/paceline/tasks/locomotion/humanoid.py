"""A humanoid runs towards a target."""

from dataclasses import dataclass

from paceline.env.training_settings import TrainingSettings
from paceline.robots.gymnasium_robots import HUMANOID
from paceline.tasks.locomotion.locomotion_task import Running
from paceline.tasks.registry import TaskEntry


@dataclass(frozen=True)
class Humanoid(Running):
    """Gymnasium's humanoid, which has no ankles, with the joint ranges, springs, armatures and torques of
    Isaac-Humanoid-Direct-v0."""

    fall_height: float = 0.8
    fall_reward: float = -1.0
    alive_reward: float = 2.0
    action_cost: float = 0.01
    joint_speed_scale: float = 0.1
    turn_scale: float = 0.25

    robot = HUMANOID


ENTRY = TaskEntry(
    Humanoid,
    summary="a humanoid runs towards a target",
    # Values reach a thousand, of which a clip of 0.2 would leave nothing to learn in an iteration.
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
