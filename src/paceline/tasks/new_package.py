"""Write a package with one task, as a start for a user's own."""

import keyword
import re
from collections.abc import Iterator
from importlib import resources
from importlib.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from paceline.errors import UserError
from paceline.tasks import registry

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_LONGEST_NAME = 50


def write_package(name: str, folder: Path) -> list[Path]:
    """Write a package with the task `name` to a folder that does not exist or is empty, and return its files. Raise
    UserError if the name is invalid or in use."""
    module = name.replace("-", "_")
    _check_name(name, module)
    values = {"name": name, "module": module, "kind": "".join(map(str.capitalize, module.split("_")))}
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"the folder {folder} is not empty: choose another one with --output")
        written = list[Path]()
        for parts, file in _files(resources.files("paceline") / "tasks" / "template"):
            place = folder.joinpath(*(module if part == "package" else part for part in parts))
            place = place.with_name(place.name.removesuffix(".jinja"))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(environment.from_string(file.read_text()).render(values))
            written.append(place)
    except OSError as error:
        raise UserError(f"--output {folder}: {error.strerror}: choose a folder that can be written") from None
    return sorted(written)


def _files(folder: Traversable, parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    for file in folder.iterdir():
        if file.is_dir():
            yield from _files(file, (*parents, file.name))
        elif file.name.endswith(".jinja"):
            yield (*parents, file.name), file


def _check_name(name: str, module: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME or keyword.iskeyword(module):
        raise UserError(
            f"the name {name[:80]!r} cannot be that of a package: use lower-case letters and numbers, with - between "
            f"words, for example my-robot; at most {_LONGEST_NAME} characters"
        )
    if registry.is_name(name):
        raise UserError(f"a task {name!r} exists: choose another name; `paceline tasks` lists the tasks")
    if find_spec(module):
        raise UserError(f"a module {module!r} is installed: choose another name")
