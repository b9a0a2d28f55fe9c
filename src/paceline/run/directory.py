"""Directory of a run: run.yaml, result.json, checkpoints/, tensorboard/, videos/."""

import errno
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
"""Names the newest run under `RUNS`, wherever a run can be given."""
# Files that a run that fails before its start may leave in its directory.
_LOGS = {"error.log", "workers", "result.json", "checkpoints"}


@dataclass(frozen=True)
class RunDir:
    """Directory of a run. Only the main rank writes to it."""

    path: Path
    given: bool = True
    """Whether the user named the directory. If not, the run may use another name."""

    @property
    def config_file(self) -> Path:
        return self.path / "run.yaml"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def videos(self) -> Path:
        return self.path / "videos"

    @property
    def worker_logs(self) -> Path:
        return self.path / "workers"

    @property
    def error_file(self) -> Path:
        """Traceback of the error that ended the run."""
        return self.path / "error.log"

    @classmethod
    def named(cls, path: Path | None, task: str) -> "RunDir":
        """Return the directory of a new run, by default named after the time. Nothing is created yet."""
        return cls(path or RUNS / _folder(task) / _now(), given=path is not None)

    @classmethod
    def unique(cls, task: str) -> "RunDir":
        """Return a directory for a new run whose name no other process chooses, on this host or another."""
        return cls(RUNS / _folder(task) / f"{_now()}_{secrets.token_hex(3)}")

    def check_new(self) -> None:
        """Raise UserError if a new run cannot use the directory. Nothing is created."""
        path = self.path
        nearest = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
        if not nearest.is_dir():
            raise UserError(f"cannot make the run directory {path}: {nearest} is a file; choose another --run-dir")
        if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
            raise UserError(f"cannot write to {nearest}: choose another --run-dir, or mend its permissions")
        if self.given and path == nearest and self._is_in_use():
            raise UserError(f"{path} is not empty: choose another --run-dir, or continue its run with --resume {path}")

    def _is_in_use(self) -> bool:
        """Return whether the directory holds anything but the logs of a run that failed before it started."""
        return not {entry.name for entry in os.scandir(self.path)} <= _LOGS or any(self.checkpoints.glob("*"))

    @contextmanager
    def held(self, is_new: bool, warn: Callable[[str], object]) -> Iterator["RunDir"]:
        """Create the directory and keep other processes from training in it while inside; `warn` if the file system
        cannot. A new run without a directory of the user's choice gets another name if this one is taken. A new run
        that leaves no file removes it."""
        run = self
        for attempt in range(2, 100):
            missing = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
            try:
                run.checkpoints.mkdir(parents=True, exist_ok=True)
                lock = os.open(run.path, os.O_RDONLY)
                with tempfile.TemporaryFile(dir=run.checkpoints):
                    pass
            except OSError as error:
                raise UserError(f"cannot write to the run directory {run.path}: {error.strerror}") from None
            locked = _lock(lock)
            if locked is not False and not (is_new and run.config_file.exists()):
                break
            os.close(lock)
            if self.given:
                raise UserError(f"{run.path} is being trained by another process: wait for it to end, or stop it")
            run = RunDir(self.path.with_name(f"{self.path.name}_{attempt}"))
        else:
            raise UserError(f"{self.path} and 98 names beside it are taken: choose another --run-dir")
        if locked is None:
            warn(f"The file system of {run.path} has no locks: do not start a second process in this directory.")
        folders = [run.checkpoints, *missing] if is_new else []
        try:
            with cleanup_on_exit(lambda: _remove_empty(folders)):
                yield run
        finally:
            os.close(lock)

    def write_config(self, config: TrainConfig) -> None:
        text = config.to_yaml()
        try:
            write_atomically(self.config_file, text.encode())
        except OSError as error:
            raise UserError(f"cannot write to the run directory {self.path}: {error.strerror}") from None

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
        places = _runs_of_checkpoint(Path(run)) if os.path.isfile(run) else [Path(run)]
        for place in places:
            if os.path.isfile(place / "run.yaml"):
                return cls(place)
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
        """Write to result.json how the run ended if its ranks could not. Return whether this was the case."""
        result = self.result()
        if result.get("status") != "running":
            return False
        self.write_result(**(result | {"status": status, "cause": cause}))
        return True

    @classmethod
    def _newest(cls, task: str | None) -> "RunDir":
        folder = RUNS / _folder(task) if task else RUNS
        pattern = "*/run.yaml" if task else "*/*/run.yaml"
        runs = [cls(file.parent) for file in folder.glob(pattern)] if os.path.isdir(folder) else []
        # A restarted or requeued worker resolves `auto` again and must find the run that it trained before.
        launch = this_launch()
        for run in runs if launch.agents or launch.job else ():
            result = run.result()
            if launch.began(result) or launch.was_requeued_from(result):
                return run
        files = [run.config_file for run in runs if any(run.checkpoints.glob("*.safetensors"))]
        if not files:
            raise UserError(f"auto: no run with a checkpoint under {folder}/; give a run's directory")
        return cls(max(files, key=lambda f: f.stat().st_mtime).parent)

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


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _runs_of_checkpoint(file: Path) -> list[Path]:
    """Return the directories that may hold the run of a checkpoint file: by its path, also from inside checkpoints/,
    and by the target of a symbolic link."""
    named = [file, Path(os.path.abspath(file)), Path(os.path.realpath(file))]
    return [path.parent.parent for path in named if path.parent.name == "checkpoints"]


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


def _folder(task: str) -> str:
    """Return the folder name of a task. Names of Gymnasium's tasks may have a slash."""
    return task.replace("/", "_")
