"""What the node of a task must know, and the directories and files of the task there."""

import base64
import binascii
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict

from paceline.errors import UserError
from paceline.launch.spec import Dataset, File, Task
from paceline.launch.template import TOKEN


class TaskSpec(BaseModel):
    """One task as its node receives it, as a line of JSON. It may contain credentials: it is sent to the standard input
    of the task runner and never written to a file."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    workflow_id: str
    task: Task
    storage_root: Path
    """Directory on the node that holds jobs/ and datasets/."""
    venv: Path | None = None
    """Virtual environment on the node whose programs are first in PATH."""
    hosts: dict[str, str] = {}
    """Values of {{host:TASK}}."""
    contents: dict[str, bytes] = {}
    """Contents of the files that the workflow names by localpath, by the path of the file in the task."""
    variables: dict[str, str] = {}
    """Environment variables of the task that are not in the workflow: credentials, CUDA_VISIBLE_DEVICES."""
    grace_seconds: float = 30.0
    """Time between SIGTERM and SIGKILL when the task is stopped, s."""
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
    """Directory of a task: work/ is its working directory, output/ and input/N are {{output}} and {{input:N}}, and
    files/ holds the files whose paths are absolute."""

    def __init__(self, spec: TaskSpec):
        self.spec, self.task, self.directory = spec, spec.task, spec.directory
        self.work, self.output = self.directory / "work", self.directory / "output"
        self._datasets = spec.storage_root / "datasets"

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
        return TOKEN.sub(self._value, text)

    def _value(self, token: re.Match[str]) -> str:
        kind, _, name = token[1].partition(":")
        match kind:
            case "workflow_id":
                return self.spec.workflow_id
            case "output":
                return str(self.output)
            case "host":
                return self.spec.hosts[name]
            case _:
                names = [given.task for given in self.task.inputs]
                return str(self.input(names.index(name) if name in names else int(name)))

    def _place(self, file: File) -> Path:
        return self.directory / "files" / file.path.lstrip("/") if file.path.startswith("/") else self.work / file.path

    def prepare(self) -> None:
        """Make the directories, write the files and copy the inputs. Raise OSError."""
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
                source = self.directory.parent / given.task / "output"
                if not source.is_dir():
                    raise OSError(f"the output of {given.task} is not on this host: {source}")
                copy(source, target, given.regex, link=True)
                continue
            if given.url is not None:
                place, regex = file_path(self.resolve(given.url)), given.regex
            else:
                place, regex = self._dataset_version(given.dataset), given.regex or getattr(given.dataset, "regex", "")
            if place and place.exists():
                copy(place, target, regex)
            else:
                target.mkdir()
                print(f"paceline: input {index} does not exist, the directory is empty: {place}", file=sys.stderr)

    def store_outputs(self) -> None:
        """Copy the output directory to the places that the task names. Raise OSError."""
        for output in self.task.outputs:
            if output.url is not None:
                copy(self.output, file_path(self.resolve(output.url)), output.regex)
                continue
            dataset = output.dataset or output.update_dataset
            assert dataset
            latest = self._dataset_version(dataset)
            version = int(latest.name) + 1 if latest else 1
            target = self._datasets / self.resolve(dataset.name) / str(version)
            if output.update_dataset and latest:
                copy(latest, target, "")
            copy(self.output / dataset.path, target, output.regex or dataset.regex)

    def _dataset_version(self, dataset: Dataset | None) -> Path | None:
        """Return the directory of a dataset NAME or NAME:VERSION, by default of its newest version."""
        assert dataset
        name, _, version = self.resolve(dataset.name).partition(":")
        versions = [place for place in (self._datasets / name).glob("*") if place.name.isdecimal()]
        if version:
            return self._datasets / name / version
        return max(versions, key=lambda place: int(place.name), default=None)


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


def file_path(url: str) -> Path:
    """Return the path of a URL that begins with file://."""
    return Path(unquote(urlsplit(url).path))


def copy(source: Path, target: Path, regex: str, link: bool = False) -> None:
    """Copy a file or directory into the directory `target`. With a regular expression, copy only the files whose
    relative path matches it. With `link`, make a link to the directory in place of a copy of all files."""
    if link and not regex:
        target.symlink_to(source.absolute(), target_is_directory=True)
        return
    target.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(regex) if regex else None
    files = [source] if source.is_file() else [file for file in sorted(source.rglob("*")) if file.is_file()]
    for file in files:
        relative = file.name if file == source else str(file.relative_to(source))
        if pattern is None or pattern.search(relative):
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target / relative)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
