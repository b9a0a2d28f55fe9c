"""Processes of tasks: start them, find what they have started, and end them."""

import ctypes
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.process.interrupts import INHERITED_IGNORED

MARK = "PACELINE_LAUNCH_TASK"
"""Environment variable that all processes of a task inherit. Its value is the directory of the task."""
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent has ended, so that `descendants` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(command: list[str], line: bytes, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a program as the leader of a new session. It receives a line on its standard input, which stays open. Its
    output is appended to the log. Raise OSError."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=default_signals if INHERITED_IGNORED else None,
        )
    # A long line does not fit into the pipe before the program reads it.
    threading.Thread(target=_send, args=(process, line), daemon=True).start()
    return process


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    with suppress(OSError, ValueError):
        assert process.stdin
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def default_signals() -> None:
    """Handle SIGTERM by default: tasks are stopped by it, also if the launcher has inherited it as ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def descendants(mark: str | None = None) -> list[psutil.Process]:
    """Return the running descendants of this process; with a mark, those that belong to the task."""
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and mark in (None, process.environ().get(MARK)):
                found.append(process)
    return found


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
