"""A run's directory: run.yaml, result.json, checkpoints/, tensorboard/, videos/."""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.checks import parse_json, read_text
from paceline.config import TrainConfig
from paceline.errors import UserError, one_line

RUNS = Path("runs")
AUTO = "auto"
"""Stands for the newest run under `RUNS`, wherever a run can be named."""


@dataclass(frozen=True)
class RunDir:
    """Where a run keeps what it makes; only the main rank writes here."""

    path: Path
    given: bool = True
    """Whether the user named it; a name of our own may give way to one beside it."""

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

    @classmethod
    def named(cls, path: Path | None, task: str) -> "RunDir":
        """For a new run, by default named after the time; nothing is made or looked at yet."""
        time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        return cls(path or RUNS / _folder(task) / time, given=path is not None)

    def check_new(self) -> None:
        """Whether a new run can be here; nothing is made, so that one that cannot start leaves nothing."""
        path = self.path
        nearest = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
        if not nearest.is_dir():
            raise UserError(f"cannot make the run directory {path}: {nearest} is a file; choose another --run-dir")
        if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
            raise UserError(f"cannot write to {nearest}: choose another --run-dir, or mend its permissions")
        if self.given and path == nearest and any(os.scandir(path)):
            raise UserError(f"{path} is not empty: choose another --run-dir, or continue its run with --resume {path}")

    @contextmanager
    def held(self, config: TrainConfig, resumed: bool) -> Iterator["RunDir"]:
        """Make the directory, with run.yaml in it (a resumed run writes its own anew), and keep other processes from
        training in it while inside. A new run whose directory another one took in the meantime gets one beside it."""
        run, text = self, config.to_yaml()
        for attempt in range(2, 100):
            try:
                run.checkpoints.mkdir(parents=True, exist_ok=True)
                lock = os.open(run.path, os.O_RDONLY)
            except OSError as error:
                raise UserError(f"cannot write to the run directory {run.path}: {error.strerror}") from None
            if _lock(lock) and (resumed or not run.config_file.exists()):
                break
            os.close(lock)
            if resumed:
                raise UserError(f"{run.path} is being trained by another process: wait for it to end, or stop it")
            run = RunDir(self.path.with_name(f"{self.path.name}_{attempt}"))
        else:
            raise UserError(f"{self.path} and 98 names beside it are taken: choose another --run-dir")
        try:
            run._write_config(text)
            yield run
        finally:
            os.close(lock)

    def _write_config(self, text: str) -> None:
        try:
            with tempfile.TemporaryFile(dir=self.checkpoints):
                write_atomically(self.config_file, text.encode())
        except OSError as error:
            raise UserError(f"cannot write to the run directory {self.path}: {error.strerror}") from None

    @classmethod
    def open(cls, run: str, task: str | None = None) -> "RunDir":
        """An existing run: its directory, one of its checkpoint files, or `auto` for the newest (of `task`) under
        runs/."""
        if run == AUTO:
            return cls._newest(task)
        if not os.path.exists(run):
            raise UserError(f"no run at {run}: give a run's directory, one of its checkpoint files, or auto")
        places = _runs_of_checkpoint(Path(run)) if os.path.isfile(run) else [Path(run)]
        for place in places:
            if os.path.isfile(place / "run.yaml"):
                return cls(place)
        raise UserError(f"{run} is not a run: it has no run.yaml")

    def of_launch(self, launch: str | None) -> tuple["RunDir", dict[str, Any]] | None:
        """The run that an elastic launch has begun and not completed, here or beside this place; and its result."""
        if launch is None:
            return None
        beside = self.path.parent
        for place in [self.path] if self.given or not beside.is_dir() else sorted(beside.iterdir(), reverse=True):
            result = RunDir(place).result()
            if result.get("launch") == launch and result["status"] != "completed":
                return RunDir(place), result
        return None

    def result(self) -> dict[str, Any]:
        """What result.json says; nothing if there is none that can be read."""
        try:
            return parse_json(read_text(self.result_file))
        except (OSError, ValueError):
            return {}

    @classmethod
    def _newest(cls, task: str | None) -> "RunDir":
        folder = RUNS / _folder(task) if task else RUNS
        pattern = "*/run.yaml" if task else "*/*/run.yaml"
        files = folder.glob(pattern) if os.path.isdir(folder) else ()
        files = [f for f in files if any(f.parent.glob("checkpoints/*.safetensors"))]
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
        write_atomically(self.result_file, (json.dumps(result, indent=2) + "\n").encode())


def _runs_of_checkpoint(file: Path) -> list[Path]:
    """The directories that may be the run of a checkpoint file: as the path says, also from inside checkpoints/, and
    then where a symbolic link leads."""
    named = [file, Path(os.path.abspath(file)), Path(os.path.realpath(file))]
    return [path.parent.parent for path in named if path.parent.name == "checkpoints"]


def _lock(directory: int) -> bool:
    """Whether this process is now the only one to hold it; a file system without locks is trusted."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def write_atomically(file: Path, content: bytes) -> None:
    """Whole or not at all, also across a power cut: write beside it, fsync, rename, fsync the directory."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _folder(task: str) -> str:
    """One folder for each task, also where its name has a slash, as some of Gymnasium's have."""
    return task.replace("/", "_")
