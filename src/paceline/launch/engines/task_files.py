"""Directories and files of one task on this machine."""

import base64
import binascii
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from paceline.errors import UserError
from paceline.launch.spec import Dataset, File, Task
from paceline.launch.template import TOKEN


@dataclass(frozen=True)
class TaskFiles:
    """Directory of a task: work/ is its working directory, output/ and input/N are {{output}} and {{input:N}}, and
    files/ holds the files whose paths are absolute."""

    task: Task
    directory: Path
    workflow_id: str
    datasets: Path

    @property
    def work(self) -> Path:
        return self.directory / "work"

    @property
    def output(self) -> Path:
        return self.directory / "output"

    def input(self, index: int) -> Path:
        return self.directory / "input" / str(index)

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
                return self.workflow_id
            case "output":
                return str(self.output)
            case "host":
                return "127.0.0.1"
            case _:
                names = [given.name for given in self.task.inputs]
                index = names.index(name) if name in names else int(name) if name.isdecimal() else len(names)
                return str(self.input(index)) if index < len(names) else token[0]

    def _place(self, file: File) -> Path:
        return self.directory / "files" / file.path.lstrip("/") if file.path.startswith("/") else self.work / file.path

    def prepare(self, output_of: Callable[[str], Path], source: Path, log: Path) -> None:
        """Make the directories, write the files and copy the inputs. `output_of` returns the output directory of a
        task; `source` is the directory of the workflow file. Raise OSError."""
        for directory in (self.work, self.output, self.directory / "input"):
            directory.mkdir(parents=True, exist_ok=True)
        for file in self.task.files:
            place = self._place(file)
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.localpath is not None:
                shutil.copy(source / file.localpath, place)
            elif file.base64:
                place.write_bytes(base64.b64decode(file.contents or ""))
            else:
                place.write_text(self.resolve(file.contents or ""))
            place.chmod(0o755)
        for index, given in enumerate(self.task.inputs):
            target = self.input(index)
            _remove(target)
            if given.task is not None:
                copy(output_of(given.task), target, given.regex, link=True)
                continue
            if given.url is not None:
                place, regex = file_path(self.resolve(given.url)), given.regex
            else:
                place, regex = self._dataset_version(given.dataset), given.regex or getattr(given.dataset, "regex", "")
            if place and place.exists():
                copy(place, target, regex)
            else:
                target.mkdir()
                with log.open("a") as lines:
                    lines.write(f"paceline: input {index} does not exist, the directory is empty: {place}\n")

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
            target = self.datasets / self.resolve(dataset.name) / str(version)
            if output.update_dataset and latest:
                copy(latest, target, "")
            copy(self.output / dataset.path, target, output.regex or dataset.regex)

    def _dataset_version(self, dataset: Dataset | None) -> Path | None:
        """Return the directory of a dataset NAME or NAME:VERSION, by default of its newest version."""
        assert dataset
        name, _, version = self.resolve(dataset.name).partition(":")
        versions = [place for place in (self.datasets / name).glob("*") if place.name.isdecimal()]
        if version:
            return self.datasets / name / version
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
