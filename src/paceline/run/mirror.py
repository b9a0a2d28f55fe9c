"""Mirror the directory of a run to a URL while it is trained, and download a run from a URL."""

import fcntl
import hashlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from paceline.errors import UserError
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir, runs_of, write_atomically
from paceline.run.storage import Folder, StorageError, Uploads
from paceline.run.storage_process import FolderProcess

# Time between two searches for new checkpoints, s.
_POLL_SECONDS = 1.0
# Time between two uploads of files that grow, such as event files and logs, s.
_LOG_SECONDS = 30.0
# Time for the upload after a stop request or a failure, s.
_STOP_SECONDS = 20.0
_CONFIG, _RESULT, _RUN_ID = "run.yaml", "result.json", "run_id"
_CHECKPOINTS, _SUMS = "checkpoints/", "checkpoints/SHA256SUMS"


class Mirror:
    """Copy of a run directory at a URL, which the main rank updates while the run is trained. A thread looks for files
    that have changed, and a separate process uploads them.

    Checkpoints are uploaded as soon as they are complete and deleted after they were deleted locally. `SHA256SUMS`
    lists the files of the complete ones. All other files are uploaded every 30 s if they have changed.
    """

    def __init__(self, url: str, warn: Callable[[str], object]):
        self.url, self._warn, self._folder = url, warn, FolderProcess(url)
        self._uploads = Uploads(self._folder.upload)
        self._error: str | None = None
        self._run_id = secrets.token_hex(16)
        self._sums: dict[str, str] = {}
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, run: RunDir) -> None:
        """Raise UserError if the URL cannot be written to or holds another run."""
        file = run.path / _RUN_ID
        self._run_id = file.read_text() if file.is_file() else self._run_id
        try:
            if self._folder.read(_CONFIG) is not None and _run_id(self._folder) != self._run_id:
                raise UserError(f"--mirror {self.url} holds another run: choose another folder")
            self._sums = _read_sums(self._folder) or {}
            self._folder.write(_RUN_ID, self._run_id.encode())
        except StorageError as error:
            raise UserError(f"--mirror: {error}") from None

    def stored_config(self) -> TrainConfig | None:
        """Return the configuration of the run at the URL, or None if there is no run."""
        try:
            return _read_config(self._folder)
        except StorageError as error:
            raise UserError(f"--mirror: {error}") from None

    def start(self, run: RunDir) -> None:
        """Begin to mirror the run, whose directory exists. `claim` was called before."""
        self._run = run
        write_atomically(run.path / _RUN_ID, self._run_id.encode())
        self._thread = threading.Thread(target=self._update_until_end, daemon=True, name="mirror")
        self._thread.start()

    def finish(self, stop_requested: Callable[[], bool]) -> str | None:
        """Upload what has changed and end the thread. Return the reason if the mirror is not complete. The time is
        limited from a stop request on."""
        if self._thread is None:
            self._folder.close()
            return None
        self._ending.set()
        deadline = math.inf
        while self._thread.is_alive() and time.monotonic() < deadline:
            if stop_requested():
                deadline = min(deadline, time.monotonic() + _STOP_SECONDS)
            self._thread.join(0.1)
        if self._thread.is_alive():
            return (
                f"the upload to {self.url} did not end within {_STOP_SECONDS:.0f} s; the local copy is {self._run.path}"
            )
        return self._error

    def _update_until_end(self) -> None:
        logs_due = 0.0
        while not self._ending.wait(_POLL_SECONDS):
            with_logs = time.monotonic() >= logs_due
            self._update(with_logs)
            if with_logs:
                logs_due = time.monotonic() + _LOG_SECONDS
        self._update(with_logs=True)
        self._folder.close()

    def _update(self, with_logs: bool) -> None:
        """Upload files that have changed. A failure is repeated in the next update."""
        try:
            for file, name in _files(self._run):
                if _is_checkpoint(name) or with_logs:
                    self._upload(file, name)
            self._delete_old()
        except (StorageError, UserError, OSError) as error:
            if self._error is None:
                self._warn(f"The mirror is not complete: {error}. Training continues and the upload is repeated.")
            self._error = str(error)
        else:
            self._error = None

    def _upload(self, file: Path, name: str) -> None:
        checksum = self._uploads.upload(file, name)
        if checksum is not None and _is_checkpoint(name):
            self._sums[name] = checksum
            if checkpoint.is_numbered(file):
                self._write_sums()
        elif _is_checkpoint(name) and name not in self._sums and not file.exists():
            # It was removed during its upload.
            self._folder.delete(name)

    def _delete_old(self) -> None:
        old = [name for name in self._sums if not (self._run.path / name).exists()]
        # Files before their shards.
        for name in sorted(old, reverse=True):
            self._folder.delete(name)
            del self._sums[name]
        if old:
            self._write_sums()

    def _write_sums(self) -> None:
        lines = (f"{checksum}  {name.removeprefix(_CHECKPOINTS)}\n" for name, checksum in sorted(self._sums.items()))
        self._folder.write(_SUMS, "".join(lines).encode())


