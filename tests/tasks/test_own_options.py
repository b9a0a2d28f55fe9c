"""A task of another package may have options of any kind that run.yaml can hold."""

import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.cli import train_arguments as arguments
from paceline.env.robot_env import RobotEnv
from paceline.run import checkpoint
from paceline.run.directory import RunDir
from paceline.train import train
from paceline.training import build
from tests.distributed.faults import install

TASK = """from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.env.training_settings import TrainingSettings
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.registry import TaskEntry


@dataclass(frozen=True)
class Weights:
    alive: float = 1.0
    angles: tuple[float, float] = (0.0, 1.0)


class Limits(NamedTuple):
    low: float
    high: tuple[float, float]


@dataclass(frozen=True)
class Optional(Cartpole):
    robot: str = "no_file"
    ranges: tuple[tuple[float, float], ...] = ((0.0, 1.0), (2.0, 3.0))
    gains: dict[str, tuple[float, ...]] | None = field(default_factory=lambda: {"hip": (1.0, 2.0)})
    maybe: tuple[tuple[int, ...], ...] | None = ((1, 2), (3,))
    weights: Weights = Weights()
    limits: Limits = Limits(0.0, (3.0, 4.0))

    def __post_init__(self):
        super().__post_init__()
        # Hashable, as options of a frozen dataclass should be.
        hash((self.ranges, self.maybe, self.weights, self.limits))


ENTRY = TaskEntry(Optional, summary="has options", training=TrainingSettings(horizon=8, hidden_layers=(8,)), cpu_envs=4)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(install(tmp_path / "site", TASK))
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    return tmp_path / "run"


def trained(argv: list[str]) -> dict[str, Any]:
    command = arguments.parse(argv)
    run = command.run or RunDir(command.arguments.run_dir)
    newest = checkpoint.newest(run.checkpoints) if command.run else None
    return train(command.config, run, Console(quiet=True), newest)


def test_a_run_with_nested_options_is_trained_resumed_and_opened(run: Path):
    own = ["--env.ranges", "0", "1", "4", "5", "--env.weights.alive", "2", "--env.robot", "anymal"]
    new = ["train", "faulty", "--gpu-ids", "none", "--max-iterations", "1", "--run-dir", str(run), *own]
    assert trained(new[1:])["iterations"] == 1
    assert trained(["--resume", str(run), "--max-iterations", "2"])["iterations"] == 2
    opened = build.playable(str(run))
    assert isinstance(opened.env, RobotEnv)
    options: Any = opened.env.task
    assert (options.ranges, options.robot) == (((0.0, 1.0), (4.0, 5.0)), "anymal")
    assert (options.maybe, options.gains) == (((1, 2), (3,)), {"hip": (1.0, 2.0)})
    assert (options.weights.alive, options.weights.angles, options.limits.high) == (2.0, (0.0, 1.0), (3.0, 4.0))
    assert RunDir(opened.folder).config() == arguments.parse(["--resume", str(run), "--max-iterations", "2"]).config
