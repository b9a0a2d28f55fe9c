"""Scaling experiments with real runs of cartpole on one and two CPU ranks."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.scale import scale
from paceline.errors import UserError
from paceline.experiments.grid import Grid
from paceline.experiments.scaling import run
from paceline.process.interrupts import EXIT_CODE
from tests.distributed.ranks import free_port
from tests.forked import paceline
from tests.signals import DEFAULT_SIGNALS
from tests.waiting import until

ITERATIONS = 300
SECONDS = 120.0
SMALL = ("cartpole", "--num-envs", "4", "--ppo.horizon", "4", "--ppo.epochs", "1", "--ppo.minibatches", "1")
SMALL += ("--ppo.hidden", "8", "--logger", "none", "--checkpoint-every", "10", "--gpu-ids", "none")
GRID = ("scale", "horizontal", *SMALL, "--max-iterations", str(ITERATIONS), "--ranks", "1", "2", "--jobs", "2")
CELLS = ("ranks_1_seed_0", "ranks_2_seed_0")


@dataclass(frozen=True)
class Sessions:
    """An experiment that was interrupted and then continued."""

    directory: Path
    interrupted: subprocess.CompletedProcess[str]
    results: dict[str, dict[str, Any]]
    """result.json of the runs after the interruption."""
    continued: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    folder = tmp_path_factory.mktemp("scaling")
    argv = [*GRID, "--run-dir", "grid"]
    process = subprocess.Popen(
        [*DEFAULT_SIGNALS, sys.executable, "-m", "paceline", *argv],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # The run on two ranks starts last.
        until(lambda: list(folder.glob("grid/ranks_2_seed_0/checkpoints/iteration_*.safetensors")), SECONDS)
        process.send_signal(signal.SIGINT)
        interrupted = subprocess.CompletedProcess(argv, process.wait(SECONDS), *process.communicate())
    finally:
        process.kill()
        process.communicate()
    results = {cell: result(folder / "grid" / cell) for cell in CELLS}
    return Sessions(folder / "grid", interrupted, results, paceline(*argv, cwd=folder))


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def times(directory: Path) -> dict[str, int]:
    """Return when the checkpoints, results and logs of an experiment were written, in nanoseconds."""
    files = [*directory.glob("*/checkpoints/*"), *directory.glob("*/result.json"), *directory.glob("*.log")]
    return {str(file): file.stat().st_mtime_ns for file in files}


def test_ctrl_c_stops_the_runs_with_a_checkpoint(sessions: Sessions):
    assert sessions.interrupted.returncode == EXIT_CODE, sessions.interrupted.stderr
    assert "The same command with --run-dir grid continues" in sessions.interrupted.stdout
    last = sessions.results["ranks_2_seed_0"]
    assert (last["status"], 0 < last["iterations"] < ITERATIONS) == ("interrupted", True)


def test_the_same_command_continues_the_runs_from_their_checkpoints(sessions: Sessions):
    assert sessions.continued.returncode == 0, sessions.continued.stdout + sessions.continued.stderr
    for ranks, cell in enumerate(CELLS, 1):
        found = result(sessions.directory / cell)
        assert (found["status"], found["iterations"], found["world_size"]) == ("completed", ITERATIONS, ranks)
        assert found["total_envs"] == 4 * ranks
    assert result(sessions.directory / "ranks_2_seed_0")["restarts"] == 1


def test_the_experiment_is_recorded_and_reported(sessions: Sessions):
    grid = json.loads((sessions.directory / "grid.json").read_text())
    assert (grid["kind"], grid["task"], grid["num_envs"], grid["jobs"]) == ("horizontal", "cartpole", 4, 2)
    assert [(cell["run"], cell["total_envs"]) for cell in grid["cells"]] == [*zip(CELLS, (4, 8), strict=True)]
    page = (sessions.directory / "report.html").read_text()
    assert "Horizontal scaling of cartpole, 4 envs per rank" in page
    assert "2 ranks" in page
    assert "throughput and wall time are not comparable" in page


def test_completed_runs_are_not_run_again(sessions: Sessions):
    before = times(sessions.directory)
    done = paceline(*GRID, "--run-dir", "grid", cwd=sessions.directory.parent)
    assert (done.returncode, "Completed before: 2 of 2 cells." in done.stdout) == (0, True), done.stderr
    assert times(sessions.directory) == before


def test_a_failing_run_does_not_lose_the_others_and_is_named_at_the_end(sessions: Sessions, tmp_path: Path):
    grid = tmp_path / "grid"
    shutil.copytree(sessions.directory, grid)
    before = times(grid)
    # The experiment gets another seed, but the directory of its first run is used for something else.
    blocked = grid / "ranks_1_seed_1"
    blocked.mkdir()
    (blocked / "notes.txt").touch()
    done = paceline(*GRID, "--seeds", "2", "--run-dir", "grid", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("paceline: ranks_1_seed_1 has failed: ")
    assert "is not empty" in done.stderr
    assert result(grid / "ranks_2_seed_1")["status"] == "completed"
    assert before.items() <= times(grid).items()
    page = (grid / "report.html").read_text()
    assert "ranks_1_seed_1 has failed" in page


def test_a_run_that_cannot_start_is_a_failed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options: dict[str, Any] = {"task": "cartpole", "envs": 4, "max_iterations": 1, "train_argv": ("no-task",)}
    grid = Grid(kind="horizontal", ranks=(1, 2), seeds=(0,), **options)
    (tmp_path / "grid.json").write_text(json.dumps(grid.to_dict()))
    (tmp_path / "ranks_1_seed_0.log").mkdir()
    assert run(grid, tmp_path, Console(quiet=True)) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "ranks_1_seed_0 has failed: cannot start: Is a directory" in first
    assert "ranks_2_seed_0 has failed: unknown task 'no-task'" in second


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (("--ppo.clip", "0.1"), "--ppo.clip 0.2, now 0.1"),
        (("--max-iterations", "7"), "--max-iterations 300, now 7"),
        (("--num-envs", "5"), "num_envs 4, now 5"),
        (("--ranks", "1"), "it has ranks_2_seed_0"),
        (("--emulate-ranks",), "emulated False, now True"),
    ],
)
def test_another_experiment_in_the_same_directory_is_refused(
    changed: tuple[str, ...], difference: str, sessions: Sessions
):
    with pytest.raises(UserError, match="holds another experiment") as refusal:
        scale([*GRID[1:], *changed, "--run-dir", str(sessions.directory)], Console(quiet=True))
    assert f"({difference}" in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "argv", "message"),
    [
        ("horizontal", ["--ppo.bogus", "1"], "unknown option '--ppo.bogus'"),
        ("horizontal", ["--total-envs", "8"], "has --num-envs, per rank"),
        ("horizontal", ["--resume", "auto"], "auto"),
        ("horizontal", ["--mirror", "file:///nowhere"], "the runs would share the URL"),
        ("horizontal", ["--ppo.minibatches", "3"], "--ppo.minibatches 3"),
        ("horizontal", ["--gpu-ids", "all"], "torch sees no GPU"),
        ("horizontal", ["--ranks-per-node", "2"], "needs --on"),
        ("horizontal", ["--on", "osmo"], "submit scaling.yaml"),
        ("horizontal", ["--on", "slurm", "--ranks", "3", "--ranks-per-node", "2"], "use a multiple of 2"),
        ("vertical", ["--num-envs", "8"], "needs --total-envs"),
        ("vertical", ["--total-envs", "8"], "--num-envs 4: a vertical experiment has --total-envs"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_written(
    kind: str, argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        scale([kind, *SMALL, "--ranks", "1", "2", *argv, "--run-dir", "grid"], Console(quiet=True))
    assert not list(tmp_path.iterdir())


VERTICAL = ("vertical", "cartpole", "--total-envs", "8", "--ranks", "1", "4", "--gpu-ids", "none")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (VERTICAL, "k ranks of a vertical experiment equal one rank"),
        (("horizontal", "cartpole", "--ranks", "2", "--learner", "rsl_rl"), "only k ranks of ppo equal one rank"),
        ((*GRID[1:], "--sync", "every-iteration"), "only --sync every-minibatch equals one rank"),
    ],
)
def test_ranks_that_do_not_equal_one_rank_are_not_emulated(argv: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=f"--emulate-ranks.*{message}"):
        scale([*argv, "--emulate-ranks", "--dry-run"], Console())


def test_more_ranks_than_gpus_are_refused_with_a_remedy():
    options: dict[str, Any] = {"task": "cartpole", "seeds": (0,), "envs": 4, "max_iterations": 1, "train_argv": ()}
    grid = Grid(kind="horizontal", ranks=(1, 2), gpu_ids=(0,), on_gpus=True, **options)
    with pytest.raises(UserError, match=r"--ranks 2 on 1 GPU.*--emulate-ranks.*--gpu-ids none"):
        grid.check_ranks()
    replace(grid, emulate_ranks=True).check_ranks()
    replace(grid, gpu_ids=(0, 0)).check_ranks()


def test_a_vertical_experiment_keeps_the_total_and_seeds_follow_the_first(capsys: pytest.CaptureFixture[str]):
    assert scale([*VERTICAL, "--seed", "5", "--seeds", "2", "--dry-run"], Console()) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = [(seed, ranks) for seed in (5, 6) for ranks in (1, 4)]
    for line, (seed, ranks) in zip(lines, expected, strict=True):
        assert f"--total-envs 8 --seed {seed} --run-dir" in line
        assert line.count("--total-envs") == line.count("--seed") == 1
        assert line.endswith(f"ranks_{ranks}_seed_{seed} --gpu-ids none --ranks {ranks}")


def test_emulated_ranks_are_one_rank_with_their_envs(capsys: pytest.CaptureFixture[str]):
    assert scale([*GRID[1:], "--emulate-ranks", "--dry-run"], Console()) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "--num-envs 4 --seed 0" in first
    assert "--num-envs 8 --seed 0" in second
    assert second.endswith("--gpu-ids none --ranks 1")


def test_a_run_is_launched_on_nodes_of_an_engine(tmp_path: Path):
    nodes = ("--on", "local", "--ranks-per-node", "1", "--set", f"port={free_port()}", "memory=1Gi")
    argv = ("scale", "horizontal", *SMALL, "--max-iterations", "40", "--ranks", "2", *nodes, "--run-dir", "grid")
    done = paceline(*argv, cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = result(tmp_path / "grid" / "ranks_2_seed_0")
    assert (found["status"], found["world_size"]) == ("completed", 2)
    tasks = json.loads((tmp_path / "jobs" / "train-policy-1" / "result.json").read_text())["tasks"]
    assert set(tasks) == {"master", "worker-1"}
