"""Directory of a run: run.yaml, result.json, metrics.jsonl, checkpoints/, tensorboard/, videos/."""

import errno
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.distributed.launch_record import this_launch
from paceline.errors import UserError, one_line
from paceline.process.interrupts import cleanup_on_exit
from paceline.run.config import TrainConfig
from paceline.validation import parse_json, read_text

RUNS = Path("runs")
AUTO = "auto"
"""Name of the newest run under `RUNS` in options that take a run."""
# Files that a run that fails before its start may leave in its directory.
_LOGS = {"error.log", "workers", "result.json", "checkpoints"}


class RunDir:
    """Directory of a run. Only the main rank writes to it; other ranks write their logs and shards of checkpoints.

    `given` is whether the user named the directory. If not, the run may use another name.
    """

    def __init__(self, path: Path, given: bool = True):
        self.path, self.given = path, given
        self.config_file = path / "run.yaml"
        self.result_file = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self.metrics_file = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.videos = path / "videos"
        self.evaluations = path / "eval"
        self.worker_logs = path / "workers"
        self.error_file = path / "error.log"
        """Traceback of the error that ended the run."""

    @classmethod
    def new(cls, path: Path | None, task: str, unique: bool = False) -> "RunDir":
        """Return the directory of a new run, by default named after the time. With `unique`, no other process chooses
        the same name, on this host or another. Nothing is created yet."""
        if path:
            return cls(path)
        suffix = f"_{secrets.token_hex(3)}" if unique else ""
        return cls(runs_of(task) / f"{datetime.now():%Y-%m-%d_%H-%M-%S}{suffix}", given=unique)

    def check_new(self) -> None:
        """Raise UserError if the user named a directory that holds anything but the logs of a run that failed before
        it started."""
        path = self.path
        with _writing_to(path):
            if self.given and path.is_dir() and (set(os.listdir(path)) - _LOGS or any(self.checkpoints.glob("*"))):
                raise UserError(f"{path} is not empty: choose another --run-dir, or continue it with --resume {path}")

    @contextmanager
    def held(self, is_new: bool, warn: Callable[[str], object]) -> Iterator["RunDir"]:
        """Create the directory and lock it inside the context; call `warn` if the file system has no locks. If the
        directory is taken, a new run uses another name, unless the user named the directory. A new run that leaves no
        file removes its directory."""
        run = self
        for attempt in range(2, 100):
            missing = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
            with _writing_to(run.path):
                run.checkpoints.mkdir(parents=True, exist_ok=True)
                lock = os.open(run.path, os.O_RDONLY)
                with tempfile.TemporaryFile(dir=run.checkpoints):
                    pass
            locked = _lock(lock)
            if locked is not False and not (is_new and run.config_file.exists()):
                break
            os.close(lock)
            if self.given:
                raise UserError(f"{run.path} is being trained by another process: wait for it to end, or stop it")
            run = RunDir(self.path.with_name(f"{self.path.name}_{attempt}"))
        else:
            raise UserError(f"{self.path} and 98 similar names are taken: choose another --run-dir")
        if locked is None:
            warn(f"The file system of {run.path} has no locks: do not start a second process in this directory.")
        folders = [run.checkpoints, *missing] if is_new else []
        try:
            with cleanup_on_exit(lambda: _remove_empty(folders)):
                yield run
        finally:
            os.close(lock)

    def write_config(self, config: TrainConfig) -> None:
        with _writing_to(self.path):
            write_atomically(self.config_file, config.to_yaml().encode())

    def alternatives(self) -> list["RunDir"]:
        """Return the directories in which an earlier start of the same run may be, the newest first: this one if the
        user named it, otherwise all of its task."""
        folder = self.path.parent
        if self.given or not folder.is_dir():
            return [self]
        return [RunDir(place) for place in sorted(folder.iterdir(), reverse=True)]

    @classmethod
    def open(cls, run: str, task: str | None = None) -> "RunDir":
        """Return an existing run, given its directory, one of its checkpoint files, or `auto` for the newest run (of
        `task`)."""
        if run == AUTO:
            return cls._newest(task)
        if not os.path.exists(run):
            raise UserError(f"no run at {run}: give a run's directory, one of its checkpoint files, or auto")
        if os.path.isfile(run):
            # The path of a checkpoint may be relative to checkpoints/, or a symbolic link.
            named = [Path(path) for path in (run, os.path.abspath(run), os.path.realpath(run))]
            places = [path.parent.parent for path in named if path.parent.name == "checkpoints"]
        else:
            places = [Path(run)]
        for place in map(cls, places):
            if os.path.isfile(place.config_file):
                return place
        raise UserError(f"{run} is not a run: it has no run.yaml")

    def result(self) -> dict[str, Any]:
        """Return the content of result.json; empty if there is no readable file."""
        try:
            return parse_json(read_text(self.result_file))
        except (OSError, ValueError):
            return {}

    def is_held(self) -> bool:
        """Return whether a process is training in the directory, see `held`."""
        try:
            directory = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            return _lock(directory) is False
        finally:
            os.close(directory)

    def mark_ended(self, status: str, cause: str | None = None) -> bool:
        """Write the status to result.json if it is still "running". Return whether it was."""
        result = self.result()
        was_running = result.get("status") == "running"
        if was_running:
            self.write_result(**(result | {"status": status, "cause": cause}))
        return was_running

    @classmethod
    def _newest(cls, task: str | None) -> "RunDir":
        folder = runs_of(task) if task else RUNS
        pattern = "*/run.yaml" if task else "*/*/run.yaml"
        runs = [cls(file.parent) for file in folder.glob(pattern)] if os.path.isdir(folder) else []
        # A restarted or requeued worker resolves `auto` again and must find the run that it trained before.
        launch = this_launch()
        for run in runs if launch.agents or launch.job else ():
            result = run.result()
            if launch.began(result) or launch.was_requeued_from(result):
                return run
        runs = [run for run in runs if any(run.checkpoints.glob("*.safetensors"))]
        if not runs:
            raise UserError(f"auto: no run with a checkpoint under {folder}/; give a run's directory")
        return max(runs, key=lambda run: run.config_file.stat().st_mtime)

    def config(self) -> TrainConfig:
        try:
            text = read_text(self.config_file)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {self.config_file}: {one_line(error)}") from None
        return TrainConfig.from_yaml(text, str(self.config_file))

    def write_result(self, **result: Any) -> None:
        content = (json.dumps(result, indent=2) + "\n").encode()
        try:
            write_atomically(self.result_file, content)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self.result_file.exists():
                raise
            # On a full disk there may be room in the blocks of the file itself.
            with self.result_file.open("r+b") as file:
                file.write(content)
                file.truncate()


@contextmanager
def _writing_to(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to the run directory {path}: {error.strerror}; choose another --run-dir, or change its "
            "permissions"
        ) from None


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _lock(directory: int) -> bool | None:
    """Lock a directory for this process. Return False if another process has locked it, None if the file system has no
    locks."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file atomically, also with respect to a power failure."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        part.replace(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
    finally:
        # The reason why the write failed, such as a read-only file system, may make this fail too.
        with suppress(OSError):
            part.unlink(missing_ok=True)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def runs_of(task: str) -> Path:
    """Return the folder of the runs of a task. Names of Gymnasium's tasks may have a slash."""
    return RUNS / task.replace("/", "_")
