"""Specification of a task for its node, and the directories and files of the task there."""

import base64
import binascii
import errno
import re
import shutil
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from paceline.errors import UserError
from paceline.launch.profile import ContainerSettings
from paceline.launch.spec import Checkpoint, Dataset, File, Task
from paceline.launch.template import TOKEN
from paceline.run.storage import NothingStoredError, download, matching_files, upload


class TaskSpec(BaseModel):
    """One task as its node receives it, as a line of JSON. It may contain credentials: it is sent to the standard input
    of the task runner and never written to a file."""

    # An error about a specification of another version must not print its credentials.
    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64", hide_input_in_errors=True)

    workflow_id: str
    task: Task
    storage_root: Path
    """Directory on the node that holds jobs/ and datasets/."""
    venv: Path | None = None
    """Virtual environment on the node whose programs are first in PATH."""
    container: ContainerSettings | None = None
    """Container tool that runs the command in the task's image, in place of the virtual environment."""
    hosts: dict[str, str] = {}
    """Values of {{host:TASK}}."""
    contents: dict[str, bytes] = {}
    """Contents of the files that the workflow names by localpath, by the path of the file in the task."""
    variables: dict[str, str] = {}
    """Environment variables of the task that are not in the workflow: credentials, CUDA_VISIBLE_DEVICES."""
    secrets: dict[str, str] = {}
    """Contents of the credentials that the task reads as files, by the name of the credential."""
    grace_seconds: float = 30.0
    """Time between SIGTERM and SIGKILL when the task is stopped, s."""
    silence_seconds: float | None = None
    """Time without data on standard input after which the connection to the launching machine is lost, s. The task is
    then stopped. None: only the end of standard input stops it."""
    forward_sigterm: bool = True
    """Forward a SIGTERM of the task runner to the command. False if the engine sends SIGTERM to all processes of the
    task: at the second one, torch's elastic agent ends without waiting for the checkpoint of its ranks."""

    @property
    def directory(self) -> Path:
        return self.storage_root / "jobs" / self.workflow_id / self.task.name

    @property
    def mark(self) -> str:
        """Value of the environment variable that all processes of the task have."""
        return str(self.directory)


