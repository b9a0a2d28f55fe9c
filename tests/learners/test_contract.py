"""Contract of every learner, on one rank and on two, in real processes with the real libraries."""

import hashlib
import json
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
from paceline.distributed.rank import Rank, this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.env.training_settings import TrainingSettings
from paceline.env.vec_env import Step, VecEnv
from paceline.evaluate import evaluate
from paceline.export import export
from paceline.learners.learner import LEARNERS, Learner
from paceline.run.config import TrainConfig
from paceline.run.metrics import EpisodeMeans
from paceline.tasks.cartpole import ENTRY, Cartpole
from paceline.training.build import make_env, make_learner, playable
from tests.distributed.faults import install
from tests.distributed.ranks import on_ranks, paceline_on_ranks
from tests.states import flat

NUM_ENVS, SEED = 256, 3
LONG_ENOUGH = 0.95 * 300
METRICS = {"loss/surrogate", "loss/value", "loss/entropy", "policy/kl", "policy/learning_rate", "policy/std"}
SECONDS = 240.0


def make(learner: str, group: Group) -> tuple[VecEnv, Learner]:
    settings = asdict(LEARNERS[learner].settings.from_training(ENTRY.training))
    config = TrainConfig("cartpole", {}, learner, settings, num_envs=NUM_ENVS, seed=SEED)
    env = make_env(config, group.rank, shard_ranges(NUM_ENVS, group.size)[group.rank.index])
    return env, make_learner(config, env, group)


def run_rank(name: str) -> dict[str, Any]:
    """Train, save and resume on one rank; return what the tests compare. Only several ranks train until cartpole is
    learned."""
    torch.set_num_threads(1)
    group = Group(this_rank(()))
    env, learner = make(name, group)
    returned = record_steps(env)
    first = learner.learn()
    untouched = all(torch.equal(given, copy) for given, copy in returned)
    env.step = type(env).step.__get__(env)
    seeds = torch.initial_seed()

    means, iterations, limit = EpisodeMeans(), 1, ENTRY.max_iterations if group.size > 1 else 3
    while means.means().get("length", 0.0) < LONG_ENOUGH and iterations < limit:
        values = learner.learn()
        means.add({key: values[key] for key in ("episodes", *env.log_names)})
        iterations += 1

    saved = learner.state()
    recorded = common(saved)
    after = [learner.learn() for _ in range(2)]
    _, resumed = make(name, group)
    resumed.load_state(saved)
    restored = common(resumed.state())
    resumed_at = resumed.iteration
    again = [resumed.learn() for _ in range(2)]
    found = {
        "untouched": untouched and len(returned) > 0,
        "seed": seeds,
        "first": first,
        "length": means.means().get("length", 0.0),
        "iterations": iterations,
        "common": recorded,
        "restored": restored,
        "resumed_at": resumed_at,
        "after": after,
        "again": again,
        "ends": [digest(learner.state()), digest(resumed.state())],
        "actions": learner.policy()({"policy": torch.linspace(-1.0, 1.0, 28).view(7, 4)}),
        "non_finite": learner.first_non_finite(),
    }
    group.close()
    return found


def record_steps(env: VecEnv) -> list[tuple[Tensor, Tensor]]:
    """Record every tensor that the env returns from now on, with a copy."""
    recorded: list[tuple[Tensor, Tensor]] = []
    step: Callable[[Tensor], Step] = env.step

    def step_and_record(actions: Tensor) -> Step:
        result = step(actions)
        given = (*result.obs.values(), *result.final_obs.values(), result.reward, result.terminated, result.truncated)
        recorded.extend((tensor, tensor.clone()) for tensor in given)
        return result

    env.step = step_and_record
    return recorded


