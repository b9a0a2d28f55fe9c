"""A humanoid runs towards a target."""

from dataclasses import dataclass, field

from paceline.env.training_settings import TrainingSettings
from paceline.robots.gymnasium_robots import HUMANOID
from paceline.tasks.locomotion.locomotion_task import LocomotionRewards, LocomotionTask
from paceline.tasks.registry import TaskEntry
from paceline.validation import Positive


def _rewards() -> LocomotionRewards:
    return LocomotionRewards(alive=2.0, action=-0.01, termination=-1.0)


@dataclass(frozen=True)
class Humanoid(LocomotionTask):
    """Gymnasium's humanoid, which has no ankles, with the joint ranges, springs, armatures and torques of
    Isaac-Humanoid-Direct-v0."""

    min_height: Positive = 0.8
    joint_vel_scale: Positive = 0.1
    ang_vel_scale: Positive = 0.25
    rewards: LocomotionRewards = field(default_factory=_rewards)

    robot = HUMANOID
    num_actions = len(HUMANOID.joints)
    num_reset_samples = 2 * num_actions


ENTRY = TaskEntry(
    Humanoid,
    summary="a humanoid runs towards a target",
    # Values reach a thousand: clipped to changes of 0.2, the critic would not learn.
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
