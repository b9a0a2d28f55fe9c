"""Save and load the full state of a run. Writing is atomic; loading executes no code.

A checkpoint is one file, or a file and a folder of shards with the states of the envs of each rank:

    iteration_00000012.safetensors
    iteration_00000012.envs/rank_0000.safetensors, rank_0001.safetensors, ...

The shards are complete before the file exists. The folder sorts before the file, so that a copy in the order of names
is complete too. `BEST` is a copy of the file and refers to the same shards.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open

from paceline.distributed.group import Group
from paceline.distributed.sharding import concatenate
from paceline.errors import UserError, one_line
from paceline.run.config import MOST_ENVS
from paceline.run.directory import AUTO, write_atomically
from paceline.validation import parse_json, shown

_FORMAT, _VERSION = "paceline-checkpoint", 2
_SUFFIX, _SHARDS_SUFFIX, _SUPERSEDED = ".safetensors", ".envs", ".superseded"
_NUMBERED = re.compile(r"iteration_\d{1,18}")
# Separates the keys of nested dicts in the name of a tensor.
_SEPARATOR = "|"
_ENVS = f"learner{_SEPARATOR}envs{_SEPARATOR}"
_DEEPEST = 20
BEST = "best" + _SUFFIX


def save(
    directory: Path, iteration: int, state: dict[str, Any], keep: int, best: bool, shards: Sequence[int] = ()
) -> Path:
    """Write a checkpoint and remove all but the newest `keep`. If it is the best so far, also write it as `BEST`.

    If the states of the envs are in shards, `shards` is the number of envs in each, and `state` is without them.
    Raise OSError if a shard is missing.
    """
    if shards:
        state = state | {"shards": {"iteration": iteration, "envs": list(shards)}}
        for shard in _shard_files(directory, iteration, len(shards)):
            os.stat(shard)
    file = directory / f"iteration_{iteration:08d}{_SUFFIX}"
    content = _serialize(state)
    write_atomically(file, content)
    if best:
        write_atomically(directory / BEST, content)
    for old in listing(directory)[:-keep]:
        old.unlink()
    _remove_unused_shards(directory, iteration)
    return file


def save_shard(directory: Path, iteration: int, rank: int, envs: dict[str, Any]) -> None:
    """Write the states of the envs of a rank. The checkpoint is complete when the main rank has called `save`."""
    shard = _shard_files(directory, iteration, rank + 1)[rank]
    shard.parent.mkdir(exist_ok=True)
    write_atomically(shard, _serialize({"learner": {"envs": envs}}))


def load(file: Path, with_envs: bool = True) -> dict[str, Any]:
    """Return the saved state on the CPU: nested dicts of tensors and plain values. An error names the cause and
    another checkpoint."""
    state: dict[str, Any] = {}
    with _opened(file, file) as content:
        for name in content.keys():  # noqa: SIM118 (not a dict)
            if not name.startswith(_ENVS):
                _put(state, name, content.get_tensor(name))
        for name, value in _values(content).items():
            _put(state, name, value)
    state.pop("shards", None)
    if with_envs and (envs := load_envs(file)):
        state["learner"]["envs"] = envs
    return state


def load_envs(file: Path, envs: range = range(MOST_ENVS)) -> dict[str, Any]:
    """Return the saved states of some envs, by default of all. Only their part of the files is read."""
    parts, first = [], 0
    for part, count in _files_with_envs(file):
        rows = slice(max(envs.start - first, 0), min(envs.stop - first, count))
        if rows.start < rows.stop:
            parts.append(_read_envs(file, part, rows))
        first += count
    with reading(file):
        return concatenate(parts)


def load_envs_of_rank(file: Path, envs_of_ranks: Sequence[range], group: Group) -> dict[str, Any]:
    """Return the saved states of this rank's envs. Ranks that share the directory read their own part. Otherwise the
    main rank reads all parts and sends them. All ranks must call this."""
    if len(set(group.all_gather(_identity(file)))) == 1:
        return load_envs(file, envs_of_ranks[group.rank.index])
    return group.scatter(load_envs(file, envs) for envs in envs_of_ranks)


def _identity(file: Path) -> tuple[int, int] | None:
    """Return values that differ between two files of the same name on two machines; None if the file is missing."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _read_envs(file: Path, part: Path, rows: slice) -> dict[str, Any]:
    state: dict[str, Any] = {}
    with _opened(file, part) as content:
        for name in content.keys():  # noqa: SIM118 (not a dict)
            if name.startswith(_ENVS):
                tensor = content.get_slice(name)
                _put(state, name.removeprefix(_ENVS), tensor[rows] if tensor.get_shape() else content.get_tensor(name))
    return state


