"""Tests of which run a start continues, with real launchers and real restarts."""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.run import checkpoint
from tests import forked
from tests.distributed.faults import children, install, left_behind, start
from tests.distributed.ranks import free_port
from tests.waiting import until

SECONDS = 90.0
SMALL = ["--gpu-ids", "none", "--logger", "none"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


def paceline(cwd: Path, site: Path, *argv: str, **environment: str) -> tuple[int, str, str]:
    """Run a command to its end; return its exit code, output and error output."""
    done = forked.paceline(*argv, cwd=cwd, PYTHONPATH=str(site), **environment)
    return done.returncode, done.stdout, done.stderr


def torchrun(cwd: Path, site: Path, options: list[str], *argv: str, **environment: str) -> tuple[int, str, str]:
    """Run `paceline ARGV` in one worker under `torch.distributed.run` with a c10d rendezvous named 123."""
    rendezvous = ["--rdzv_id=123", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}"]
    command = ["--nnodes=1", "--nproc_per_node=1", *rendezvous, *options, "-m", "paceline", *argv, "--distributed"]
    done = forked.python_m("torch.distributed.run", *command, cwd=cwd, PYTHONPATH=str(site), **environment)
    return done.returncode, done.stdout, done.stderr


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def runs(cwd: Path, task: str = "faulty") -> list[Path]:
    folder = cwd / "runs" / task
    return sorted(folder.iterdir()) if folder.exists() else []


def test_resume_auto_means_the_same_run_after_a_restart(site: Path, tmp_path: Path):
    assert paceline(tmp_path, site, "train", "faulty", *SMALL, "--max-iterations", "2")[0] == 0
    (run,) = runs(tmp_path)
    argv = ["--ranks", "2", "--num-envs", "3", "--max-restarts", "1", "--max-iterations", "100000"]
    process = start(tmp_path, site, "train", "--resume", "auto", *SMALL, *argv)
    try:
        until(lambda: result(run)["status"] == "running" and result(run)["world_size"] == 2, SECONDS)
        assert paceline(tmp_path, site, "train", "faulty", *SMALL, "--max-iterations", "2")[0] == 0
        (other,) = set(runs(tmp_path)) - {run}
        before = {file: file.read_bytes() for file in other.rglob("*") if file.is_file()}
        os.kill(children(process.pid)[0], signal.SIGKILL)
        until(lambda: result(run)["restarts"] == 1, SECONDS)
        process.terminate()
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert result(run)["status"] == "interrupted"
    assert {file: file.read_bytes() for file in other.rglob("*") if file.is_file()} == before
    assert left_behind(str(run)) == {}


def test_a_reused_rendezvous_id_starts_a_new_run(site: Path, tmp_path: Path):
    argv = ["train", "faulty", *SMALL, "--checkpoint-every", "2"]
    fault = f"raise:0:60:{tmp_path / 'fault'}"
    assert torchrun(tmp_path, site, [], *argv, FAULT=fault)[0] != 0
    (failed,) = runs(tmp_path)
    assert result(failed)["status"] == "failed"
    code, _, errors = torchrun(tmp_path, site, [], *argv, "--seed", "5", "--max-iterations", "2")
    assert code == 0, errors
    _, new = runs(tmp_path)
    assert result(failed)["status"] == "failed"
    assert result(new)["iterations"] == 2
    # A checkpoint that the user names is used, although the rendezvous has the name of the run's first launch.
    named = checkpoint.listing(failed / "checkpoints")[0]
    code, printed, errors = torchrun(tmp_path, site, [], "train", "--resume", str(named), *SMALL)
    assert code == 0, errors
    assert f"from iteration {int(named.stem.split('_')[1])} " in printed


def test_a_restarted_worker_finds_the_run_of_its_launch(site: Path, tmp_path: Path):
    argv = ["train", "faulty", *SMALL, "--checkpoint-every", "2"]
    fault = f"SIGKILL:0:100:{tmp_path / 'fault'}"
    code, printed, errors = torchrun(tmp_path, site, ["--max-restarts=1"], *argv, FAULT=fault)
    assert code == 0, errors
    (run,) = runs(tmp_path)
    assert (result(run)["status"], result(run)["restarts"]) == ("completed", 1)
    # Step 100 is in iteration 13. The checkpoint of iteration 12 may not be complete yet, that of iteration 10 is.
    assert re.search(", from iteration (10|12), restart 1", printed)


def test_a_requeued_job_continues_its_run(site: Path, tmp_path: Path):
    argv = ["train", "faulty", *SMALL, "--checkpoint-every", "2"]
    job = {"SLURM_JOB_ID": "7", "FAULT": f"raise:0:60:{tmp_path / 'fault'}"}
    assert paceline(tmp_path, site, *argv, SLURM_RESTART_COUNT="0", **job)[0] == 1
    # A second command of the same job is not a requeue.
    assert paceline(tmp_path, site, *argv, "--max-iterations", "2", SLURM_RESTART_COUNT="0", **job)[0] == 0
    failed, other = runs(tmp_path)
    code, printed, errors = paceline(tmp_path, site, *argv, SLURM_RESTART_COUNT="1", **job)
    assert code == 0, errors
    assert ", from iteration 6, restart 1" in printed
    assert result(failed)["status"] == "completed"
    # The requeued job's second command is the run that has completed.
    code, printed, _ = paceline(tmp_path, site, *argv, "--max-iterations", "2", SLURM_RESTART_COUNT="1", **job)
    assert (code, "has completed before" in printed) == (0, True)
    assert runs(tmp_path) == [failed, other]


def test_launches_in_the_same_second_get_directories_of_their_own(site: Path, tmp_path: Path):
    # With --max-restarts, a launcher starts one rank, which uses the directory of its launcher.
    argv = ["train", "faulty", *SMALL, "--max-restarts", "1", "--max-iterations", "2"]
    with ThreadPoolExecutor(2) as threads:
        ended = list(threads.map(lambda _: paceline(tmp_path, site, *argv), range(2)))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [result(run)["status"] for run in runs(tmp_path)] == ["completed", "completed"]


def test_a_refusal_is_printed_once_and_not_restarted(site: Path, tmp_path: Path):
    argv = ["train", "faulty", *SMALL, "--run-dir", "run"]
    code, _, errors = paceline(tmp_path, site, *argv, "--ranks", "2", "--max-restarts", "2", BUILD="refuse:1")
    assert code == 2
    (line,) = errors.strip().splitlines()
    assert line.startswith("paceline: no robot file here; rank 1 on ")
    assert "no robot file here" in (tmp_path / "run" / "workers" / "rank_1.log").read_text()
    # The same directory can be used as soon as the input is right.
    assert paceline(tmp_path, site, *argv, "--max-iterations", "2")[0] == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failure_while_building_has_a_traceback_in_the_log_it_names(ranks: int, site: Path, tmp_path: Path):
    argv = ["train", "faulty", *SMALL, "--ranks", str(ranks), "--run-dir", "run"]
    code, _, errors = paceline(tmp_path, site, *argv, BUILD=f"raise:{ranks - 1}")
    assert code == 1
    (line,) = errors.strip().splitlines()
    assert "ArithmeticError: the axle broke" in line
    assert "faulty.py" in line
    log = tmp_path / line.rsplit("more in ", 1)[1]
    assert "Traceback" in log.read_text()
    assert result(tmp_path / "run")["status"] == "failed"


def test_the_header_is_printed_before_the_envs_are_built(site: Path, tmp_path: Path):
    argv = ["train", "faulty", *SMALL, "--max-iterations", "1"]
    _, printed, _ = paceline(tmp_path, site, *argv, BUILD="print:0")
    # The model is built once more before the header, to check it.
    checked, built = printed.split("faulty: 6 envs")
    assert checked.count("the model is built") == built.count("the model is built") == 1


def test_a_launch_into_a_directory_in_training_is_refused_and_changes_nothing(tmp_path: Path, site: Path):
    argv = ["train", "faulty", *SMALL, "--run-dir", "run", "--max-iterations", "1000000", "--checkpoint-every", "1"]
    result = tmp_path / "run" / "result.json"
    with start(tmp_path, site, *argv) as process:
        try:
            until(lambda: list(tmp_path.glob("run/checkpoints/iteration_*")), SECONDS)
            before = json.loads(result.read_text())
            assert before["status"] == "running"
            code, _, errors = paceline(tmp_path, site, *argv, "--ranks", "2")
            assert code == 2
            assert errors == "paceline: run is being trained by another process: wait for it to end, or stop it\n"
            assert json.loads(result.read_text()) == before
            process.terminate()
            process.communicate(timeout=SECONDS)
            assert process.returncode == 130
        finally:
            process.kill()
