"""k ranks equal one learner: the same envs and the same update."""

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.distributed.sharding import concatenate, shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole import Cartpole
from tests.distributed.ranks import on_ranks

CONFIG = PpoSettings(horizon=16, epochs=2, minibatches=4, hidden=(16, 16))
ITERATIONS, SEED = 4, 5


def learn(worlds: list[range], rank: Rank) -> dict[str, Any]:
    """Return everything that must not depend on the number of ranks, after each of some iterations."""
    torch.set_num_threads(1)
    group = Group(rank)
    own = worlds[rank.index]
    env = RobotEnv(Cartpole(episode_seconds=0.4), len(own), seed=SEED, first_env=own.start)
    learner = Ppo(env, CONFIG, SEED, group)
    history, advantages, finish = [], [], learner._finish

    def finish_and_keep(samples: Tensor, head: Tensor) -> None:
        finish(samples, head)
        advantages.append(samples[:, -4].view(CONFIG.horizon, len(own)).clone())

    learner._finish = finish_and_keep
    for _ in range(ITERATIONS):
        before = group.collectives
        values = learner.learn()
        history.append(
            {
                "values": {name: value for name, value in values.items() if not name.startswith("seconds/")},
                "parameters": learner._flat.values.detach().clone(),
                "gradient": learner._flat.gradient.clone(),
                "moments": learner._adam.state()["exp_avg"],
                "learning_rate": learner._adam.learning_rate.clone(),
                "mean": learner.normalizers["policy"].mean.clone(),
                "variance": learner.normalizers["policy"].variance.clone(),
                "count": learner.normalizers["policy"].count.clone(),
                "advantage": advantages[-1],
                "envs": learner.state()["envs"],
                "collectives": group.collectives - before,
            }
        )
    group.close()
    return {"history": history}


def learn_as_rank(worlds: list[range]) -> dict[str, Any]:
    return learn(worlds, this_rank(()))


SPREADS = {
    "2 ranks": shard_ranges(12, 2),
    "3 ranks": shard_ranges(12, 3),
    "unequal ranks": [range(3), range(3, 4), range(4, 12)],
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return learn(shard_ranges(12, 1), Rank())


@pytest.fixture(scope="module", params=SPREADS, ids=list(SPREADS))
def spread(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    worlds = SPREADS[request.param]
    return on_ranks(len(worlds), learn_as_rank, worlds)


def test_ranks_together_do_what_one_rank_does_with_all_worlds(alone: dict[str, Any], spread: list[dict[str, Any]]):
    for i, expected in enumerate(alone["history"]):
        found = [rank["history"][i] for rank in spread]
        for name in ("parameters", "gradient", "moments", "learning_rate", "mean", "variance", "count"):
            torch.testing.assert_close(
                found[0][name], expected[name], rtol=2e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        for name, value in expected["values"].items():
            assert found[0]["values"][name] == pytest.approx(value, rel=2e-3, abs=1e-4), name
        advantages = torch.cat([part["advantage"] for part in found], dim=1)
        torch.testing.assert_close(advantages, expected["advantage"], rtol=2e-3, atol=2e-4)
        worlds = concatenate([part["envs"] for part in found])
        for name, tensor in expected["envs"].items():
            torch.testing.assert_close(worlds[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_all_ranks_stay_the_same_to_the_last_bit(spread: list[dict[str, Any]]):
    for states in zip(*(rank["history"] for rank in spread), strict=True):
        for name in ("parameters", "moments", "learning_rate", "mean", "variance", "count"):
            assert all(torch.equal(state[name], states[0][name]) for state in states), name
        assert all(state["values"] == states[0]["values"] for state in states)


def test_there_is_one_collective_per_minibatch_and_one_before_them(spread: list[dict[str, Any]]):
    for rank in spread:
        assert [state["collectives"] for state in rank["history"]] == [
            CONFIG.epochs * CONFIG.minibatches + 1
        ] * ITERATIONS


def test_the_same_seed_and_ranks_give_the_same_run_to_the_last_bit():
    first, second = (on_ranks(2, learn_as_rank, SPREADS["2 ranks"]) for _ in range(2))
    for one, other in zip(first[0]["history"], second[0]["history"], strict=True):
        assert torch.equal(one["parameters"], other["parameters"])
        assert one["values"] == other["values"]