def _files_with_envs(file: Path) -> list[tuple[Path, int]]:
    """Return the files of a checkpoint that hold the states of its envs, and the number of envs in each."""
    with _opened(file, file) as content:
        values = _values(content)
        iteration, counts = (values.get(f"shards{_SEPARATOR}{name}", ()) for name in ("iteration", "envs"))
        if not counts:
            return [(file, MOST_ENVS)]
        for value in (iteration, *counts):
            whole_number("a number of the shards", value)
        return list(zip(_shard_files(file.parent, iteration, len(counts)), counts, strict=True))


@contextmanager
def _opened(file: Path, part: Path) -> Iterator[Any]:
    """Open a part of a checkpoint, the file itself or a shard. An error inside the context names the part and another
    checkpoint."""
    which = "" if part == file else f"has a shard, {part}, that "
    try:
        with safe_open(part, framework="pt") as content:
            header = content.metadata() or {}
            if header.get("format") != _FORMAT:
                raise _broken(file, f"{which}is not a Paceline checkpoint")
            version = header.get("version", "no number")
            if version != str(_VERSION):
                raise UserError(
                    f"checkpoint {part} has format version {shown(version)}, this Paceline reads {_VERSION}: "
                    "continue the run with the version that wrote it, or start a new run"
                )
            yield content
    except OSError as error:
        raise _broken(file, f"{which}cannot be read ({error.strerror or error})") from None
    except UserError:
        raise
    except Exception as error:
        # For a damaged file safetensors, torch and the code of the caller raise many types of errors.
        raise _broken(file, f"{which}is truncated or damaged ({one_line(error)})") from None


def _values(content: Any) -> dict[str, Any]:
    """Return the plain values of an open checkpoint by name."""
    return parse_json((content.metadata() or {}).get("values", ""))


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


def is_shard(file: PurePath) -> bool:
    """Return whether a file is in the folder of shards of a checkpoint."""
    folder = file.parent
    return file.suffix == _SUFFIX and folder.suffix == _SHARDS_SUFFIX and _NUMBERED.fullmatch(folder.stem) is not None


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
    for half in (*directory.glob(".*.part"), *directory.glob(f"*{_SHARDS_SUFFIX}/.*.part")):
        half.unlink()
    folders = _remove_unused_shards(directory)
    best = directory / BEST
    later = [file for file in (*listing(directory), *folders) if _iteration(file) > iteration]
    if best.exists():
        try:
            is_later = load(best, with_envs=False)["learner"]["iteration"] > iteration
        except (UserError, LookupError, TypeError):
            is_later = True  # a damaged file is of no use
        later += [best] if is_later else []
    for file in later:
        aside = file.with_suffix(_SUPERSEDED if file.suffix == _SUFFIX else f"{_SHARDS_SUFFIX}{_SUPERSEDED}")
        if aside.is_dir():
            shutil.rmtree(aside)
        file.rename(aside)


def _remove_unused_shards(directory: Path, last_iteration: int | None = None) -> list[Path]:
    """Remove the shards to which no checkpoint refers, and return the remaining folders of shards. Ranks may be writing
    shards of iterations after `last_iteration`, so these are kept."""
    folders = [folder for folder in directory.glob(f"iteration_*{_SHARDS_SUFFIX}") if _NUMBERED.fullmatch(folder.stem)]
    if not folders:
        return []
    used = set()
    for file in (*listing(directory), directory / BEST):
        with suppress(UserError):
            used |= {part.parent for part, _ in _files_with_envs(file)}
    for folder in folders:
        if folder not in used and (last_iteration is None or _iteration(folder) < last_iteration):
            shutil.rmtree(folder)
    return [folder for folder in folders if folder.exists()]


def _shard_files(directory: Path, iteration: int, ranks: int) -> list[Path]:
    folder = directory / f"iteration_{iteration:08d}{_SHARDS_SUFFIX}"
    return [folder / f"rank_{index:04d}{_SUFFIX}" for index in range(ranks)]


def _iteration(file: Path) -> int:
    return int(file.stem.removeprefix("iteration_"))


def _broken(file: Path, why: str) -> UserError:
    which = "newest" if file.name == BEST else "one before it"
    others = [other for other in listing(file.parent) if file.name == BEST or other.name < file.name]
    offer = f"use the {which}, {others[-1]}" if others else "no earlier one is left in its run"
    return UserError(f"checkpoint {file} {why}: {offer}")


def _serialize(state: dict[str, Any]) -> bytes:
    flat = dict(_flatten(state))
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    values = {name: value for name, value in flat.items() if name not in tensors}
    header = {"format": _FORMAT, "version": str(_VERSION), "values": json.dumps(values)}
    return safetensors.torch.save(tensors, header)


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
