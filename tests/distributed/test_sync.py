"""Ranks that update with their own samples and average their parameters (`--sync`)."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from paceline.cli.train_arguments import parse
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.learners.learner import LEARNERS
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.parameter_averaging import OUTER_STEP, Averaging
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import train
from paceline.training.build import resolve
from tests.distributed.ranks import on_ranks
from tests.distributed.test_equivalence import TASKS, config_of

ENVS = [range(3), range(3, 12)]
SHARES = torch.tensor((0.25, 0.75))
MODES: dict[str, dict[str, Any]] = {
    "every-iteration": {"sync": "every-iteration"},
    "periodic": {"sync": "periodic", "sync_every": 2},
}


def make_learner(envs: range, task: str, group: Group, averaging: Averaging | None) -> Ppo:
    env = RobotEnv(TASKS[task], len(envs), seed=5, first_env=envs.start)
    return Ppo(env, config_of(task), 5, group, averaging)


def shared(learner: Ppo) -> dict[str, Any]:
    """Return what is the same on all ranks after a sync. It does not synchronize."""
    return {
        "parameters": learner.flat_parameters.values.detach().clone(),
        "adam": learner.adam.state(),
        "normalizers": {name: each.state() for name, each in learner.normalizers.items()},
        "policy": learner.policy().state_dict(),
    }


def learn(averaging: Averaging, iterations: int, ends_periods: bool = False) -> list[dict[str, Any]]:
    """Return for each iteration what a rank has before and after `state`, which synchronizes, and what it has sampled.
    Without `ends_periods`, `state` is called only after the last iteration."""
    group = Group(this_rank(()))
    learner = make_learner(ENVS[group.rank.index], "vectors", group, averaging)
    history = []
    for index in range(iterations):
        collectives = group.collectives
        values = learner.learn()
        found = {
            "own": shared(learner),
            "collectives": group.collectives - collectives,
            "values": values,
            "observations": learner.rollout.obs["policy"][:-1].flatten(0, 1).clone(),
            "ended": int(learner.rollout.done.sum()),
        }
        if ends_periods or index == iterations - 1:
            learner.state()
            found["synced"] = shared(learner)
        history.append(found)
    group.close()
    return history


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    """Three iterations of two ranks in periods of two. `state` ends the second period early."""
    return on_ranks(2, learn, Averaging(2, *OUTER_STEP), 3)


@pytest.mark.parametrize("task", ["vectors", "image targets"])
def test_one_rank_that_averages_every_iteration_is_bit_equal_to_the_exact_update(task: str):
    torch.set_num_threads(1)
    learners = [make_learner(range(2), task, Group(Rank()), averaging) for averaging in (None, Averaging())]
    for _ in range(2):
        exact, local = ({**learner.learn(), "seconds/collect": 0, "seconds/update": 0} for learner in learners)
        assert local == exact
    exact, local = (learner.state() for learner in learners)
    local.pop("averaging")
    torch.testing.assert_close(local, exact, rtol=0, atol=0)


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), OUTER_STEP])
def test_a_sync_averages_by_shares_of_samples_and_steps_as_sgd(rate: float, momentum: float):
    ranks = on_ranks(2, learn, Averaging(9, rate, momentum), 2, True)

    def average(index: int, get: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        return torch.tensordot(SHARES, torch.stack([get(rank[index]["own"]) for rank in ranks]), dims=1)

    parameters = make_learner(range(12), "vectors", Group(Rank()), None).flat_parameters.values.detach().clone()
    optimizer = torch.optim.SGD([parameters], lr=rate, momentum=momentum, nesterov=momentum > 0.0)
    for index in range(2):
        first, second = (rank[index] for rank in ranks)
        assert not torch.equal(first["own"]["parameters"], second["own"]["parameters"])
        torch.testing.assert_close(second["synced"], first["synced"], rtol=0, atol=0)
        parameters.grad = parameters - average(index, lambda own: own["parameters"])
        optimizer.step()
        torch.testing.assert_close(first["synced"]["parameters"], parameters)
        for name in ("exp_avg", "exp_avg_sq", "learning_rate"):
            expected = average(index, lambda own, name=name: own["adam"][name])
            torch.testing.assert_close(first["synced"]["adam"][name], expected)


def test_ranks_communicate_only_in_a_sync(ranks: list[list[dict[str, Any]]]):
    for rank in ranks:
        # A sync has two sums at once, one of float32 and one of float64.
        assert [iteration["collectives"] for iteration in rank] == [0, 2, 0]


def test_normalizers_include_the_observations_of_all_ranks(ranks: list[list[dict[str, Any]]]):
    seen = torch.cat([iteration["observations"] for rank in ranks for iteration in rank]).double()
    for rank in ranks:
        found = rank[-1]["synced"]["normalizers"]["policy"]
        assert found["count"] == len(seen)
        torch.testing.assert_close(found["mean"].double(), seen.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["variance"].double(), seen.var(0, correction=0), rtol=1e-4, atol=1e-5)


def test_between_syncs_the_policy_is_that_of_the_latest_sync(ranks: list[list[dict[str, Any]]]):
    for rank in ranks:
        torch.testing.assert_close(rank[2]["own"]["policy"], ranks[0][1]["own"]["policy"], rtol=0, atol=0)
        assert not torch.equal(rank[2]["own"]["parameters"], rank[1]["own"]["parameters"])


def test_a_sync_reports_the_episodes_of_all_ranks_since_the_latest_one(ranks: list[list[dict[str, Any]]]):
    ended = [sum(rank[index]["ended"] for rank in ranks) for index in range(3)]
    assert min(ended[:2]) > 0
    for rank in ranks:
        assert [iteration["values"]["episodes"] for iteration in rank] == [0, ended[0] + ended[1], 0]


# Runs

RUN = TrainConfig(
    task="cartpole",
    env={"episode_seconds": 0.4},
    total_envs=10,
    seed=3,
    max_iterations=6,
    checkpoint_every=3,
    logger=("none",),
    settings={"horizon": 8, "epochs": 2, "minibatches": 2, "hidden": (16,)},
)


def run_once(path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Train, or continue the run in the directory."""
    run = RunDir(path)
    resume_from = checkpoint.newest(run.checkpoints) if run.checkpoints.exists() else None
    return train(dataclasses.replace(RUN, **changes), run, Console(quiet=True), resume_from)


