"""A failure of one rank is known to all ranks, and a run survives it: real ranks, real signals."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.run import checkpoint
from tests.distributed.faults import install, left_behind, process_of_rank, start
from tests.distributed.ranks import paceline_on_ranks
from tests.forked import paceline
from tests.states import flat
from tests.waiting import until

HOST = socket.gethostname()
SECONDS = 90


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


def train(
    cwd: Path, site: Path, *argv: str, task: str = "faulty", fault: str = "", **variables: str
) -> tuple[int, str, str, float]:
    """Return the exit code and output of a run of two ranks, and how long it ran after its fault."""
    file, run = cwd / "fault", cwd / "run"
    if fault:
        variables["FAULT"] = f"{fault}:{file}"
    options = ["--gpu-ids", "none", "--ranks", "2", "--run-dir", run, *argv]
    done = paceline("train", task, *options, cwd=cwd, PYTHONPATH=str(site), **variables)
    since = time.time() - float(file.read_text()) if fault else 0.0
    assert left_behind(str(run)) == {}
    return done.returncode, done.stdout, done.stderr, since


def train_without_launcher(
    cwd: Path, site: Path, *argv: str, task: str = "faulty", fault: str = ""
) -> tuple[int, str, str, float]:
    """Return the exit code and output of the main rank of a run of two ranks, and how long it ran after its fault."""
    file, environment = cwd / "fault", {"PYTHONPATH": str(site)}
    if fault:
        environment["FAULT"] = f"{fault}:{file}"
    rank = ["train", task, "--gpu-ids", "none", "--run-dir", str(cwd / "run"), *argv], environment
    main, other = paceline_on_ranks(cwd, rank, rank)
    since = time.time() - float(file.read_text()) if fault else 0.0
    assert main.returncode == other.returncode
    return main.returncode, main.stdout, main.stderr, since


def result(cwd: Path) -> dict[str, Any]:
    return json.loads((cwd / "run" / "result.json").read_text())


@pytest.mark.parametrize(
    ("kind", "rank", "cause"),
    [
        ("raise", 0, "ArithmeticError: the wheel came off"),
        ("raise", 1, "ArithmeticError: the wheel came off"),
        ("nan", 0, "became nan"),
        ("nan", 1, "became nan"),
        ("memory", 1, "memory"),
    ],
)
def test_a_failure_on_one_rank_ends_all_and_is_named(kind: str, rank: int, cause: str, site: Path, tmp_path: Path):
    # One failure is enough to test the launcher.
    run = train if (kind, rank) == ("raise", 1) else train_without_launcher
    code, _, errors, since = run(tmp_path, site, fault=f"{kind}:{rank}:60")
    assert code == 1
    assert since < 10.0
    line = errors.strip().splitlines()[-1]
    assert line.startswith("paceline: training failed: ")
    assert cause in line
    assert f"rank {rank} on {HOST}" in line
    log = tmp_path / "run" / "workers" / f"rank_{rank}.log"
    assert str(log) in line
    assert "Traceback" in log.read_text()
    assert result(tmp_path)["status"] == "failed"
    assert cause in result(tmp_path)["cause"]
    if kind == "nan":
        # Each rank has 6 envs, and its first one is named by its number over all ranks.
        assert f"reward term 'alive' of env {6 * rank} became nan in step 4 of the rollout of iteration 8" in line
        assert "check how the task faulty computes it" in line
        assert "learning-rate" not in line


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_several_lines_is_one_line_except_in_the_log(rank: int, site: Path, tmp_path: Path):
    code, _, errors, _ = train_without_launcher(tmp_path, site, fault=f"lines:{rank}:60")
    assert code == 1
    (line,) = (line for line in errors.splitlines() if "wheel" in line or "rust" in line)
    assert line == errors.strip().splitlines()[-1]
    assert line.startswith("paceline: training failed: ArithmeticError: the wheel came off: rust rust ")
    log = tmp_path / "run" / "workers" / f"rank_{rank}.log"
    assert f"; rank {rank} on {HOST}, more in {log}" in line
    assert "last line" not in line
    assert result(tmp_path)["cause"] == line.removeprefix("paceline: training failed: ")
    assert f"the wheel\n  came off:\n\n{99 * 'rust '}\nlast line" in log.read_text()


def test_a_rank_that_hangs_is_found_out(site: Path, tmp_path: Path):
    code, _, errors, since = train(tmp_path, site, "--timeout", "3", "--logger", "none", fault="SIGSTOP:1:60")
    assert code == 1
    assert since < 13.0
    assert f"no heartbeat for 3 s (--timeout); rank 1 on {HOST}" in errors
    assert result(tmp_path)["status"] == "failed"


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    differing = ("seconds/", "speed/", "memory/", "progress/train_seconds")
    names = [name for name in events.Tags()["scalars"] if not name.startswith(differing)]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


@pytest.fixture(scope="module")
def undisturbed(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns a run of a task without a fault, which tests must not change."""

    @cache
    def run(task: str) -> Path:
        path = tmp_path_factory.mktemp("undisturbed")
        assert train_without_launcher(path, site, "--checkpoint-every", "7", task=task)[0] == 0
        return path / "run"

    return run


