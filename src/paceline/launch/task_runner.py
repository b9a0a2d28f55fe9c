"""Run one task on its node: `python -m paceline.launch.task_runner prepare|run [FILE]`.

The task is a `TaskSpec`: one line of JSON on standard input, or a file where no process controls the task. `prepare`
makes the directories and files and downloads the inputs. `run` runs the command, uploads its checkpoints and outputs,
and exits with the exit code of the command.

SIGTERM, or the end of standard input, stops the task: the command receives SIGTERM, and SIGKILL after the grace period,
in which checkpoints are uploaded too. No process of the task remains. With `silence_seconds`, the task is also stopped
if no data arrives on standard input for that time.

If the inputs cannot be prepared, or an upload fails after all attempts, the exit code is `STORAGE_CODE` and the last
line of the output is "paceline: REASON".
"""

import fcntl
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import UserError, one_line
from paceline.launch import container
from paceline.launch.checkpoint_uploads import CheckpointUpload
from paceline.launch.engines import processes
from paceline.launch.engines.task_files import TaskFiles, TaskSpec
from paceline.process.interrupts import SIGNALS
from paceline.run.storage import StorageError

STORAGE_CODE = 121
_NOT_FOUND_CODE = 127
_KILL_SECONDS = 5.0
"""Time in which the processes of a task end after SIGKILL, s."""


def main() -> int:
    phase, *file = sys.argv[1:]
    spec = TaskSpec.model_validate_json(Path(file[0]).read_bytes() if file else sys.stdin.buffer.readline())
    # Credentials in the environment are used by transfers too.
    os.environ.update(spec.variables)
    return (prepare if phase == "prepare" else run)(spec, is_controlled=not file)


def prepare(spec: TaskSpec, is_controlled: bool = True) -> int:
    if is_controlled:
        _watch_input(lambda: os.kill(os.getpid(), signal.SIGTERM), spec.silence_seconds)
    try:
        with _only_runner(spec):
            TaskFiles(spec).prepare()
    except (StorageError, UserError, OSError, UnicodeError) as error:
        return _report(f"cannot prepare its files: {_message(error)}")
    return 0


def run(spec: TaskSpec, is_controlled: bool = True) -> int:
    files = TaskFiles(spec)
    with _only_runner(spec):
        try:
            files.write_secrets()
        except OSError as error:
            return _report(f"cannot write its credentials: {one_line(error)}")
        try:
            return _run_command(spec, files, is_controlled)
        finally:
            files.remove_secrets()


@contextmanager
def _only_runner(spec: TaskSpec) -> Iterator[None]:
    """Wait until no other runner of the task runs: one whose connection was lost may still stop its command when the
    task is started again."""
    if spec.silence_seconds is None:
        yield
        return
    spec.directory.mkdir(parents=True, exist_ok=True)
    # The time is limited, because a file system may keep the lock of a host that has failed.
    deadline = time.monotonic() + spec.silence_seconds + spec.grace_seconds + _KILL_SECONDS
    with (spec.directory / "lock").open("w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:
                break  # the file system has no locks
        yield


def _run_command(spec: TaskSpec, files: TaskFiles, is_controlled: bool) -> int:
    stop = _StopRequest()
    for number in SIGNALS:
        signal.signal(number, lambda *_: stop.set_by_signal())
    processes.adopt_orphans()
    arguments, variables = command_of(spec)
    try:
        uploads = [CheckpointUpload(each, *files.checkpoint(each)) for each in spec.task.checkpoint]
    except UserError as error:
        return _report(f"its checkpoint cannot be uploaded: {error}")
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
        _watch_input(stop.set, spec.silence_seconds)
    threading.Thread(target=_stop_when_requested, args=(stop, command, spec), daemon=True).start()
    for upload in uploads:
        upload.start()
    code = command.wait()
    if spec.container:
        container.remove(spec.container, spec.directory)
    # As in a container, nothing of a task continues after its first process.
    processes.kill()
    code = code if code >= 0 else 128 - code
    is_complete = spec.task.action(code) == "COMPLETE"
    reason = _finish(files, uploads, is_complete, stop, spec.grace_seconds)
    if reason and is_complete:
        return _report(reason)
    if reason:
        _report(reason)
    return code


class _StopRequest(threading.Event):
    """A request to stop the task, with its time."""

    at = math.inf
    is_signaled = False

    def set(self) -> None:
        self.at = min(self.at, time.monotonic())
        super().set()

    def set_by_signal(self) -> None:
        self.is_signaled = True
        self.set()


def _finish(
    files: TaskFiles, uploads: list[CheckpointUpload], is_complete: bool, stop: _StopRequest, grace_seconds: float
) -> str:
    """Upload the checkpoints, and the outputs of a complete task. Return the reason of a failure, or an empty string.
    The time is limited from a stop request on."""
    reasons = list[str]()

    def work() -> None:
        try:
            for upload in uploads:
                upload.finish()
        except StorageError as error:
            reasons.append(f"its checkpoint cannot be uploaded: {error}")
        try:
            if is_complete:
                files.store_outputs()
        except (StorageError, UserError, OSError) as error:
            reasons.append(f"its output cannot be stored: {_message(error)}; it is kept in {files.output}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < stop.at + grace_seconds:
        thread.join(0.1)
    if thread.is_alive():
        reasons.append(f"its files were not uploaded within {grace_seconds:g} s; they are kept in {files.directory}")
    return "; ".join(reasons)


def _report(reason: str) -> int:
    print(f"paceline: {reason}", file=sys.stderr, flush=True)
    return STORAGE_CODE


def _message(error: Exception) -> str:
    """Return a message of ours in full, and another one shortened."""
    return str(error) if isinstance(error, (StorageError, UserError)) else one_line(error)


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


def _watch_input(stop: Callable[[], object], silence_seconds: float | None) -> None:
    """Call `stop` when standard input ends or is silent, because the process that controls the task has ended or the
    connection to it is lost."""

    def watch() -> None:
        while select.select([0], [], [], silence_seconds)[0] and os.read(0, 4096):
            pass
        stop()

    threading.Thread(target=watch, daemon=True).start()


def _stop_when_requested(stop: _StopRequest, command: subprocess.Popen[bytes], spec: TaskSpec) -> None:
    stop.wait()
    if command.poll() is None and (spec.forward_sigterm or not stop.is_signaled):
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
