"""k ranks compute what one rank computes: the same rollouts and the same update."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.distributed.sharding import concatenate, shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo.recurrent import make_ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.cartpole_camera import CartpoleCamera
from paceline.tasks.reach_camera import ReachCamera
from tests.cameras.small import SMALL_CAMERA, SMALL_CAMERA_OF_ARM, SMALL_ENCODER
from tests.distributed.ranks import on_ranks

CONFIG = PpoSettings(horizon=16, epochs=2, minibatches=4, hidden=(16, 16), **SMALL_ENCODER)
ITERATIONS, SEED = 4, 5
TASKS = {
    "vectors": Cartpole(episode_seconds=0.4),
    "recurrent": Cartpole(episode_seconds=0.4),
    "images": CartpoleCamera(episode_seconds=0.4, camera=SMALL_CAMERA),
    "image targets": ReachCamera(episode_seconds=0.4, camera=SMALL_CAMERA_OF_ARM),
}


def config_of(task: str) -> PpoSettings:
    recurrent: dict[str, Any] = {"rnn_type": "lstm", "rnn_hidden_size": 8} if task == "recurrent" else {}
    return replace(CONFIG, image_training="targets" if task == "image targets" else "policy", **recurrent)


def learn(envs: list[range], rank: Rank, task: str) -> dict[str, Any]:
    """Return all that should not depend on how the envs are distributed, after each of some iterations."""
    torch.set_num_threads(1)
    group = Group(rank)
    own = envs[rank.index]
    env = RobotEnv(TASKS[task], len(own), seed=SEED, first_env=own.start)
    learner = make_ppo(env, config_of(task), SEED, group)
    history = []
    for _ in range(ITERATIONS):
        before = group.collectives
        values = learner.learn()
        history.append(
            {
                "values": {name: value for name, value in values.items() if not name.startswith("seconds/")},
                "parameters": learner.state()["networks"],
                "gradient": learner.flat_parameters.gradient.clone(),
                "moments": learner.adam.state()["exp_avg"],
                "learning_rate": learner.adam.learning_rate.clone(),
                "normalizers": {name: each.state() for name, each in learner.normalizers.items()},
                "advantage": learner.samples.advantage.unflatten(0, (CONFIG.horizon, len(own))).clone(),
                "envs": learner.state()["envs"],
                "collectives": group.collectives - before,
            }
        )
    group.close()
    return {"history": history}


def learn_as_rank(envs: list[range], task: str) -> dict[str, Any]:
    return learn(envs, this_rank(()), task)


DISTRIBUTIONS = {
    "2 ranks": shard_ranges(12, 2),
    "3 ranks": shard_ranges(12, 3),
    "unequal ranks": [range(3), range(3, 4), range(4, 12)],
}


@pytest.fixture(scope="module", params=TASKS)
def task(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def single_rank(task: str) -> dict[str, Any]:
    return learn(shard_ranges(12, 1), Rank(), task)


@cache
def learn_on_ranks(distribution: str, task: str) -> list[dict[str, Any]]:
    envs = DISTRIBUTIONS[distribution]
    return on_ranks(len(envs), learn_as_rank, envs, task)


@pytest.fixture(params=DISTRIBUTIONS, ids=list(DISTRIBUTIONS))
def ranks(request: pytest.FixtureRequest, task: str) -> list[dict[str, Any]]:
    return learn_on_ranks(request.param, task)


def test_ranks_compute_what_one_rank_computes_with_all_envs(single_rank: dict[str, Any], ranks: list[dict[str, Any]]):
    for i, expected in enumerate(single_rank["history"]):
        found = [rank["history"][i] for rank in ranks]
        for name in ("parameters", "gradient", "moments", "learning_rate", "normalizers"):
            torch.testing.assert_close(
                found[0][name], expected[name], rtol=2e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        for name, value in expected["values"].items():
            assert found[0]["values"][name] == pytest.approx(value, rel=2e-3, abs=1e-4), name
        advantages = torch.cat([part["advantage"] for part in found], dim=1)
        torch.testing.assert_close(advantages, expected["advantage"], rtol=2e-3, atol=2e-4)
        envs = concatenate([part["envs"] for part in found])
        for name, tensor in expected["envs"].items():
            torch.testing.assert_close(envs[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_all_ranks_stay_bit_equal(ranks: list[dict[str, Any]]):
    for states in zip(*(rank["history"] for rank in ranks), strict=True):
        for name in ("parameters", "moments", "learning_rate", "normalizers"):
            for state in states:
                torch.testing.assert_close(state[name], states[0][name], rtol=0, atol=0)
        assert all(state["values"] == states[0]["values"] for state in states)


def test_there_is_one_collective_per_minibatch_and_one_before_them(task: str, ranks: list[dict[str, Any]]):
    # The regression has a minibatch for each step of the horizon.
    regression = CONFIG.horizon if task == "image targets" else 0
    expected = CONFIG.epochs * CONFIG.minibatches + 1 + regression
    for rank in ranks:
        assert [state["collectives"] for state in rank["history"]] == [expected] * ITERATIONS


def test_the_same_seed_and_ranks_give_a_bit_equal_run(task: str):
    first, second = learn_on_ranks("2 ranks", task), on_ranks(2, learn_as_rank, DISTRIBUTIONS["2 ranks"], task)
    for one, other in zip(first[0]["history"], second[0]["history"], strict=True):
        torch.testing.assert_close(one["parameters"], other["parameters"], rtol=0, atol=0)
        assert one["values"] == other["values"]