def download_run(url: str, path: Path | None) -> RunDir:
    """Download the run at a URL to a directory, by default runs/TASK/NAME_HASH. If the directory holds the run
    already, nothing is downloaded. Raise UserError if that is not possible."""
    try:
        folder = Folder(url)
        config = _read_config(folder)
        if config is None:
            raise UserError(f"no run at {url}: it has no run.yaml")
        run = RunDir(path or runs_of(config.task) / _local_name(folder.url))
        run.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(run.path.parent, os.O_RDONLY)
        try:
            # Several ranks of a host may download the same run.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if run.config_file.is_file():
                _check_same_run(run, folder)
            else:
                _download(folder, run)
        finally:
            os.close(lock)
    except StorageError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(
            f"cannot download {url}: {error.strerror}: {error.filename}; choose another --run-dir"
        ) from None
    return run


def _download(folder: Folder, run: RunDir) -> None:
    sums = _read_sums(folder)
    # A directory with run.yaml is complete, so this file is the last one.
    for name in folder.listing():
        if name in (_CONFIG, _SUMS, _RUN_ID):
            continue
        is_complete = sums is None or name in sums or not _is_checkpoint(name)
        if is_complete:
            folder.download(name, run.path / name, (sums or {}).get(name))
    write_atomically(run.path / _RUN_ID, _run_id(folder).encode())
    folder.download(_CONFIG, run.config_file)


def _check_same_run(run: RunDir, folder: Folder) -> None:
    file = run.path / _RUN_ID
    if not file.is_file() or file.read_text() != _run_id(folder):
        raise UserError(
            f"{run.path} holds another run than {folder.url}: choose another --run-dir, or continue the local run with "
            f"--resume {run.path}"
        )


def _run_id(folder: Folder | FolderProcess) -> str:
    """Return the identifier of the run in a folder. A run that was not uploaded by a `Mirror` has none; that of the URL
    is used for it."""
    stored = folder.read(_RUN_ID)
    return hashlib.sha256(folder.url.encode()).hexdigest() if stored is None else stored.decode(errors="replace")


def _read_config(folder: Folder | FolderProcess) -> TrainConfig | None:
    content = folder.read(_CONFIG)
    url = f"{folder.url}/{_CONFIG}"
    return None if content is None else TrainConfig.from_yaml(content.decode(errors="replace"), url)


def _read_sums(folder: Folder | FolderProcess) -> dict[str, str] | None:
    """Return the checksums of the complete checkpoints by name, or None if the run was not uploaded by a `Mirror`."""
    content = folder.read(_SUMS)
    if content is None:
        return None
    lines = (line.partition("  ") for line in content.decode(errors="replace").splitlines())
    return {_CHECKPOINTS + name: checksum for checksum, _, name in lines}


def _files(run: RunDir) -> list[tuple[Path, str]]:
    """Return the files to mirror and their names: the configuration, the checkpoints from the oldest to the newest, all
    others and the result. The shards of a checkpoint come before its file."""
    # Listed first, so that the shards of all of them are found.
    complete = checkpoint.listing(run.checkpoints)
    found = [file for file in run.path.rglob("*") if file.is_file() and not file.name.startswith(".")]
    found = [file for file in found if ".superseded" not in (file.suffix, file.parent.suffix)]
    found = [file for file in found if file in complete or not checkpoint.is_numbered(file)]
    names = [(file, file.relative_to(run.path).as_posix()) for file in found]
    first = {_RUN_ID: 0, _CONFIG: 1, _RESULT: 4}
    return sorted(names, key=lambda item: (first.get(item[1], 2 if _is_checkpoint(item[1]) else 3), item[1]))


def _is_checkpoint(name: str) -> bool:
    file = PurePosixPath(name)
    return name.startswith(_CHECKPOINTS) and (checkpoint.is_numbered(file) or checkpoint.is_shard(file))


def _local_name(url: str) -> str:
    """Return a name for the local directory of the run at a URL. The same URL has the same name on all ranks."""
    name = urlsplit(url).path.rstrip("/").rpartition("/")[2]
    return f"{name}_{hashlib.sha256(url.encode()).hexdigest()[:8]}"
