"""A learner names the number of a task that became non-finite first."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState
from paceline.env.vec_env import VecEnv
from paceline.learners.learner import LEARNERS, Learner
from paceline.learners.ppo.settings import PpoSettings
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.learners.skrl.settings import SkrlSettings
from paceline.tasks.registry import EnvEntry, find
from tests.env.drift import Drift

SETTINGS: dict[str, Any] = {
    "ppo": PpoSettings(horizon=12, epochs=1, minibatches=2, hidden=(8,)),
    "rsl_rl": RslRlSettings(num_steps_per_env=12, num_learning_epochs=1, num_mini_batches=2, hidden_dims=(8,)),
    "rl_games": RlGamesSettings(horizon_length=12, mini_epochs=1, units=(8,)),
    "skrl": SkrlSettings(rollouts=12, learning_epochs=1, mini_batches=2, layers=(8,)),
    "skrl_jax": SkrlSettings(rollouts=12, learning_epochs=1, mini_batches=2, layers=(8,)),
}
ENVS, FIRST = 4, 10


def place(state: EnvState, step: int, row: int) -> Tensor:
    """One env in one step of its episodes, bool [env]."""
    return (state.episode_step == step) & (torch.arange(len(state.qpos)) == row)


@dataclass(frozen=True)
class Broken(Drift):
    """Gives numbers that are not finite at these steps of an episode and in these rows; the limit is 10 steps."""

    reward_at: tuple[tuple[int, int], ...] = ()
    nan_at: tuple[tuple[int, int], ...] = ()
    critic_at: tuple[tuple[int, int], ...] = ()
    critic_at_the_wall: bool = False

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        obs = super().observe(state)
        policy, critic = obs["policy"].clone(), obs["critic"].repeat(1, 2)
        for each in self.nan_at:
            policy[:, 1] = policy[:, 1].masked_fill(place(state, *each), -torch.inf)
        for each in self.critic_at:
            critic[:, 1] = critic[:, 1].masked_fill(place(state, *each), torch.nan)
        if self.critic_at_the_wall:
            critic = critic.masked_fill(self.terminated(state).unsqueeze(1), torch.nan)
        return {"policy": policy, "critic": critic}

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        terms = super().reward(state, terminated)
        for each in self.reward_at:
            terms["crash"] = terms["crash"].masked_fill(place(state, *each), torch.nan)
        return terms

    def metrics(self, state: EnvState) -> dict[str, Tensor]:
        """Return a metric, which learning does not use."""
        return {"undefined": torch.full_like(state.qpos[:, 0], torch.nan)}


def make(name: str, env: VecEnv) -> Learner:
    return LEARNERS[name].make(env, SETTINGS[name], 0, Group(Rank()))


CASES: dict[str, tuple[Broken, str | None]] = {
    "nothing": (Broken(), None),
    "a reward": (Broken(reward_at=((3, 2),)), "reward term 'crash' of env 12 became nan in step 3 of the rollout"),
    "a reward in the last step": (
        Broken(reward_at=((12, 3),), episode_seconds=10.0),
        "reward term 'crash' of env 13 became nan in step 12 of the rollout",
    ),
    "an observation in the last step": (
        Broken(critic_at=((12, 3),), episode_seconds=10.0),
        'obs["critic"][:, 1] of env 13 became nan in step 12 of the rollout',
    ),
    "an observation": (
        Broken(nan_at=((4, 1),)),
        'obs["policy"][:, 1] of env 11 became -inf in step 4 of the rollout',
    ),
    "a critic's": (Broken(critic_at=((4, 1),)), 'obs["critic"][:, 1] of env 11 became nan in step 4 of the rollout'),
    "an observation before the first step": (
        Broken(critic_at=((0, 3),)),
        'obs["critic"][:, 1] of env 13 became nan before step 1 of the rollout',
    ),
    "the last observation of an episode": (
        Broken(critic_at=((10, 2),)),
        'final_obs["critic"][:, 1] of env 12 became nan in step 10 of the rollout',
    ),
    "the last observation of an episode that terminated, which nobody uses": (
        Broken(critic_at_the_wall=True, wall=0.0),
        None,
    ),
    "the earliest step": (
        Broken(reward_at=((5, 0), (3, 2), (4, 1))),
        "reward term 'crash' of env 12 became nan in step 3 of the rollout",
    ),
    "an observation, then a reward": (
        Broken(reward_at=((5, 0),), critic_at=((4, 1),)),
        'obs["critic"][:, 1] of env 11 became nan in step 4 of the rollout',
    ),
    "the reward of a step before its observation": (
        Broken(reward_at=((4, 2),), critic_at=((4, 1),)),
        "reward term 'crash' of env 12 became nan in step 4 of the rollout",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["ppo", "rsl_rl"])
def test_the_first_place_is_named(name: str, case: str):
    task, expected = CASES[case]
    learner = make(name, RobotEnv(task, ENVS, first_env=FIRST))
    learner.learn()
    assert learner.first_non_finite() == expected


@pytest.mark.parametrize("case", ["nothing", "a reward", "an observation"])
@pytest.mark.parametrize("name", ["rl_games", "skrl", "skrl_jax"])
def test_every_learner_names_it(name: str, case: str):
    task, expected = CASES[case]
    learner = make(name, RobotEnv(task, ENVS, first_env=FIRST))
    learner.learn()
    assert learner.first_non_finite() == expected


@pytest.mark.parametrize("name", ["ppo", "rsl_rl"])
def test_a_later_iteration_counts_its_own_steps(name: str):
    learner = make(name, RobotEnv(Broken(reward_at=((8, 2),), episode_seconds=10.0), ENVS, first_env=FIRST))
    state = learner.state()
    state["envs"]["episode_step"] -= 12
    learner.load_state(state)
    learner.learn()
    assert learner.first_non_finite() is None
    learner.learn()
    assert learner.first_non_finite() == "reward term 'crash' of env 12 became nan in step 8 of the rollout"


@pytest.mark.parametrize("name", ["ppo", "rsl_rl"])
def test_an_env_without_reward_terms_names_the_reward(name: str):
    entry = find("gymnasium:tests.env.counting:Counting-v0")
    assert isinstance(entry, EnvEntry)
    placed = {"num_envs": ENVS, "device": torch.device("cpu"), "seed": 0, "first_env": FIRST}
    env = entry.make(entry.task(options=("bonus=.nan",)), **placed)
    learner = make(name, env)
    learner.learn()
    assert learner.first_non_finite() == "the reward of env 10 became nan in step 1 of the rollout"