class TaskFiles:
    """Directory of a task: work/ is its working directory, output/ and input/N are {{output}} and {{input:N}}, files/
    holds the files whose paths are absolute, and secrets/ the credentials that are files, while the command runs."""

    def __init__(self, spec: TaskSpec):
        self.spec, self.task, self.directory = spec, spec.task, spec.directory
        self.work, self.output = self.directory / "work", self.directory / "output"
        self._secrets, self._datasets = self.directory / "secrets", spec.storage_root / "datasets"

    def input(self, index: int) -> Path:
        return self.directory / "input" / str(index)

    def command(self) -> list[str]:
        return [self.resolve(part) for part in (*self.task.command, *self.task.args)]

    def environment(self) -> dict[str, str]:
        return {name: self.resolve(value) for name, value in self.task.environment.items()}

    def resolve(self, text: str) -> str:
        """Return a text with the values of tokens such as {{output}}, and with the places of files with absolute
        paths."""
        for file in self.task.files:
            if file.path.startswith("/"):
                path = rf"(?<![\w./-]){re.escape(file.path)}(?![\w/-]|\.\w)"
                text = re.sub(path, lambda _, file=file: str(self._place(file)), text)
        for name, mount in secret_mounts(self.task).items():
            path = rf"(?<![\w./-]){re.escape(mount.rstrip('/'))}(?![\w-]|\.\w)"
            text = re.sub(path, lambda _, name=name: str(self._secrets / name), text)
        return TOKEN.sub(self._value, text)

    def _value(self, token: re.Match[str]) -> str:
        kind, _, name = token[1].partition(":")
        match kind:
            case "workflow_id":
                return self.spec.workflow_id
            case "output":
                return str(self.output)
            case "host":
                return self.spec.hosts.get(name, token[0])
            case _:
                names = [given.name for given in self.task.inputs]
                index = names.index(name) if name in names else int(name) if name.isdecimal() else len(names)
                return str(self.input(index)) if index < len(names) else token[0]

    def _place(self, file: File) -> Path:
        return self.directory / "files" / file.path.lstrip("/") if file.path.startswith("/") else self.work / file.path

    def prepare(self) -> None:
        """Make the directories, write the files and download the inputs. Raise OSError, StorageError or
        UserError."""
        for directory in (self.work, self.output, self.directory / "input"):
            directory.mkdir(parents=True, exist_ok=True)
        for file in self.task.files:
            place = self._place(file)
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.localpath is not None:
                place.write_bytes(self.spec.contents[file.path])
            elif file.base64:
                place.write_bytes(base64.b64decode(file.contents or ""))
            else:
                place.write_text(self.resolve(file.contents or ""))
            place.chmod(0o755)
        for index, given in enumerate(self.task.inputs):
            target = self.input(index)
            _remove(target)
            if given.task is not None:
                self._link_output(self.directory.parents[1] / given.source(self.spec.workflow_id), target, given.regex)
            elif given.url is not None:
                target.mkdir()
                self._download(self.resolve(given.url), target, given.regex)
            elif given.dataset is not None:
                source = self._dataset(given.dataset)
                copy(source, target / source.parent.name, given.regex or given.dataset.regex)
                if not source.is_dir():
                    print(f"paceline: no dataset {source}, the directory of the input is empty", file=sys.stderr)

    def _link_output(self, source: Path, target: Path, regex: str) -> None:
        """Make the output of another task available: a link, or a copy of the files that match."""
        if not source.is_dir():
            raise OSError(f"the output of {source.parent.name} is not on this host: {source}")
        if regex:
            copy(source, target, regex)
        else:
            target.symlink_to(source.absolute(), target_is_directory=True)

    def _download(self, url: str, target: Path, regex: str) -> None:
        try:
            download(url, target, regex)
        except NothingStoredError:
            print(f"paceline: {url} has no files, the directory of the input is empty", file=sys.stderr)

    def store_outputs(self) -> None:
        """Copy the output directory to the places that the task names. Raise OSError, StorageError or UserError."""
        for output in self.task.outputs:
            if output.url is not None:
                upload(self.output, self.resolve(output.url), output.regex)
            elif dataset := output.dataset or output.update_dataset:
                self._store_version(
                    dataset, output.regex or dataset.regex, keeps_files=output.update_dataset is not None
                )

    def _store_version(self, dataset: Dataset, regex: str, keeps_files: bool) -> None:
        """Store the output as a new version of a dataset; with `keeps_files`, with the files of the last version."""
        latest = self._dataset(dataset)
        part = latest.with_name(f".{self.spec.workflow_id}.{self.task.name}.part")
        _remove(part)
        if keeps_files:
            copy(latest, part, "")
        copy(self.output / dataset.path, part, regex)
        version = int(latest.name) + 1
        # Another task may store the same version at the same time.
        while True:
            try:
                part.rename(latest.with_name(str(version)))
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                version += 1

    def write_secrets(self) -> None:
        """Write the credentials that are files, readable by the user only: secrets/NAME/NAME. Raise OSError."""
        for name, content in self.spec.secrets.items():
            place = self._secrets / name / name
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.touch(mode=0o600)
            place.write_text(content)

    def remove_secrets(self) -> None:
        shutil.rmtree(self._secrets, ignore_errors=True)

    def checkpoint(self, checkpoint: Checkpoint) -> tuple[Path, str]:
        """Return the path and the URL of a checkpoint."""
        return self.work / self.resolve(checkpoint.path), self.resolve(checkpoint.url)

    def _dataset(self, dataset: Dataset) -> Path:
        """Return the directory of a dataset NAME:VERSION. NAME and NAME:latest are the newest version, or version 0 if
        there is none."""
        name, _, version = self.resolve(dataset.name).partition(":")
        versions = [int(place.name) for place in (self._datasets / name).glob("*") if place.name.isdecimal()]
        return self._datasets / name / (str(max(versions, default=0)) if version in ("", "latest") else version)


def check_files(task: Task, source: Path, on_host: bool) -> None:
    """Raise UserError for a file that cannot be written; with `on_host`, also if a localpath does not exist."""
    for file in task.files:
        if ".." in Path(file.path).parts or "\0" in file.path:
            raise UserError(f"task {task.name}: the path {file.path!r} of a file must not contain ..")
        if on_host and file.localpath is not None and not (source / file.localpath).is_file():
            raise UserError(f"task {task.name}: localpath {file.localpath}: no such file in {source}")
        if file.base64:
            try:
                base64.b64decode(file.contents or "", validate=False)
            except (binascii.Error, ValueError):
                raise UserError(f"task {task.name}: the contents of {file.path} are not valid base64") from None


def secret_mounts(task: Task) -> dict[str, str]:
    """Return the credentials that the task reads as files, and the directories that it expects them in."""
    return {name: given for name, given in task.credentials.items() if isinstance(given, str)}


def secret_variable(name: str) -> str:
    """Return the environment variable of the launching machine that holds a credential that is a file."""
    return re.sub(r"\W", "_", name).upper()


def copy(source: Path, target: Path, regex: str) -> None:
    """Copy the files of a directory whose relative path matches the regular expression."""
    target.mkdir(parents=True, exist_ok=True)
    for file, name in matching_files(source, regex):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target / name)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
