"""Directory and start of a run whose directory the user names."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.distributed.launch_record import LaunchRecord, merged
from paceline.errors import UserError
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import RunCompletedError, train
from paceline.training.build import resolve
from paceline.training.plan import make_plan

CONFIG, _ = resolve(
    TrainConfig(
        task="cartpole",
        env={},
        num_envs=4,
        max_iterations=3,
        checkpoint_every=1,
        settings={"horizon": 4, "epochs": 1, "minibatches": 1, "hidden": (8,)},
        logger=("none",),
    )
)
SINGLE_PROCESS = LaunchRecord()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A completed run."""
    directory = RunDir(tmp_path / "run")
    train(CONFIG, directory, Console(quiet=True))
    return directory


def set_result(run: RunDir, **changes: Any) -> None:
    run.write_result(**(run.result() | changes))


def test_a_completed_run_is_not_changed(run: RunDir):
    before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    with pytest.raises(RunCompletedError, match="nothing to do"):
        train(CONFIG, run, Console(quiet=True))
    assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before


def test_a_run_that_did_not_complete_continues_in_the_directory_that_the_user_names(run: RunDir):
    (run.checkpoints / "iteration_00000003.safetensors").unlink()
    set_result(run, status="running")
    result = train(CONFIG, run, Console(quiet=True))
    assert (result["status"], result["iterations"], result["restarts"]) == ("completed", 3, 1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 4}, "seed 0, now 4"),
        ({"settings": CONFIG.settings | {"epochs": 2}}, "ppo.epochs 1, now 2"),
        ({"env": {"decimation": 3}}, "env.decimation 2, now 3"),
    ],
)
def test_another_configuration_in_the_directory_is_refused_by_name(run: RunDir, changes: dict[str, Any], named: str):
    set_result(run, status="failed")
    with pytest.raises(UserError, match=rf"other settings \({named}\).*--resume {run.path}"):
        train(dataclasses.replace(CONFIG, **changes), run, Console(quiet=True))


def test_the_gpus_and_the_logs_of_a_host_are_no_other_configuration(run: RunDir):
    set_result(run, status="failed")
    config = dataclasses.replace(CONFIG, gpu_ids=(3,), worker_log_dir="elsewhere")
    assert make_plan(config, run, None, SINGLE_PROCESS).checkpoint == checkpoint.newest(run.checkpoints)


def test_the_named_checkpoint_is_used_on_the_first_attempt_of_a_launch(run: RunDir):
    named = checkpoint.listing(run.checkpoints)[0]
    launch = LaunchRecord("123", agents=("here 1",))
    set_result(run, status="failed", **dataclasses.asdict(LaunchRecord("123", agents=("here 2",))))
    assert make_plan(CONFIG, run, named, launch).checkpoint == named
    # After a restart the run is this launch's own, and the named checkpoint is older than what has been trained since.
    set_result(run, **dataclasses.asdict(launch))
    assert make_plan(CONFIG, run, named, launch).checkpoint == checkpoint.newest(run.checkpoints)


def test_one_agent_that_stays_is_enough_to_continue(run: RunDir):
    set_result(run, status="running", **dataclasses.asdict(LaunchRecord("job", agents=("node1 1", "node2 1"))))
    stays, joins = LaunchRecord("job", agents=("node1 1",)), LaunchRecord("job", agents=("node2 9",))
    assert not make_plan(dataclasses.replace(CONFIG, seed=8), run, None, merged([joins, stays])).is_new
    with pytest.raises(UserError, match="other settings"):
        make_plan(dataclasses.replace(CONFIG, seed=8), run, None, joins)


@pytest.mark.parametrize("result", ["[1]", "{}", '{"agents": 3, "job": [1], "requeues": "x"}', "nothing"])
def test_a_damaged_result_does_not_prevent_continuing(run: RunDir, result: str):
    run.result_file.write_text(result)
    launch = LaunchRecord("a", ("agent",), "slurm 7", 2)
    assert make_plan(CONFIG, run, None, launch).checkpoint == checkpoint.newest(run.checkpoints)


def test_logs_of_a_run_that_never_started_do_not_prevent_a_new_run(tmp_path: Path):
    directory = RunDir(tmp_path)
    (tmp_path / "workers").mkdir()
    (tmp_path / "error.log").write_text("Traceback")
    assert make_plan(CONFIG, directory, None, SINGLE_PROCESS).is_new
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        make_plan(CONFIG, directory, None, SINGLE_PROCESS)


def test_names_that_launchers_choose_differ():
    assert RunDir.new(None, "cartpole", unique=True).path != RunDir.new(None, "cartpole", unique=True).path
