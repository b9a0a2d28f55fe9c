"""Run one task on its node: `python -m paceline.launch.task_runner prepare|run`.

The task is a `TaskSpec`, one line of JSON on standard input. `prepare` makes the directories, files and inputs; `run`
runs the command, copies its outputs and exits with the exit code of the command. SIGTERM, or the end of standard input,
stops the task: the command receives SIGTERM, and SIGKILL after the grace period. No process of the task remains.

If the files of the task cannot be prepared or stored, the exit code is `STORAGE_CODE`, and the last line of the output
is "paceline: REASON".
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

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
    _watch_input(lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        TaskFiles(spec).prepare()
    except (OSError, UnicodeError) as error:
        return _storage_failed(f"cannot prepare its files: {one_line(error)}")
    return 0


def run(spec: TaskSpec) -> int:
    files, stop, signals = TaskFiles(spec), threading.Event(), list[int]()
    for number in SIGNALS:
        signal.signal(number, lambda number, _: (signals.append(number), stop.set()))
    processes.adopt_orphans()
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
    _watch_input(stop.set)
    threading.Thread(target=_stop_when_requested, args=(stop, signals, command, spec), daemon=True).start()
    code = command.wait()
    # As in a container, nothing of a task continues after its first process.
    processes.kill()
    code = code if code >= 0 else 128 - code
    if spec.task.action(code) == "COMPLETE" and not stop.is_set():
        try:
            files.store_outputs()
        except OSError as error:
            return _storage_failed(f"its output cannot be stored: {one_line(error)}; it is kept in {files.output}")
    return code


def _storage_failed(reason: str) -> int:
    print(f"paceline: {reason}", file=sys.stderr)
    return STORAGE_CODE


def _environment(spec: TaskSpec, files: TaskFiles) -> dict[str, str]:
    variables = os.environ | spec.variables
    if spec.venv:
        variables["PATH"] = f"{spec.venv / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
    variables.setdefault("PYTHONUNBUFFERED", "1")
    return variables | files.environment() | {processes.MARK: spec.mark}


def _watch_input(stop: Callable[[], object]) -> None:
    """Call `stop` when standard input ends, because the process that controls the task has ended."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        stop()

    threading.Thread(target=watch, daemon=True).start()


def _stop_when_requested(
    stop: threading.Event, signals: list[int], command: subprocess.Popen[bytes], spec: TaskSpec
) -> None:
    stop.wait()
    if spec.forward_sigterm or not signals:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(command.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        command.wait(spec.grace_seconds)
    processes.kill()


if __name__ == "__main__":
    sys.exit(main())
