"""A four-legged ant runs towards a target."""

from dataclasses import dataclass

from paceline.env.training_settings import TrainingSettings
from paceline.robots.gymnasium_robots import ANT
from paceline.tasks.locomotion.locomotion_task import Running
from paceline.tasks.registry import TaskEntry


@dataclass(frozen=True)
class Ant(Running):
    """Gymnasium's ant with the joint ranges, armatures and torques of Isaac-Ant-Direct-v0."""

    fall_height: float = 0.31
    fall_reward: float = -2.0
    alive_reward: float = 0.5
    action_cost: float = 0.005
    joint_speed_scale: float = 0.2
    turn_scale: float = 1.0

    robot = ANT


ENTRY = TaskEntry(
    Ant,
    summary="a four-legged ant runs towards a target",
    # Values reach a thousand, of which a clip of 0.2 would leave nothing to learn in an iteration.
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