def learned(path: Path) -> dict[str, Any]:
    content = checkpoint.load(checkpoint.newest(RunDir(path).checkpoints))
    del content["totals"]["seconds"], content["settings"]
    return content


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_bit_equal_and_continues_on_other_ranks(mode: str, tmp_path: Path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    on_ranks(2, run_once, whole, MODES[mode])
    # Evaluations do not change the training either.
    on_ranks(2, run_once, resumed, MODES[mode] | {"max_iterations": 3, "eval_every": 1, "eval_episodes": 2})
    on_ranks(2, run_once, resumed, MODES[mode])
    torch.testing.assert_close(learned(resumed), learned(whole), rtol=0, atol=0)
    results = on_ranks(3, run_once, resumed, MODES[mode] | {"max_iterations": 9})
    assert [result["num_envs"] for result in results] == [4, 3, 3]
    result = run_once(resumed, MODES[mode] | {"max_iterations": 12})
    assert (result["iterations"], result["num_envs"], result["env_steps"]) == (12, 10, 12 * 8 * 10)


def test_a_run_continues_with_another_mode(tmp_path: Path):
    run_once(tmp_path / "run", MODES["periodic"] | {"max_iterations": 3})
    for iterations, mode in ((4, {}), (5, MODES["periodic"]), (6, MODES["every-iteration"])):
        assert run_once(tmp_path / "run", mode | {"max_iterations": iterations})["iterations"] == iterations


def test_resuming_with_another_mode_needs_no_other_flag(tmp_path: Path):
    run_once(tmp_path / "run", MODES["periodic"] | {"max_iterations": 1})
    config = parse(["--resume", str(tmp_path / "run"), "--sync", "every-iteration"]).config
    assert (config.sync, config.sync_every) == ("every-iteration", None)
    config = parse(["--resume", str(tmp_path / "run")]).config
    assert (config.sync, config.sync_every) == ("periodic", 2)


@pytest.mark.parametrize("learner", sorted(LEARNERS.keys() - {"ppo"}))
def test_other_learners_refuse_the_mode_by_name(learner: str):
    with pytest.raises(UserError, match=f"--sync every-iteration is not supported by learner {learner}: use"):
        resolve(TrainConfig("cartpole", {}, learner, sync="every-iteration"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "periodic"}, "--sync periodic needs --sync-every K"),
        ({"sync_every": 2}, "--sync-every 2 with --sync every-minibatch: it needs --sync periodic"),
        ({"sync": "periodic", "sync_every": 0}, "--sync-every"),
        ({"sync": "hourly"}, "--sync"),
    ],
)
def test_an_invalid_mode_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        resolve(TrainConfig("cartpole", {}, **options))


@pytest.mark.parametrize("mode", MODES)
def test_ranks_learn_cartpole_in_each_mode(mode: str, tmp_path: Path):
    changes = {"env": {}, "settings": {}, "total_envs": 64, "max_iterations": 24}
    result, _ = on_ranks(2, run_once, tmp_path / "run", MODES[mode] | changes)
    assert result["mean_return"] > 100.0
