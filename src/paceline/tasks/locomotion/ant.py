"""A four-legged ant runs towards a target."""

from dataclasses import dataclass, field

from paceline.env.training_settings import TrainingSettings
from paceline.robots.gymnasium_robots import ANT
from paceline.tasks.locomotion.locomotion_task import LocomotionRewards, LocomotionTask
from paceline.tasks.registry import TaskEntry
from paceline.validation import Positive


def _rewards() -> LocomotionRewards:
    return LocomotionRewards(alive=0.5, action=-0.005, termination=-2.0)


@dataclass(frozen=True)
class Ant(LocomotionTask):
    """Gymnasium's ant with the joint ranges, armatures and torques of Isaac-Ant-Direct-v0."""

    min_height: Positive = 0.31
    joint_vel_scale: Positive = 0.2
    ang_vel_scale: Positive = 1.0
    rewards: LocomotionRewards = field(default_factory=_rewards)

    robot = ANT
    num_actions = len(ANT.joints)
    num_reset_samples = 2 * num_actions


ENTRY = TaskEntry(
    Ant,
    summary="a four-legged ant runs towards a target",
    # Values reach a thousand: clipped to changes of 0.2, the critic would not learn.
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
