"""Save and load the full state of a run. Writing is atomic; loading executes no code."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open

from paceline.errors import UserError, one_line
from paceline.run.directory import AUTO, write_atomically
from paceline.validation import parse_json, shown

_FORMAT, _VERSION = "paceline-checkpoint", 2
_SUFFIX = ".safetensors"
_NUMBERED = re.compile(r"iteration_\d{1,18}")
# Separates the keys of nested dicts in the name of a tensor.
_SEPARATOR = "|"
_DEEPEST = 20
BEST = "best" + _SUFFIX


def save(directory: Path, iteration: int, state: dict[str, Any], keep: int, best: bool) -> Path:
    """Write a checkpoint and remove all but the newest `keep`. If it is the best so far, also write it as `BEST`."""
    flat = dict(_flatten(state))
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    values = {name: value for name, value in flat.items() if name not in tensors}
    header = {"format": _FORMAT, "version": str(_VERSION), "values": json.dumps(values)}
    file = directory / f"iteration_{iteration:08d}{_SUFFIX}"
    content = safetensors.torch.save(tensors, header)
    write_atomically(file, content)
    if best:
        write_atomically(directory / BEST, content)
    for old in listing(directory)[:-keep]:
        old.unlink()
    return file


def load(file: Path) -> dict[str, Any]:
    """Return the saved state on the CPU: nested dicts of tensors and plain values. An error names the cause and
    another checkpoint."""
    try:
        with safe_open(file, framework="pt") as content:
            header = content.metadata() or {}
            if header.get("format") != _FORMAT:
                raise _broken(file, "is not a Paceline checkpoint")
            version = header.get("version", "no number")
            if version != str(_VERSION):
                raise UserError(
                    f"checkpoint {file} has format version {shown(version)}, this Paceline reads {_VERSION}: "
                    "continue the run with the version that wrote it, or start a new run"
                )
            state: dict[str, Any] = {}
            for name in content.keys():  # noqa: SIM118 (not a dict)
                _put(state, name, content.get_tensor(name))
            for name, value in parse_json(header.get("values", "")).items():
                _put(state, name, value)
            return state
    except OSError as error:
        raise _broken(file, f"cannot be read ({error.strerror or error})") from None
    except UserError:
        raise
    except Exception as error:
        # For a damaged file safetensors, torch and the code above raise many types of errors.
        raise _broken(file, f"is truncated or damaged ({one_line(error)})") from None


@contextmanager
def reading(source: object, remedy: str = "") -> Iterator[None]:
    """Convert errors that the state of a checkpoint causes to a UserError that names the checkpoint."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Each library has its own errors for a state that is missing or has another type.
        why = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"checkpoint {source} does not fit this run's task and settings: {why}{remedy}") from None


def whole_number(name: str, value: Any) -> None:
    """Raise ValueError if a number of a checkpoint is not a count."""
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{name} is {shown(value)}, not a whole number")


def listing(directory: Path) -> list[Path]:
    """Return the numbered checkpoints, oldest first."""
    files = filter(is_numbered, directory.glob(f"iteration_*{_SUFFIX}"))
    return sorted(filter(os.path.isfile, files), key=_iteration)


def is_numbered(file: PurePath) -> bool:
    """Return whether a file is named as the checkpoint of an iteration."""
    return file.suffix == _SUFFIX and _NUMBERED.fullmatch(file.stem) is not None


def newest(directory: Path) -> Path:
    files = listing(directory)
    if not files:
        raise UserError(f"no checkpoint in {directory}: the run ended before its first one; start it again")
    return files[-1]


def chosen(run: str, directory: Path) -> Path:
    """Return the checkpoint that `run` names: the file itself, or the newest checkpoint of the run."""
    return Path(run) if run != AUTO and os.path.isfile(run) else newest(directory)


def set_aside_later(directory: Path, iteration: int) -> None:
    """Rename the checkpoints after `iteration`, which a run resumed from there replaces, so that none of them is
    used as the newest or the best. Remove files that a killed process left incomplete."""
    for half in directory.glob(".*.part"):
        half.unlink()
    for later in listing(directory):
        if _iteration(later) > iteration:
            later.rename(later.with_suffix(".superseded"))
    best = directory / BEST
    if best.exists():
        try:
            is_later = load(best)["learner"]["iteration"] > iteration
        except (UserError, LookupError, TypeError):
            is_later = True  # a damaged file is of no use
        if is_later:
            best.rename(best.with_suffix(".superseded"))


def _iteration(file: Path) -> int:
    return int(file.stem.removeprefix("iteration_"))


def _broken(file: Path, why: str) -> UserError:
    which = "newest" if file.name == BEST else "one before it"
    others = [other for other in listing(file.parent) if file.name == BEST or other.name < file.name]
    offer = f"use the {which}, {others[-1]}" if others else "no earlier one is left in its run"
    return UserError(f"checkpoint {file} {why}: {offer}")


def _flatten(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}{_SEPARATOR}")
        else:
            yield prefix + key, value.detach().cpu().contiguous() if isinstance(value, torch.Tensor) else value


def _put(state: dict[str, Any], name: str, value: Any) -> None:
    *path, key = name.split(_SEPARATOR)
    if len(path) > _DEEPEST:
        raise ValueError(f"{shown(name)} is nested too deep")
    for part in path:
        state = state.setdefault(part, {})
        if not isinstance(state, dict):
            raise ValueError(f"{shown(name)} is part of a value")
    if key in state:
        raise ValueError(f"{shown(name)} is there twice")
    state[key] = value
