"""From a run's configuration, or from a trained run, to its env and learner."""

import dataclasses
from collections.abc import Callable
from typing import Any

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


def fit(load: Callable[[dict[str, Any]], None], state: dict[str, Any], source: str) -> None:
    """Load a checkpoint's state; one of other networks, or another task's, is an error that says so."""
    try:
        load(state)
    except (KeyError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"checkpoint {source} does not fit this run's task and settings: {why}") from None


def trained(run: str, seed: int = 0) -> tuple[RobotEnv, Ppo, RunDir]:
    """A run's policy in one world, on the CPU whatever it was trained on; `run` as for `RunDir.open`."""
    opened = RunDir.open(run)
    config = dataclasses.replace(opened.config(), engine="mujoco", gpu_ids=(), seed=seed)
    config.check()
    file = checkpoint.chosen(run, opened.checkpoints)
    saved = checkpoint.load(file)["learner"]
    env, learner = build(config, this_rank(()), num_envs=1)
    fit(learner.load_policy, saved, str(file))
    return env, learner, opened
