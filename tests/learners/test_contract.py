"""What every learner owes, alone and on two ranks: real processes, real libraries."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.vec_env import Step, VecEnv
from paceline.export import export
from paceline.learners.learner import LEARNERS, Learner
from paceline.run.config import TrainConfig
from paceline.run.metrics import EpisodeMeans
from paceline.tasks.cartpole import ENTRY
from paceline.training.build import build, playable
from tests.distributed.faults import install, left_behind, start
from tests.distributed.ranks import on_ranks

WORLDS, SEED = 256, 3
LONG_ENOUGH = 0.95 * 300
METRICS = {"loss/surrogate", "loss/value", "loss/entropy", "policy/kl", "policy/learning_rate", "policy/std"}
SECONDS = 240.0


def make(learner: str, group: Group) -> tuple[VecEnv, Learner]:
    settings = asdict(LEARNERS[learner].settings.from_training(ENTRY.training))
    config = TrainConfig("cartpole", {}, learner, settings, num_envs=WORLDS, seed=SEED)
    return build(config, group, shard_ranges(WORLDS, group.size)[group.rank.index])


def live(name: str) -> dict[str, Any]:
    """One rank's life with a learner, and what the tests want to know of it."""
    torch.set_num_threads(1)
    group = Group(this_rank(()))
    env, learner = make(name, group)
    handed_out = keep_steps(env)
    first = learner.learn()
    untouched = all(torch.equal(given, copy) for given, copy in handed_out)
    env.step = type(env).step.__get__(env)
    seeds = torch.initial_seed()

    means, iterations = EpisodeMeans(), 1
    while means.means().get("length", 0.0) < LONG_ENOUGH and iterations < ENTRY.max_iterations:
        values = learner.learn()
        means.add({key: values[key] for key in ("episodes", *env.log_names)})
        iterations += 1

    saved = learner.state()
    kept = common(saved)
    after = [learner.learn() for _ in range(2)]
    _, heir = make(name, group)
    heir.load_state(saved)
    restored = common(heir.state())
    resumed_at = heir.iteration
    again = [heir.learn() for _ in range(2)]
    found = {
        "untouched": untouched and len(handed_out) > 0,
        "seed": seeds,
        "first": first,
        "length": means.means()["length"],
        "iterations": iterations,
        "common": kept,
        "restored": restored,
        "resumed_at": resumed_at,
        "after": after,
        "again": again,
        "ends": [digest(learner.state()), digest(heir.state())],
        "actions": learner.policy()({"policy": torch.linspace(-1.0, 1.0, 28).view(7, 4)}),
        "non_finite": learner.first_non_finite(),
    }
    group.close()
    return found


def keep_steps(env: VecEnv) -> list[tuple[Tensor, Tensor]]:
    """From now on, every tensor that the env hands out, with a copy of it as it was."""
    kept: list[tuple[Tensor, Tensor]] = []
    step: Callable[[Tensor], Step] = env.step

    def step_and_keep(actions: Tensor) -> Step:
        result = step(actions)
        given = (*result.obs.values(), *result.final_obs.values(), result.reward, result.terminated, result.truncated)
        kept.extend((tensor, tensor.clone()) for tensor in given)
        return result

    env.step = step_and_keep
    return kept


def common(state: dict[str, Any]) -> dict[str, Any]:
    """What should be the same on all ranks."""
    return flat({key: part for key, part in state.items() if key != "envs"})


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in state.items():
        leaves |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def digest(state: dict[str, Any]) -> str:
    """Short, and the same only for the same bits."""
    sha = hashlib.sha256()
    for key, value in sorted(flat(state).items()):
        sha.update(key.encode())
        sha.update(value.cpu().contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return sha.hexdigest()


def reduced(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith("seconds/")}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key]
        for key, value in one.items()
    )


@pytest.fixture(scope="module", params=[(name, ranks) for name in LEARNERS for ranks in (1, 2)], ids=str)
def lives(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    name, ranks = request.param
    return on_ranks(ranks, live, name, seconds=SECONDS)


def test_cartpole_is_learnt(lives: list[dict[str, Any]]):
    assert lives[0]["length"] >= LONG_ENOUGH, f"after {lives[0]['iterations']} iterations"


def test_all_ranks_hold_the_same_networks_normalisers_optimiser_and_rate(lives: list[dict[str, Any]]):
    assert len(lives[0]["common"]) > 10
    for life in lives[1:]:
        assert same(life["common"], lives[0]["common"])
        assert torch.equal(life["actions"], lives[0]["actions"])


def test_metrics_are_those_of_all_ranks_under_the_same_names(lives: list[dict[str, Any]]):
    for values in (lives[0]["first"], *lives[0]["after"]):
        assert set(values) >= METRICS | {"episodes", "length", "return", "failures", "overflows"}
        assert set(values) >= {"seconds/collect", "seconds/update"}
    for life in lives[1:]:
        assert [reduced(values) for values in life["after"]] == [reduced(values) for values in lives[0]["after"]]


def test_resume_goes_on_with_all_that_there_was(lives: list[dict[str, Any]]):
    for life in lives:
        assert life["resumed_at"] == life["iterations"]
        assert same(life["restored"], life["common"])
        assert [reduced(values) for values in life["again"]] == [reduced(values) for values in life["after"]]
        assert life["ends"][0] == life["ends"][1]


def test_what_the_env_hands_out_is_not_written_to(lives: list[dict[str, Any]]):
    assert all(life["untouched"] for life in lives)


def test_each_rank_draws_numbers_of_its_own(lives: list[dict[str, Any]]):
    """The native one has no generator: its numbers are functions of the world, which is on one rank alone."""
    assert all(life["non_finite"] is None for life in lives)
    if "steps" not in lives[0]["common"]:
        assert len({life["seed"] for life in lives}) == len(lives)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("learner", LEARNERS)
def test_two_ranks_train_are_exported_resume_and_end_together(learner: str, site: Path, tmp_path: Path):
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "paceline"]
    words = ["--learner", learner, "--gpu-ids", "none", "--num-envs", "6", "--run-dir", str(run)]
    command = [*launcher, "train", "--task=faulty", "--headless", "--distributed", *words, "--max-iterations", "2"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    result = json.loads((run / "result.json").read_text())
    assert (result["learner"], result["world_size"], result["total_envs"]) == (learner, 2, 12)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= METRICS | {"seconds/update/max", "episode/return"}

    on_ranks(1, check_export, run, site)

    # Rank 1 fails in the third iteration after the resume.
    words = ["train", "--resume", str(run), "--ranks", "2", "--max-iterations", "40"]
    process = start(tmp_path, site, *words, FAULT=f"raise:1:20:{tmp_path / 'fault'}")
    printed, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "from iteration 2" in printed
    assert "ArithmeticError: the wheel came off" in errors.strip().splitlines()[-1]
    assert "rank 1 on" in errors
    assert left_behind(str(run)) == {}
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["iterations"]) == ("failed", 4)


def check_export(run: Path, site: Path) -> None:
    """Check that an exported policy acts as the learner does."""
    sys.path.insert(0, str(site))
    loaded = playable(str(run))
    obs = loaded.env.reset()
    exported = torch.jit.load(export(str(run), "torchscript", run.parent / "policy.pt"))
    torch.testing.assert_close(exported(obs["policy"]), loaded.policy(obs))
