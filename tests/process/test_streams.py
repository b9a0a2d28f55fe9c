"""Training completes without its output; other commands report that they cannot write."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.run import checkpoint

PACELINE = [sys.executable, "-m", "paceline"]
TRAIN = [
    *PACELINE,
    "train",
    "cartpole",
    "--gpu-ids",
    "none",
    "--num-envs",
    "8",
    "--ppo.horizon",
    "8",
    "--ppo.hidden",
    "8",
]


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, text=True, timeout=120)


def assert_complete(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["iterations"]) == ("completed", 5)
    file = checkpoint.newest(run / "checkpoints")
    assert checkpoint.load(file)["learner"]["iteration"] == 5
    assert (run / "run.yaml").read_text().startswith("task: cartpole\n")


@pytest.mark.parametrize("redirection", [">&- 2>&- <&-", "> /dev/full 2> /dev/full"])
def test_training_ends_well_without_its_output(redirection: str, tmp_path: Path):
    argv = " ".join([*TRAIN, "--max-iterations", "5", "--run-dir", "run"])
    done = shell(f"{argv} {redirection}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_complete(tmp_path / "run")


def test_ranks_train_to_the_end_without_output_and_with_a_log_on_a_full_disk(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").symlink_to("/dev/full")
    argv = " ".join([*TRAIN, "--ranks", "2", "--max-iterations", "5", "--run-dir", "run", "--worker-log-dir", "logs"])
    done = shell(f"{argv} > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert_complete(tmp_path / "run")


def test_training_goes_on_when_its_terminal_goes_away(tmp_path: Path):
    terminal, process_side = pty.openpty()
    # In a new session the process gets no SIGHUP, as under nohup.
    process = subprocess.Popen(
        [*TRAIN, "--max-iterations", "100000", "--checkpoint-every", "1", "--run-dir", "run"],
        cwd=tmp_path,
        stdin=process_side,
        stdout=process_side,
        stderr=process_side,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm"},
    )
    try:
        os.close(process_side)
        shown = b""
        while b"steps/s" not in shown:
            shown += os.read(terminal, 4096)
        os.close(terminal)
        first = json.loads((tmp_path / "run" / "result.json").read_text())
        assert first["status"] == "running"
        lost_at = iteration(tmp_path / "run")
        # The progress bar is refreshed ten times per second.
        deadline = time.monotonic() + 60.0
        while iteration(tmp_path / "run") < lost_at + 50:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"


def iteration(run: Path) -> int:
    """Return the iteration of the newest checkpoint."""
    files = checkpoint.listing(run / "checkpoints")
    return int(files[-1].stem.removeprefix("iteration_")) if files else 0


@pytest.mark.parametrize("argv", ["tasks", "--version", "train --help", "play --help", ""])
def test_a_command_whose_output_cannot_be_written_says_so(argv: str, tmp_path: Path):
    done = shell(f"{' '.join(PACELINE)} {argv} > /dev/full", tmp_path)
    expected = "paceline: cannot write to standard output: No space left on device\n"
    if argv.startswith("train"):
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode in (1, 2)
        assert done.stderr == expected


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_descriptors_are_harmless(redirection: str, tmp_path: Path):
    done = shell(f"{' '.join(PACELINE)} --version {redirection}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"{' '.join(PACELINE)} trian {redirection}", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == ("2>&-" not in redirection)
    assert done.stdout == ""


def test_a_letter_that_the_terminal_does_not_have_is_escaped(tmp_path: Path):
    line = f"PYTHONIOENCODING=ascii {' '.join(PACELINE)} 'tr\u00e4in' 2>&1"
    done = shell(line, tmp_path)
    assert done.returncode == 2
    assert "unknown command 'tr\\xe4in'" in done.stdout
