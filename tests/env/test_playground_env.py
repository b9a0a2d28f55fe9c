"""Envs of MuJoCo Playground train as `playground:NAME`; those of dm_control are refused with the reason."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.errors import UserError
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.tasks.playground import Playground
from paceline.train import train

# Packages that Playground imports warn of their own future.
pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS = {"options": ("episode_length=12",)}


def test_a_run_on_playground_resumes_exactly(tmp_path: Path):
    config = TrainConfig(
        task="playground:PendulumSwingup", env=OPTIONS, num_envs=4, max_iterations=3, logger=("none",), seed=3
    )
    whole = train(config, RunDir(tmp_path / "whole"), Console(quiet=True))
    run = RunDir(tmp_path / "parts")
    train(replace(config, max_iterations=1), run, Console(quiet=True))
    parts = train(config, run, Console(quiet=True), checkpoint.listing(run.checkpoints)[-1])
    assert whole["mean_return"] == parts["mean_return"]
    assert (whole["engine"], whole["mean_length"]) == ("playground", 12.0)


def test_an_unknown_env_of_playground_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="unknown env of MuJoCo Playground 'CartpoleBalanc': did you mean 'CartpoleBal"):
        registry.find("playground:CartpoleBalanc")


def test_without_playground_its_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)
    with pytest.raises(UserError, match=r"was not found; pip install 'paceline\[playground\]'"):
        registry.find("playground:CartpoleBalance")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("episode_length", "--env.options episode_length: give KEY=VALUE, for example episode_length=500"),
        ("=3", "--env.options =3: give KEY=VALUE"),
        ("impl=warp", "--env.options impl: leave it out, only the implementation jax is supported"),
    ],
)
def test_an_option_that_is_no_entry_of_the_configuration_is_refused(option: str, message: str):
    with pytest.raises(UserError, match=message):
        Playground((option,))


def test_dm_control_is_refused_with_the_reason():
    with pytest.raises(
        UserError, match=r"dm_control:walker-walk is not supported: .* MuJoCo 4 does not have; .*Playground"
    ):
        registry.find("dm_control:walker-walk")
