"""Run one task on its node: `python -m paceline.launch.task_runner prepare|run [FILE]`.

The task is a `TaskSpec`: one line of JSON on standard input, or a file where no process controls the task. `prepare`
makes the directories, files and inputs; `run` runs the command, copies its outputs and exits with the exit code of the
command. SIGTERM, or the end of standard input, stops the task: the command receives SIGTERM, and SIGKILL after the
grace period. No process of the task remains.

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
from pathlib import Path

from paceline.errors import one_line
from paceline.launch import container
from paceline.launch.engines import processes
from paceline.launch.engines.task_files import TaskFiles, TaskSpec
from paceline.process.interrupts import SIGNALS

STORAGE_CODE = 121
_NOT_FOUND_CODE = 127


def main() -> int:
    phase, *file = sys.argv[1:]
    spec = TaskSpec.model_validate_json(Path(file[0]).read_bytes() if file else sys.stdin.buffer.readline())
    return (prepare if phase == "prepare" else run)(spec, is_controlled=not file)


def prepare(spec: TaskSpec, is_controlled: bool = True) -> int:
    if is_controlled:
        _watch_input(lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        TaskFiles(spec).prepare()
    except (OSError, UnicodeError) as error:
        return _storage_failed(f"cannot prepare its files: {one_line(error)}")
    return 0


def run(spec: TaskSpec, is_controlled: bool = True) -> int:
    files, stop = TaskFiles(spec), threading.Event()
    for number in SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    processes.adopt_orphans()
    arguments, variables = command_of(spec)
    try:
        if spec.container:
            container.remove(spec.container, spec.directory)
        command = subprocess.Popen(
            arguments,
            cwd=files.work,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        # ValueError: a null character in an argument or variable.
        print(f"paceline: cannot start {arguments[0]}: {one_line(error)}", file=sys.stderr)
        return _NOT_FOUND_CODE
    if is_controlled:
        _watch_input(stop.set)
    threading.Thread(target=_stop_when_requested, args=(stop, command, spec), daemon=True).start()
    code = command.wait()
    if spec.container:
        container.remove(spec.container, spec.directory)
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


def command_of(spec: TaskSpec) -> tuple[list[str], dict[str, str]]:
    """Return the command of a task, in a container if the profile has a tool for it, and its environment variables."""
    files = TaskFiles(spec)
    variables = {"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1")} | spec.variables
    if spec.venv and not spec.container:
        path = variables.get("PATH", os.environ.get("PATH", os.defpath))
        variables["PATH"] = f"{spec.venv / 'bin'}{os.pathsep}{path}"
    variables |= files.environment() | {processes.MARK: spec.mark}
    if spec.container:
        return container.wrap(spec.container, spec.task.image, files.command(), spec.directory, variables)
    return files.command(), variables


def _watch_input(stop: Callable[[], object]) -> None:
    """Call `stop` when standard input ends, because the process that controls the task has ended."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        stop()

    threading.Thread(target=watch, daemon=True).start()


def _stop_when_requested(stop: threading.Event, command: subprocess.Popen[bytes], spec: TaskSpec) -> None:
    stop.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(command.pid, signal.SIGTERM)
    try:
        command.wait(spec.grace_seconds)
    except subprocess.TimeoutExpired:
        if spec.container:
            # The tool ends with its container.
            container.remove(spec.container, spec.directory)
        else:
            processes.kill()


if __name__ == "__main__":
    sys.exit(main())