def common(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a state that must be equal on all ranks."""
    return flat({key: part for key, part in state.items() if key != "envs"})


def digest(state: dict[str, Any]) -> str:
    """Return a digest of all bits of a state."""
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


Results = dict[int, list[dict[str, Any]]]
"""Results of each rank, by the number of ranks of the run."""


@pytest.fixture(scope="module", params=LEARNERS)
def results(request: pytest.FixtureRequest) -> Results:
    return {ranks: on_ranks(ranks, run_rank, request.param, seconds=SECONDS) for ranks in (1, 2)}


def test_cartpole_is_learned(results: Results):
    assert results[2][0]["length"] >= LONG_ENOUGH, f"after {results[2][0]['iterations']} iterations"


def test_all_ranks_have_the_same_networks_normalizers_optimizer_and_learning_rate(results: Results):
    main, other = results[2]
    assert len(main["common"]) > 10
    assert same(other["common"], main["common"])
    assert torch.equal(other["actions"], main["actions"])


def test_metrics_are_those_of_all_ranks_under_the_same_names(results: Results):
    for main, *_ in results.values():
        for values in (main["first"], *main["after"]):
            assert set(values) >= METRICS | {"episodes", "length", "return", "failures", "overflows"}
            assert set(values) >= {"seconds/collect", "seconds/update"}
    main, other = results[2]
    assert [reduced(values) for values in other["after"]] == [reduced(values) for values in main["after"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_learner_continues_bit_by_bit(ranks: int, results: Results):
    for result in results[ranks]:
        assert result["resumed_at"] == result["iterations"]
        assert same(result["restored"], result["common"])
        assert [reduced(values) for values in result["again"]] == [reduced(values) for values in result["after"]]
        assert result["ends"][0] == result["ends"][1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_of_the_env_are_not_modified(ranks: int, results: Results):
    assert all(result["untouched"] for result in results[ranks])


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_numbers_stay_finite(ranks: int, results: Results):
    assert all(result["non_finite"] is None for result in results[ranks])


def test_each_rank_has_its_own_seed(results: Results):
    """The native PPO uses no generator: its random numbers are functions of the env."""
    main, other = results[2]
    if "steps" not in main["common"]:
        assert main["seed"] != other["seed"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("learner", LEARNERS)
def test_two_ranks_train_are_exported_resume_and_end_together(learner: str, site: Path, tmp_path: Path):
    run = tmp_path / "run"
    argv = ["train", "faulty", "--learner", learner, "--gpu-ids", "none", "--num-envs", "6", "--run-dir", str(run)]
    environment = {"PYTHONPATH": str(site)}
    rank = [*argv, "--max-iterations", "2", "--eval-every", "2", "--eval-episodes", "3"], environment
    for done in paceline_on_ranks(tmp_path, rank, rank):
        assert done.returncode == 0, done.stderr
    result = json.loads((run / "result.json").read_text())
    assert (result["learner"], result["world_size"], result["total_envs"]) == (learner, 2, 12)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= METRICS | {"seconds/update/max", "episode/return", "eval/return"}

    on_ranks(1, check_export, run, site)

    # Rank 1 fails in the third iteration after the resume.
    environment["FAULT"] = f"raise:1:20:{tmp_path / 'fault'}"
    rank = ["train", "--resume", str(run), "--max-iterations", "40"], environment
    main, other = paceline_on_ranks(tmp_path, rank, rank)
    assert (main.returncode, other.returncode) == (1, 1)
    assert "from iteration 2" in main.stdout
    assert "ArithmeticError: the wheel came off" in main.stderr.strip().splitlines()[-1]
    assert "rank 1 on" in main.stderr
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["iterations"]) == ("failed", 4)


def check_export(run: Path, site: Path) -> None:
    """Check that an exported policy acts as the learner does, and is evaluated as during training."""
    sys.path.insert(0, str(site))
    loaded = playable(str(run))
    obs = loaded.env.reset()
    exported = torch.jit.load(export(str(run), "torchscript", run.parent / "policy.pt"))
    torch.testing.assert_close(exported(obs["policy"]), loaded.policy(obs))
    evaluation, _ = evaluate(str(run), episodes=4)
    during = json.loads(next((run / "eval").glob("iteration_00000002_*")).read_text())
    assert (evaluation.episodes, during["episodes"]) == (4, 4)
    assert evaluation.nominal is not None
    assert evaluation.nominal["return"].mean == pytest.approx(during["nominal"]["return"]["mean"])


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_learner_starts_with_the_standard_deviation_of_the_task(learner: str):
    training = TrainingSettings(
        horizon=4, epochs=1, minibatches=1, hidden_layers=(8,), learning_rate=1e-9, desired_kl=0.0, initial_std=0.37
    )
    settings = LEARNERS[learner].settings.from_training(training)
    made = LEARNERS[learner].make(RobotEnv(Cartpole(), 4), settings, 3, Group(Rank()))
    assert made.learn()["policy/std"] == pytest.approx(0.37, rel=1e-4)
