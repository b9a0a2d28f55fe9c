"""Training under nohup continues after its terminal is closed: a real pseudo-terminal and a real interactive shell."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.distributed.faults import left_behind
from tests.distributed.ranks import free_port
from tests.signals import DEFAULT_SIGNALS

SECONDS = 60.0
SMALL = "--gpu-ids none --num-envs 8 --ppo.horizon 8 --ppo.hidden 8 --logger none"
COMMANDS = {
    "one process": "{python} -m paceline train cartpole",
    "two ranks": "{python} -m paceline train cartpole --ranks 2",
    "torchrunx": "{python} -m paceline train cartpole --ranks 2 --launcher torchrunx",
    "torch.distributed.run": "{python} -m torch.distributed.run --nproc_per_node=2 --master_port={port} "
    "--signals-to-handle=SIGTERM,SIGINT,SIGQUIT -m paceline train cartpole --distributed",
}


@contextmanager
def terminal(cwd: Path) -> Iterator[int]:
    """Start an interactive shell on a terminal that is closed at the end; yield the file descriptor to write to."""
    master, slave = os.openpty()
    shell = subprocess.Popen(
        [*DEFAULT_SIGNALS, "setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        yield master
    finally:
        os.close(master)
        try:
            shell.wait(SECONDS)
        finally:
            shell.kill()


def until(condition: Callable[[], object], cwd: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        printed = cwd / "nohup.out"
        assert time.monotonic() < deadline, printed.read_text() if printed.exists() else "nothing was printed"
        time.sleep(0.05)


def result(run: Path) -> dict[str, object]:
    with suppress(OSError):
        return json.loads((run / "result.json").read_text())
    return {"status": "not started"}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_training_under_nohup_completes_after_the_terminal_is_closed(command: str, tmp_path: Path):
    run = tmp_path / "run"
    argv = command.format(python=shlex.quote(sys.executable), port=free_port())
    with terminal(tmp_path) as keyboard:
        line = f"nohup {argv} {SMALL} --run-dir {run} --max-iterations 120 --checkpoint-every 10 &\n"
        os.write(keyboard, line.encode())
        until(lambda: list(run.glob("checkpoints/iteration_*")), tmp_path)
    assert result(run)["status"] == "running", "it ended before the terminal was closed"
    try:
        until(lambda: result(run)["status"] != "running", tmp_path)
        assert result(run)["status"] == "completed"
        until(lambda: not left_behind(str(run)), tmp_path)
    finally:
        for pid in left_behind(str(run)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
