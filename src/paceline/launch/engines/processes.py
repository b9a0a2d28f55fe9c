"""Processes of the tasks of one launch: start them, find what they have started, and end them."""

import ctypes
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.process.interrupts import INHERITED_IGNORED

MARK = "PACELINE_LAUNCH_TASK"
"""Environment variable that all processes of a task inherit. Its value names the task."""
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent has ended, so that `descendants` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(command: list[str], directory: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program as the leader of a new session. Its output is appended to the log. Raise OSError."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            restore_signals=True,
            preexec_fn=_default_signals if INHERITED_IGNORED else None,
        )


def _default_signals() -> None:
    # The launcher stops the tasks by SIGTERM, also if it has itself inherited the signal as ignored.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def descendants(mark: str | None = None) -> list[psutil.Process]:
    """Return the running descendants of this process; with a mark, those that belong to the task."""
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and mark in (None, process.environ().get(MARK)):
                found.append(process)
    return found


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Ask the processes of a task to end: send SIGTERM to its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)


def kill(mark: str | None = None) -> None:
    """Kill the descendants of this process; with a mark, those that belong to the task. Wait until they have ended."""
    # A process may start another one while the list is made.
    for _ in range(10):
        found = descendants(mark)
        if not found:
            return
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, 1.0)
