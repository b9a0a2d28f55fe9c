"""Evaluate the policy of a run while it is trained, over all ranks."""

from collections.abc import Callable
from dataclasses import replace

import torch

from paceline.distributed.group import Group
from paceline.env.vec_env import VecEnv
from paceline.learners.networks import Policy
from paceline.run.config import TrainConfig
from paceline.training.build import engine_of, is_randomized, make_env
from paceline.training.evaluation import ENDED_EARLY, SEED_OFFSET, Evaluation, estimate, run_episodes
from paceline.training.ranks import describe_device


class PeriodicEvaluation:
    """Envs for evaluation beside those of the training, from which they take no random numbers. Every evaluation has
    the same initial states and commands."""

    def __init__(self, config: TrainConfig, group: Group, wrap: Callable[[VecEnv], VecEnv]):
        """`wrap` is applied to the env."""
        self._config, self._group = replace(config, seed=config.seed + SEED_OFFSET), group
        rank = group.rank
        number = -(-config.eval_episodes // rank.world_size)
        env = make_env(self._config, rank, range(rank.index * number, (rank.index + 1) * number), for_evaluation=True)
        self._is_randomized = is_randomized(env)
        self._start = {name: tensor.clone() for name, tensor in env.state().items()}
        self._env = wrap(env)

    def evaluate(self, policy: Policy, iteration: int) -> Evaluation:
        """Return the estimates over the episodes of all ranks, on every rank."""
        self._env.load_state(self._start)
        shards = self._group.all_gather(run_episodes(self._env, policy))
        values = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
        estimates = {name: estimate(of_name) for name, of_name in values.items()}
        return Evaluation(
            task=self._config.task,
            iteration=iteration,
            engine=engine_of(self._config, self._group.rank.device),
            device_name=describe_device(self._group.rank.device),
            seed=self._config.seed,
            episodes=len(values[ENDED_EARLY]),
            nominal=None if self._is_randomized else estimates,
            randomized=estimates if self._is_randomized else None,
        )
