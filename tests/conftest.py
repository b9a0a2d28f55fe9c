"""Fixtures that several test modules use."""

import os
from collections.abc import Iterator
from pathlib import Path

# One thread for this process and those it starts: tests share few cores. It is set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from rich.console import Console

from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import train


@pytest.fixture(scope="session", autouse=True)
def jax_compiles_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share JAX's compilation cache between all processes of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp().parent / "jax"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of cartpole with two iterations. Tests must not write to it."""
    path = tmp_path_factory.mktemp("tiny") / "run"
    ppo = {"horizon": 8, "epochs": 2, "minibatches": 2, "hidden": (16, 16)}
    config = TrainConfig(task="cartpole", env={}, num_envs=8, max_iterations=2, settings=ppo, logger="none")
    train(config, RunDir(path), Console(quiet=True))
    return path
