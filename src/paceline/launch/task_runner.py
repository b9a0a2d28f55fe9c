"""Run one task on its node: `python -m paceline.launch.task_runner prepare|run`.

The task is a `TaskSpec`, one line of JSON on standard input. `prepare` makes the directories, files and inputs; `run`
runs the command, copies its outputs and exits with the exit code of the command. SIGTERM, or the end of standard input,
stops the task: the command receives SIGTERM, and SIGKILL after the grace period. No process of the task remains. With
`silence_seconds`, the task is also stopped if no data arrives on standard input for that time.

If the files of the task cannot be prepared or stored, the exit code is `STORAGE_CODE`, and the last line of the output
is "paceline: REASON".
"""

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from paceline.errors import one_line
from paceline.launch.engines import processes
from paceline.launch.engines.task_files import TaskFiles, TaskSpec
from paceline.process.interrupts import SIGNALS

STORAGE_CODE = 121
_NOT_FOUND_CODE = 127


def main() -> int:
    spec = TaskSpec.model_validate_json(sys.stdin.buffer.readline())
    return prepare(spec) if sys.argv[1] == "prepare" else run(spec)


def prepare(spec: TaskSpec) -> int:
    _watch_input(lambda: os.kill(os.getpid(), signal.SIGTERM), spec.silence_seconds)
    try:
        _wait_for_earlier_runner(spec)
        TaskFiles(spec).prepare()
    except (OSError, UnicodeError) as error:
        return _storage_failed(f"cannot prepare its files: {one_line(error)}")
    return 0


def run(spec: TaskSpec) -> int:
    files, stop = TaskFiles(spec), threading.Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    processes.adopt_orphans()
    lock = _wait_for_earlier_runner(spec)
    try:
        command = subprocess.Popen(
            files.command(),
            cwd=files.work,
            env=_environment(spec, files),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        # ValueError: a null character in an argument or variable.
        print(f"paceline: cannot start {spec.task.command[0]}: {one_line(error)}", file=sys.stderr)
        return _NOT_FOUND_CODE
    _watch_input(stop.set, spec.silence_seconds)
    threading.Thread(target=_stop_when_requested, args=(stop, command, spec.grace_seconds), daemon=True).start()
    code = command.wait()
    # As in a container, nothing of a task continues after its first process.
    processes.kill()
    code = code if code >= 0 else 128 - code
    if spec.task.action(code) == "COMPLETE" and not stop.is_set():
        try:
            files.store_outputs()
        except OSError as error:
            return _storage_failed(f"its output cannot be stored: {one_line(error)}; it is kept in {files.output}")
    lock.close()
    return code


def _wait_for_earlier_runner(spec: TaskSpec) -> IO[str]:
    """Wait until no other runner of the task runs. One whose connection was lost may still stop its command when the
    task is started again. Return the file whose lock others wait for."""
    spec.directory.mkdir(parents=True, exist_ok=True)
    file = (spec.directory / "lock").open("w")
    # Some file systems have no locks.
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _storage_failed(reason: str) -> int:
    print(f"paceline: {reason}", file=sys.stderr)
    return STORAGE_CODE


def _environment(spec: TaskSpec, files: TaskFiles) -> dict[str, str]:
    variables = os.environ | spec.variables
    if spec.venv:
        variables["PATH"] = f"{spec.venv / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
    variables.setdefault("PYTHONUNBUFFERED", "1")
    return variables | files.environment() | {processes.MARK: spec.mark}


def _watch_input(stop: Callable[[], object], silence_seconds: float | None) -> None:
    """Call `stop` when standard input ends or is silent, because the process that controls the task has ended or the
    connection to it is lost."""

    def watch() -> None:
        while select.select([0], [], [], silence_seconds)[0] and os.read(0, 4096):
            pass
        stop()

    threading.Thread(target=watch, daemon=True).start()


def _stop_when_requested(stop: threading.Event, command: subprocess.Popen[bytes], grace_seconds: float) -> None:
    stop.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(command.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        command.wait(grace_seconds)
    processes.kill()


if __name__ == "__main__":
    sys.exit(main())
