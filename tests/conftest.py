"""Fixtures that several test modules use."""

import os
from collections.abc import Iterator
from pathlib import Path

# Both are read when torch is imported, here and in the processes that tests start. Tests share few cores: one thread
# for each process, and the threads of an update that uses more do not spin while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
from rich.console import Console

from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import train

# Files with the longest tests. They start first, so that no worker waits for another one's last file.
_LONGEST = (
    "learners/test_contract.py",
    "launch/test_slurm_cluster.py",
    "launch/test_torchrunx.py",
    "distributed/test_two_nodes.py",
    "launch/test_ssh_engine.py",
    "distributed/test_faults.py",
    "launch/test_local_engine.py",
    "distributed/test_continue.py",
    "learners/test_resume_settings.py",
    "learners/skrl/test_jax_learner.py",
    "launch/test_workflow_fuzz.py",
    "sim/test_parity.py",
    "launch/test_local.py",
    "env/test_gymnasium_env.py",
    "process/test_nohup.py",
    "cli/test_cli.py",
    "test_wheel.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / name: index for index, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session", autouse=True)
def jax_compiles_once(pytestconfig: pytest.Config) -> Iterator[None]:
    """Share JAX's compilation cache between all processes of the tests, and with later test runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(pytestconfig.rootpath / ".pytest_cache" / "jax"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of cartpole with two iterations. Tests must not write to it."""
    path = tmp_path_factory.mktemp("tiny") / "run"
    ppo = {"horizon": 8, "epochs": 2, "minibatches": 2, "hidden": (16, 16)}
    config = TrainConfig(task="cartpole", env={}, num_envs=8, max_iterations=2, settings=ppo, logger=("none",))
    train(config, RunDir(path), Console(quiet=True))
    return path
