"""From a run's configuration, or from a trained run, to its env and learner."""

import dataclasses

from paceline import checkpoint
from paceline.config import TrainConfig, from_dict
from paceline.distributed.rank import Rank, this_rank
from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.learners.ppo import Ppo
from paceline.run_dir import RunDir
from paceline.tasks import registry


def build(config: TrainConfig, rank: Rank, num_envs: int | None = None) -> tuple[RobotEnv, Ppo]:
    """The env and the learner of a run, with fresh weights; `num_envs` replaces the run's own."""
    entry = registry.find(config.task)
    worlds = num_envs or config.num_envs
    task = from_dict(entry.task, config.env, f"options of task {config.task}")
    env = RobotEnv(task, worlds, config.engine, rank.device, config.seed, first_world=rank.index * worlds)
    return env, Ppo(env, config.ppo, config.seed)


def trained(run: str, seed: int = 0) -> tuple[RobotEnv, Ppo, TrainConfig]:
    """A run's policy in one world, on the CPU whatever it was trained on; `run` as for `RunDir.open`."""
    opened = RunDir.open(run)
    config = dataclasses.replace(opened.config(), engine="mujoco", gpu_ids=(), seed=seed)
    config.check()
    file = checkpoint.chosen(run, opened.checkpoints)
    saved = checkpoint.load(file)["learner"]
    env, learner = build(config, this_rank(()), num_envs=1)
    try:
        learner.load_policy(saved)
    except (KeyError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"checkpoint {file} does not fit the run's {opened.config_file.name}: {why}") from None
    return env, learner, config