@pytest.mark.parametrize(("task", "rank", "variables"), [("faulty", 0, {}), ("faulty-camera", 1, {"SHARD_BYTES": "0"})])
def test_a_killed_rank_costs_nothing_but_time(
    task: str, rank: int, variables: dict[str, str], site: Path, undisturbed: Callable[[str], Path], tmp_path: Path
):
    argv = ("--checkpoint-every", "7", "--max-restarts", "2")
    code, _, errors, _ = train(tmp_path, site, *argv, task=task, fault=f"SIGKILL:{rank}:200", **variables)
    assert code == 0, errors
    assert (result(tmp_path)["status"], result(tmp_path)["restarts"], result(tmp_path)["iterations"]) == (
        "completed",
        1,
        40,
    )
    assert any((tmp_path / "run").glob("checkpoints/*.envs/rank_0001.safetensors")) == bool(variables)
    found_state, expected = (
        flat(checkpoint.load(checkpoint.newest(run / "checkpoints"))) for run in (tmp_path / "run", undisturbed(task))
    )
    assert found_state.keys() == expected.keys()
    for name, leaf in expected.items():
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(found_state[name], leaf), name
    found = scalars(tmp_path / "run")
    assert found == scalars(undisturbed(task))
    assert [step for step, _ in found["loss/value"]] == list(range(1, 41))


def test_before_the_first_checkpoint_a_killed_run_begins_again(
    site: Path, undisturbed: Callable[[str], Path], tmp_path: Path
):
    argv = ("--checkpoint-every", "100", "--max-restarts", "1")
    assert train(tmp_path, site, *argv, fault="SIGKILL:1:30")[0] == 0
    assert scalars(tmp_path / "run") == scalars(undisturbed("faulty"))


def test_without_a_restart_left_the_killed_rank_is_named(site: Path, tmp_path: Path):
    code, _, errors, since = train(tmp_path, site, "--logger", "none", fault="SIGKILL:0:60")
    assert code == 1
    assert since < 10.0
    assert "rank 0 was killed by SIGKILL" in errors
    assert result(tmp_path)["status"] == "failed"


@pytest.mark.parametrize("signals", ["launcher", "everyone"])
def test_ctrl_c_ends_all_ranks_with_a_checkpoint_to_resume_from(signals: str, site: Path, tmp_path: Path):
    run = tmp_path / "run"
    argv = ["train", "faulty", "--gpu-ids", "none", "--ranks", "2", "--run-dir", str(run), "--logger", "none"]
    argv += ["--max-iterations", "100000"]
    process = start(tmp_path, site, *argv)
    try:
        log = run / "workers" / "rank_1.log"
        until(lambda: log.exists() and "steps/s" in log.read_text(), SECONDS)
        # A terminal and some schedulers signal every process, and the launcher passes the signal on: ranks get it
        # twice.
        (os.killpg if signals == "everyone" else os.kill)(process.pid, signal.SIGINT)
        signaled_at = time.monotonic()
        printed, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert time.monotonic() - signaled_at < 5.0
    assert process.returncode == 130
    assert result(tmp_path)["status"] == "interrupted"
    assert "resume   " in printed
    assert left_behind(str(run)) == {}
    iterations = result(tmp_path)["iterations"]
    assert checkpoint.load(checkpoint.newest(run / "checkpoints"))["learner"]["iteration"] == iterations
    rank = ["train", "--resume", str(run), "--max-iterations", str(iterations + 2)], {"PYTHONPATH": str(site)}
    resumed, _ = paceline_on_ranks(tmp_path, rank, rank)
    assert resumed.returncode == 0, resumed.stderr
    assert f"from iteration {iterations}" in resumed.stdout


def test_a_request_to_the_main_rank_alone_does_not_fail_the_others(site: Path, tmp_path: Path):
    run = tmp_path / "run"
    argv = ["--gpu-ids", "none", "--ranks", "2", "--max-iterations", "100000", "--checkpoint-every", "5"]
    process = start(tmp_path, site, "train", "faulty", *argv, "--logger", "none", "--run-dir", str(run))
    try:
        until(lambda: checkpoint.listing(run / "checkpoints"), SECONDS)
        main, other = (process_of_rank(str(run), index) for index in (0, 1))
        os.kill(main, signal.SIGTERM)
        until(lambda: main not in left_behind(str(run)), SECONDS)
        # This is enough time for the other rank to find that the main rank cannot be reached.
        time.sleep(2.0)
        os.kill(other, signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert result(tmp_path)["status"] == "interrupted"
