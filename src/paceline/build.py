"""From a run's configuration to its env and learner."""

from paceline.config import TrainConfig, from_dict
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.tasks import registry


def build(config: TrainConfig, rank: Rank, num_envs: int | None = None) -> tuple[RobotEnv, Ppo]:
    """The env and the learner of a run, with fresh weights; `num_envs` replaces the run's own."""
    entry = registry.find(config.task)
    worlds = num_envs or config.num_envs
    task = from_dict(entry.task, config.env, f"options of task {config.task}")
    env = RobotEnv(task, worlds, config.engine, rank.device, config.seed, first_world=rank.index * worlds)
    return env, Ppo(env, config.ppo, config.seed)
