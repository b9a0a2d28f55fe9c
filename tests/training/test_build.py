"""A modified checkpoint is opened as play, export and resume do."""

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.errors import UserError
from paceline.export import export
from paceline.run import checkpoint
from paceline.run.directory import RunDir
from paceline.train import train
from paceline.training.build import playable

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


def changed(run: Path, change: Change) -> Path:
    """Return the newest checkpoint of the run after `change`."""
    state = checkpoint.load(checkpoint.newest(run / "checkpoints"))
    change(state)
    return checkpoint.save(run / "checkpoints", 2, state, 3, best=False)


def resume(run: Path, file: Path) -> dict[str, Any]:
    config = dataclasses.replace(RunDir(run).config(), max_iterations=3)
    return train(config, RunDir(run), Console(quiet=True), file)


def assert_one_line(error: UserError, file: Path) -> None:
    assert str(error).startswith(f"checkpoint {file} does not fit this run's task and settings: ")
    assert len(str(error).splitlines()) == 1


UNLOADABLE: dict[str, Change] = {
    "no learner": lambda state: state.pop("learner"),
    "a number for the learner": lambda state: state.update(learner=5),
    "a tensor for the learner": lambda state: state.update(learner=torch.zeros(3)),
    "no networks": lambda state: state["learner"].pop("networks"),
    "a word for the networks": lambda state: state["learner"].update(networks="gone"),
    "a number for a weight": lambda state: state["learner"]["networks"].update({"log_std": 5}),
    "a weight of another shape": lambda state: state["learner"]["networks"].update({"log_std": torch.zeros(2)}),
    "a weight to be broadcast": lambda state: state["learner"]["networks"].update({"log_std": torch.tensor(0.0)}),
    "whole numbers for weights": lambda state: state["learner"]["networks"].update(
        {"log_std": torch.zeros(1, dtype=torch.int64)}
    ),
    "a weight that is no number": lambda state: state["learner"]["networks"]["log_std"].fill_(math.nan),
    "another network's weight": lambda state: state["learner"]["networks"].update({"actor.9.weight": torch.zeros(1)}),
    "statistics to be broadcast": lambda state: state["learner"]["normalizers"]["policy"].update(
        {"mean": torch.zeros(1)}
    ),
    "statistics that are infinite": lambda state: state["learner"]["normalizers"]["policy"]["mean"].fill_(math.inf),
    "no iteration": lambda state: state["learner"].pop("iteration"),
    "a negative iteration": lambda state: state["learner"].update(iteration=-1),
    "half an iteration": lambda state: state["learner"].update(iteration=1.5),
    "true for the iteration": lambda state: state["learner"].update(iteration=True),
    "a word for the iteration": lambda state: state["learner"].update(iteration="two"),
    "a tensor for the iteration": lambda state: state["learner"].update(iteration=torch.tensor(2)),
}


@pytest.mark.parametrize("case", UNLOADABLE)
def test_a_state_that_cannot_be_loaded_is_refused_by_play_and_resume(case: str, run: Path):
    file = changed(run, UNLOADABLE[case])
    with pytest.raises(UserError) as caught:
        playable(str(run))
    assert_one_line(caught.value, file)
    with pytest.raises(UserError) as caught:
        resume(run, file)
    assert_one_line(caught.value, file)


NOT_RESUMABLE: dict[str, Change] = {
    "no totals": lambda state: state.pop("totals"),
    "a list of totals": lambda state: state.update(totals=[1]),
    "seconds that are no number": lambda state: state["totals"].update(seconds=math.nan),
    "negative seconds": lambda state: state["totals"].update(seconds=-1.0),
    "a best return that is no number": lambda state: state["totals"].update(best_return=math.nan),
    "negative steps": lambda state: state["totals"].update(env_steps=-1),
    "a word for the steps": lambda state: state["totals"].update(env_steps="many"),
    "a tensor for the steps": lambda state: state["totals"].update(env_steps=torch.tensor(1)),
    "no episodes": lambda state: state.pop("episodes"),
    "strings for episodes": lambda state: state["episodes"].update(sums=["a"]),
    "episodes without a number": lambda state: state["episodes"].update(sums=[{"return": 1.0}]),
    "no ended episodes": lambda state: state["episodes"].update(sums=[{"episodes": 0.0}]),
    "a word for a return": lambda state: state["episodes"].update(sums=[{"episodes": 1.0, "return": "high"}]),
    "no envs": lambda state: state["learner"].pop("envs"),
    "a number for the actions of the envs": lambda state: state["learner"]["envs"].update(action=5),
    "too few envs": lambda state: state["learner"]["envs"].update(action=torch.zeros(1, 1)),
    "actions of another width": lambda state: state["learner"]["envs"].update(action=torch.zeros(8, 3)),
    "no number of envs": lambda state: state.pop("num_envs"),
    "too many envs": lambda state: state.update(num_envs=2**40),
    "an optimizer of another size": lambda state: state["learner"]["adam"].update(exp_avg=torch.zeros(3)),
    "an optimizer that is no number": lambda state: state["learner"]["adam"]["exp_avg"].fill_(math.nan),
    "a word for the count of steps": lambda state: state["learner"].update(steps="many"),
}


@pytest.mark.parametrize("case", NOT_RESUMABLE)
def test_a_state_that_cannot_be_continued_is_refused_by_resume(case: str, run: Path):
    file = changed(run, NOT_RESUMABLE[case])
    with pytest.raises(UserError) as caught:
        resume(run, file)
    assert_one_line(caught.value, file)


def test_a_valid_checkpoint_is_resumed_also_if_it_has_the_sums_of_other_rewards(run: Path):
    sums = {"episodes": 4.0, "length": 9.0, "return": 1.0}
    file = changed(run, lambda state: (state["episodes"].update(sums=[sums]), state["totals"].update(more=[1])))
    result = resume(run, file)
    assert result["iterations"] == 3
    assert result["mean_return"] is not None


def test_a_policy_whose_actions_overflow_is_not_exported(run: Path, tmp_path: Path):
    def enlarge(state: dict[str, Any]) -> None:
        for tensor in state["learner"]["networks"].values():
            tensor.fill_(3e38)

    changed(run, enlarge)
    with pytest.raises(UserError, match="gives actions that are not finite"):
        export(str(run), "torchscript", tmp_path / "policy.pt")
    assert not (tmp_path / "policy.pt").exists()
