"""Evaluation of policies: episodes, confidence intervals, the command, and evaluation during training."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.cli.evaluate import eval as eval_command
from paceline.cli.evaluate import table_of
from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.evaluate import evaluate
from paceline.learners.networks import Policy
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks.cartpole import Cartpole
from paceline.train import train
from paceline.training.evaluation import ENDED_EARLY, Estimate, Evaluation, estimate, run_episodes
from tests.states import flat

CONFIG = TrainConfig(
    task="cartpole",
    env={},
    num_envs=12,
    max_iterations=4,
    seed=5,
    checkpoint_every=4,
    settings={"horizon": 8, "epochs": 2, "minibatches": 2, "hidden": (16,)},
    eval_every=2,
    eval_episodes=6,
)
QUIET = Console(quiet=True)


class Still(torch.nn.Module):
    """A network whose actions are zero."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(inputs), 1)


def test_every_env_contributes_the_same_number_of_complete_episodes() -> None:
    env = RobotEnv(Cartpole(), 5, seed=3)
    values = run_episodes(env, Policy(Still()), per_env=3)
    # The same episodes, by a loop that keeps everything.
    other = RobotEnv(Cartpole(), 5, seed=3)
    other.reset()
    expected = [list[float]() for _ in range(5)]
    for _ in range(3 * other.max_episode_steps):
        step = other.step(torch.zeros(5, 1))
        for index in (step.terminated | step.truncated).nonzero().flatten().tolist():
            expected[index].append(float(step.log[index, 1]))
    assert values["return"].tolist() == [expected[env][episode] for episode in range(3) for env in range(5)]
    assert len(values[ENDED_EARLY]) == 15
    assert (values[ENDED_EARLY] == (values["length"] < env.max_episode_steps)).all()


class StatesShorterLimit:
    """An env that does not truncate its episodes at the limit that it states."""

    max_episode_steps = 5

    def __init__(self, env: RobotEnv):
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def test_an_episode_that_does_not_end_is_an_error() -> None:
    env: Any = StatesShorterLimit(RobotEnv(Cartpole(), 2, seed=3))
    with pytest.raises(UserError, match="an episode did not end within max_episode_steps, 5, the time limit"):
        run_episodes(env, Policy(Still()))


def test_intervals_contain_the_true_mean_in_95_percent_of_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(4000, 12, generator=generator)
    for samples, mean in ((uniform, 0.5), ((uniform < 0.8).float(), 0.8)):
        found = [estimate(row) for row in samples]
        covered = sum(each.low <= mean <= each.high for each in found) / len(found)
        # Wilson's interval of a fraction of 12 cannot be exact.
        assert 0.93 < covered < 0.985
    # Known values: a fraction of 10 in 10, and the t-distribution with 4 degrees of freedom.
    assert estimate(torch.ones(10)).low == pytest.approx(0.7225, abs=1e-3)
    assert all(estimate(torch.zeros(count)).low == 0.0 for count in range(2, 20))
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert estimate(values).high - 3.0 == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=0.01)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("trained") / "run")
    train(CONFIG, run, QUIET)
    return run


def test_evaluations_during_training_do_not_change_it(trained: RunDir, tmp_path: Path) -> None:
    plain = RunDir(tmp_path / "run")
    train(replace(CONFIG, eval_every=0), plain, QUIET)
    one, other = (checkpoint.load(checkpoint.newest(run.checkpoints))["learner"] for run in (trained, plain))
    expected = flat(other)
    assert flat(one).keys() == expected.keys()
    for name, value in flat(one).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name])), name
    assert not plain.evaluations.exists()


def test_evaluations_during_training_are_written_and_logged(trained: RunDir) -> None:
    files = sorted(trained.evaluations.iterdir())
    assert [file.name for file in files] == [f"iteration_0000000{n}_mujoco_seed_1000008.json" for n in (2, 4)]
    found = json.loads(files[1].read_text())
    assert (found["episodes"], found["iteration"], found["randomized"]) == (6, 4, None)
    events = EventAccumulator(str(trained.tensorboard)).Reload()
    logged = {event.step: event.value for event in events.Scalars("eval/return")}
    assert logged == pytest.approx(
        {2: json.loads(files[0].read_text())["nominal"]["return"]["mean"], 4: found["nominal"]["return"]["mean"]}
    )


