"""A four-legged ant runs towards a target."""

from dataclasses import dataclass

from paceline.robots.runners import Joint, Runner
from paceline.settings.ppo import PpoConfig
from paceline.settings.rl_games import RlGamesConfig
from paceline.settings.rsl_rl import RslRlConfig
from paceline.settings.skrl import SkrlConfig
from paceline.tasks.registry import TaskEntry
from paceline.tasks.running import Running


def _leg(number: int, side: int) -> dict[str, Joint]:
    """`side` is the ankle's sense of bending."""
    bent = sorted((side * 30.0, side * 100.0))
    return {
        f"hip_{number}": Joint(torque=7.5, range=(-40.0, 40.0), armature=0.01, damping=0.1),
        f"ankle_{number}": Joint(7.5, (bent[0], bent[1]), armature=0.01, damping=0.1, start=side * 45.0),
    }


ANT = Runner("ant", start_height=0.5, joints=_leg(1, 1) | _leg(2, -1) | _leg(3, -1) | _leg(4, 1))


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
    ppo=PpoConfig(
        horizon=16,
        epochs=4,
        minibatches=2,
        hidden=(256, 128, 64),
        learning_rate=3e-4,
        desired_kl=0.008,
        clip_value=False,
        entropy_weight=0.0,
    ),
    rsl_rl=RslRlConfig(
        num_steps_per_env=32,
        hidden_dims=(400, 200, 100),
        learning_rate=5e-4,
        use_clipped_value_loss=False,
        entropy_coef=0.0,
    ),
    rl_games=RlGamesConfig(
        horizon_length=16,
        minibatch_size_per_env=8,
        mini_epochs=4,
        learning_rate=3e-4,
        kl_threshold=0.008,
        bounds_loss_coef=1e-4,
        reward_scale=0.01,
    ),
    skrl=SkrlConfig(
        rollouts=16,
        learning_epochs=4,
        mini_batches=2,
        learning_rate=3e-4,
        kl_threshold=0.008,
        value_loss_scale=1.0,
        rewards_shaper_scale=0.01,
    ),
    max_iterations=500,
    cpu_envs=512,
)