def test_the_command_evaluates_the_newest_checkpoint(trained: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(trained.path), "--episodes", "6", "--json"]
    assert eval_command(argv, QUIET) == 0
    found = json.loads(capsys.readouterr().out)
    # The policy, the envs and the seed are those of the last evaluation during training.
    during = json.loads((trained.evaluations / "iteration_00000004_mujoco_seed_1000008.json").read_text())
    assert found["nominal"] == during["nominal"]
    assert found["checkpoint"] == str(trained.checkpoints / "iteration_00000004.safetensors")


def test_a_task_with_randomization_is_evaluated_with_and_without_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    settings = {"horizon": 4, "epochs": 1, "minibatches": 1, "hidden": (8,)}
    train(
        TrainConfig(
            task="go1-velocity",
            env={"episode_seconds": 0.2},
            num_envs=2,
            max_iterations=1,
            seed=1,
            settings=settings,
            logger=("none",),
        ),
        run,
        QUIET,
    )
    evaluation, file = evaluate(str(run.path), 4)
    assert evaluation.nominal is not None
    assert evaluation.randomized is not None
    assert evaluation.nominal.keys() == evaluation.randomized.keys()
    assert evaluation.nominal["return"] != evaluation.randomized["return"]
    assert "measure/velocity_error" in json.loads(file.read_text())["nominal"]


def test_the_table_of_the_command_fits_into_80_columns() -> None:
    values = {"return": (-123.456, 7.0), "measure/success": (0.0324, 0.01), "length": (12345.6, 10.0)}
    estimates = {name: Estimate(mean, mean - half, mean + half) for name, (mean, half) in values.items()}
    facts: dict[str, Any] = {"task": "reach", "iteration": 7, "engine": "mujoco", "device_name": "", "seed": 1}
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table_of(Evaluation(**facts, episodes=4, nominal=estimates, randomized=estimates)))
    heading, *rows = (line.rstrip() for line in captured.get().splitlines())
    assert heading.split()[-2:] == ["nominal", "randomized"]
    assert " ".join(rows[0].split()) == "return -123 (-130 to -116) -123 (-130 to -116)"
    assert " ".join(rows[1].split()) == "success 0.0324 (0.0224 to 0.0424) 0.0324 (0.0224 to 0.0424)"
    assert rows[2].startswith("episode length, steps ")
    assert rows[2].endswith("  12,346 (12,336 to 12,356)")
    assert len(rows) == 3


def test_curricula_are_at_their_end_in_all_evaluations(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    config = replace(CONFIG, num_envs=2, max_iterations=1, checkpoint_every=1, eval_every=1, eval_episodes=2)
    env = {"episode_seconds": 0.1, "initial_command_scale": 0.3}
    train(replace(config, task="g1-velocity", env=env, logger=("none",)), run, QUIET)
    (during,) = (json.loads(file.read_text()) for file in run.evaluations.iterdir())
    after, _ = evaluate(str(run.path), 2, seed=9)
    assert during["randomized"]["measure/command_range"]["mean"] == 1.0
    assert after.nominal is not None
    assert after.nominal["measure/command_range"].mean == 1.0


def test_a_policy_of_one_engine_is_evaluated_on_the_other(trained: RunDir) -> None:
    own, _ = evaluate(str(trained.path), 6, engine="mujoco")
    other, file = evaluate(str(trained.path), 6, engine="warp")
    assert (own.engine, other.engine, file.name) == ("mujoco", "warp", "iteration_00000004_warp_seed_1000008.json")
    assert own.nominal is not None
    assert other.nominal is not None
    # The initial states are the same; the engines differ by rounding.
    assert other.nominal["return"].mean == pytest.approx(own.nominal["return"].mean, rel=0.05)
    again, _ = evaluate(str(trained.path), 6, seed=7)
    assert again.nominal != own.nominal


def test_a_gpu_without_mujoco_warp_is_not_used(trained: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.device.gpus.gpu_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    assert evaluate(str(trained.path), 6)[0].device_name == "the CPU"


def test_bad_options_of_the_command_are_refused(trained: RunDir) -> None:
    with pytest.raises(UserError, match="--episodes 1 must be at least 2"):
        eval_command([str(trained.path), "--episodes", "1"], QUIET)
