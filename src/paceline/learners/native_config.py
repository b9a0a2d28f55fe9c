"""Read the configuration files of RSL-RL, RL-Games and skrl.

A value that a file omits is the default of the library. `native_keys.py` describes the keys.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import UserError, counted, unknown
from paceline.learners.learner import LEARNERS
from paceline.learners.native_keys import (
    Group,
    Ignored,
    Keys,
    Only,
    RunOption,
    Setting,
    bare,
    keys_by_path,
    native_keys,
    shown,
    supported,
)
from paceline.learners.settings import IMAGE_SETTINGS, Settings, flag
from paceline.validation import Count, PerIteration, check_value, parse_yaml, read_text

# YAML reads 5e-4, without a decimal point, as a string.
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
# RL-Games gives the size of a minibatch over all envs; the setting is its size for one env.
_TOTAL, _PER_ENV = "minibatch_size", "minibatch_size_per_env"


@dataclass(frozen=True)
class Native:
    """Content of a configuration file of a library."""

    settings: Settings
    run: dict[str, int]
    """Options of the run that the file sets: max_iterations, seed, checkpoint_every."""
    ignored: tuple[str, ...]
    """Paths of the keys that have no effect in Paceline, with reasons."""
    notes: tuple[str, ...] = ()
    """Sentences about the values: where they come from, and which of them were changed."""


class _OtherAlgorithmError(UserError):
    """The file configures another algorithm, so the rest of it does not matter."""


def read(learner: str, file: Path, base: Settings, given: Mapping[str, Any], num_envs: int | None) -> Native:
    """Read a file. The flags in `given` replace its values. Settings of the image encoder that the file does not have
    are those of `base`.

    `num_envs` is the number of envs per rank, if it is known; minibatch_size of RL-Games depends on it.
    """
    kind, keys = type(base), native_keys(learner)
    reader, content = _Reader(learner, get_type_hints(kind)), _load(file, learner)
    try:
        reader.read_group(content, keys)
    except _OtherAlgorithmError as error:
        raise UserError(f"{file}: {error}") from None
    found = {name: value for name, (value, _) in reader.settings.items()}
    defaults = {name: getattr(base, name) for name in (*IMAGE_SETTINGS, *reader.replaced)} | dict(kind.library_defaults)
    values = defaults | found | dict(given)
    rounded = reader.fit_minibatches(values, base, given, num_envs)
    # The first key of a setting that has several.
    paths = {_name(key, path): path for path, key in reversed([*keys_by_path(keys)]) if isinstance(key, Setting)}
    missing = [
        f"{paths[name]} is missing, and {kind.library} has no default for it: add it, or give {flag(base, name)}"
        for name in vars(base)
        if name not in values.keys() | reader.present
    ]
    _raise_all(file, reader.problems + missing + reader.unknown)
    settings = dataclasses.replace(base, **values)
    try:
        settings.check()
    except UserError as error:
        raise UserError(f"{file}, combined with the flags: {error}") from None
    options = {
        key.option: max(1, count // settings.horizon) if key.in_steps else count for key, count in reader.run.items()
    }
    known = found.keys() | given.keys() | reader.replaced
    omitted = {name: kind.library_defaults[name] for name in kind.library_defaults if name in paths.keys() - known}
    return Native(settings, options, tuple(reader.ignored), (*_sources(kind.library, omitted, given), *rounded))


def _sources(library: str, omitted: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return sentences that name the settings that do not come from the file."""
    defaults = [f"{name} {shown(value)}" for name, value in omitted.items() if value is not None and value != ""]
    notes = (
        [f"it omits these settings, which have the defaults of {library}: {', '.join(defaults)}"] if defaults else []
    )
    return notes + ([f"flags replace its {', '.join(given)}"] if given else [])


def _name(key: Setting, path: str) -> str:
    """Return the name of the setting of a key."""
    return key.name or path.rpartition(".")[2]


def _names(group: Group) -> set[str]:
    """Return the names of the settings of a group."""
    return {_name(key, path) for path, key in group.items() if isinstance(key, Setting)}


def _raise_all(file: Path, problems: list[str]) -> None:
    """Raise UserError with all problems of a file in one line, if there are any."""
    if len(problems) > 1:
        numbered = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems, start=1))
        raise UserError(f"{file} has {len(problems)} values that cannot be used: {numbered}")
    if problems:
        raise UserError(f"{file}: {problems[0]}")


def _load(file: Path, learner: str) -> dict[str, Any]:
    try:
        content = parse_yaml(read_text(file), foreign=True)
    except OSError as error:
        raise UserError(f"cannot read --learner-config {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--learner-config {file} is not a text file: give a YAML file") from None
    except ValueError as error:
        raise UserError(f"--learner-config {file} is not plain YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"--learner-config {file} is not a configuration: it holds no keys")
    known = {name: native_keys(name).keys() for name in LEARNERS if native_keys(name)}
    likely = max(known, key=lambda name: (len(content.keys() & known[name]), name == learner))
    if foreign := content.keys() & known[likely] - known.get(learner, set()):
        key = min(foreign)
        raise UserError(f"--learner-config {file} is a file of {likely}, by its key {key!r}: use --learner {likely}")
    if learner not in known:
        raise UserError(f"--learner-config {file} with --learner {learner}: choose from {', '.join(known)}")
    return content


class _Reader:
    """Sorts the keys of a file by what they set. All problems are collected, in the order of the table of keys."""

    def __init__(self, learner: str, hints: dict[str, Any]):
        self._learner, self._hints = learner, hints
        self.settings: dict[str, tuple[Any, str]] = {}
        """Settings, each with the path of its key."""
        self.replaced: set[str] = set()
        """Settings that the file does not need, because others replace them or they have no effect."""
        self.present: set[str] = set()
        """Settings whose keys the file has, with valid values or not."""
        self.run: dict[RunOption, int] = {}
        self.ignored: list[str] = []
        self.problems: list[str] = []
        self.unknown: list[str] = []
        """Problems with keys that do not exist."""

    def read_group(self, content: dict[str, Any], keys: Keys, above: str = "") -> None:
        for name, key in keys.items():
            # Isaac Lab writes {} for a value that is missing.
            if name in content and content[name] != {}:
                try:
                    self._read(f"{above}{name}", key, content[name], content, keys)
                except _OtherAlgorithmError:
                    raise
                except UserError as error:
                    self.problems.append(str(error))
            elif isinstance(key, Group) and key.optional:
                self.replaced |= _names(key)
            elif isinstance(key, Setting) and self._has_no_effect(key.ignored_if, content, keys):
                self.replaced.add(_name(key, name))
        self.unknown += [f"{above}{name}: {unknown('key', str(name), keys)}" for name in content if name not in keys]

    def _read(self, path: str, key: Any, value: Any, content: dict[str, Any], keys: Keys) -> None:
        value = float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value
        match key:
            case Group() | Only() | Setting() if self._has_no_effect(key.ignored_if, content, keys):
                others = " and ".join(f"{name} is {shown(content.get(name))}" for name in key.ignored_if)
                self.ignored.append(f"{path} ({key.note if isinstance(key, Group) and key.note else others})")
                self.replaced |= {_name(key, path)} if isinstance(key, Setting) else set()
            case Group() if key.parts and not _is_plain(value, key):
                self.replaced |= _names(key)
                self._set(key.parts, shown(value), path)
            case Group() if key.columns:
                self._read_columns(path, key, value)
            case Mapping():
                self.read_group(_nested(value, path), key, f"{path}.")
            case Ignored():
                self.ignored.append(f"{path} ({key.note})" if key.note else path)
            case Only():
                if bare(value) not in map(bare, key.values):
                    remedy = f"; {key.remedy}" if key.remedy else ""
                    error = _OtherAlgorithmError if key.algorithm else UserError
                    raise error(f"{path} is {shown(value)}: Paceline supports only {supported(key)}{remedy}")
            case RunOption():
                number = key.minimum - 1 if value in (None, key.unset) else _typed(value, int, path)
                if number >= key.minimum:
                    self.run[key] = number
                    if key.setting:
                        self._set(key.setting, number, path)
            case Setting(unless=other) if _is_set(other, content, keys):
                if key.values is not None:
                    _setting(key, value, None, path)
                self.ignored.append(path)
            case Setting(learner=learner) if learner not in ("", self._learner):
                self.ignored.append(f"{path} ({key.note})")
            case Setting(if_null="unchanged") if value is None:
                pass
            case Setting():
                name = _name(key, path)
                self.present.add(name)
                self._set(name, _setting(key, value, self._hints.get(name, int), path), path)

    def _set(self, name: str, setting: Any, path: str) -> None:
        first, first_path = self.settings.setdefault(name, (setting, path))
        if setting != first:
            raise UserError(
                f"{path} is {shown(setting)}, but {first_path} is {shown(first)}: Paceline has one value for both"
            )

    def fit_minibatches(
        self, values: dict[str, Any], base: Settings, given: Mapping[str, Any], num_envs: int | None
    ) -> list[str]:
        """Replace the sizes of minibatches over all envs in `values` by sizes for one env. Return a note for each that
        is rounded."""
        notes = list[str]()
        for total in [name for name in self.settings if name.endswith(_TOTAL)]:
            size, path, name = values.pop(total), self.settings[total][1], total.replace(_TOTAL, _PER_ENV)
            self.present.add(name)
            if name not in given and base.horizon_field in values:
                try:
                    values[name], note = _per_env(size, num_envs, values[base.horizon_field], path, flag(base, name))
                    notes += [note] if note else []
                except UserError as error:
                    self.problems.append(str(error))
        return notes

    def _read_columns(self, path: str, group: Group, rows: Any) -> None:
        """Read a list of groups whose keys are the items of tuples, such as the layers of a network."""
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise _wrong(path, rows, "a list of groups of keys")
        columns = dict[str, list[Any]]()
        for number, row in enumerate(rows):
            one = _Reader(self._learner, dict.fromkeys(self._hints, int))
            one.read_group(row, group, f"{path}[{number}].")
            self.problems, self.unknown = self.problems + one.problems, self.unknown + one.unknown
            for name, (value, _) in one.settings.items():
                columns.setdefault(name, []).append(value)
        for name, values in columns.items():
            self._set(name, tuple(values), path)

    def _has_no_effect(self, condition: Mapping[str, Any], content: dict[str, Any], keys: Keys) -> bool:
        def value(name: str) -> Any:
            key = keys[name]
            applies = not isinstance(key, Setting) or key.learner in ("", self._learner)
            return content.get(name) if applies and content.get(name) != {} else None

        return bool(condition) and all(bare(value(name)) == bare(expected) for name, expected in condition.items())


def _is_set(name: str, content: dict[str, Any], keys: Keys) -> bool:
    """Return whether a group has a key with an effect. Null may be the value of a setting."""
    key = keys.get(name)
    null_counts = isinstance(key, Setting) and key.if_null != "unchanged"
    return content.get(name) not in (None, {}) or (null_counts and name in content)


def _is_plain(value: Any, keys: Keys) -> bool:
    """Return whether a network is one multi-layer perceptron that observes all of a group."""
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
        return not isinstance(value, list) or not value
    part, layers = value[0], value[0].get("layers", [])
    observes_all = bare(part.get("input", "OBSERVATIONS")) in map(bare, keys["input"].values)
    return observes_all and "type" not in part and all(type(each) is not dict for each in layers)


def _nested(value: Any, path: str) -> dict[str, Any]:
    # Networks of skrl are lists of parts.
    parts = value if isinstance(value, list) else [value]
    group: Any = parts[0] if parts and parts[0] is not None else {}
    if len(parts) > 1 or not isinstance(group, dict):
        raise _wrong(path, value, "a group of keys")
    return group


def _setting(key: Setting, value: Any, hint: Any, path: str) -> Any:
    """Convert the value of a key to the value of its setting."""
    if value is None and key.if_null is not None:
        return key.if_null
    if key.values is None:
        return _typed(value, hint, path)
    for allowed, meaning in key.values.items():
        if bare(value) == bare(allowed):
            return meaning
    error = _wrong(path, value, _one_of(key.values) if key.values else "null")
    raise _OtherAlgorithmError(str(error)) if key.algorithm else error


def _typed(value: Any, hint: Any, path: str) -> Any:
    """Convert a value to the type of a setting, or raise UserError."""
    if NoneType in get_args(hint):
        return (
            None
            if value is None
            else _typed(value, next(each for each in get_args(hint) if each is not NoneType), path)
        )
    if get_origin(hint) is Literal:
        # skrl takes one name for all layers, or one for each layer.
        names = value if isinstance(value, list) else [value]
        if names and names[0] in get_args(hint) and names == names[:1] * len(names):
            return names[0]
        raise _wrong(path, value, _one_of(get_args(hint)))
    if get_origin(hint) is tuple:
        item_type = get_args(hint)[0]
        if isinstance(value, list) and all(_has_type(item, item_type) for item in value):
            return tuple(map(item_type, value))
        raise _wrong(path, value, "a list of whole numbers" if item_type is int else "a list of numbers")
    if _has_type(value, hint):
        return hint(value)
    raise _wrong(path, value, {int: "a whole number", float: "a number", bool: "true or false"}[hint])


def _has_type(value: Any, hint: type) -> bool:
    return type(value) is hint or (hint is float and type(value) is int)


def _wrong(path: str, value: Any, expected: str) -> UserError:
    return UserError(f"{path} is {shown(value)}, but must be {expected}")


def _per_env(size: int, num_envs: int | None, horizon: int, path: str, given_by: str) -> tuple[int, str]:
    """Return the number of steps of each env in a minibatch of the given size. If the size does not fit the envs, it is
    the nearest that does, and a note says so."""
    if num_envs is None:
        raise UserError(f"{path} {size} with --total-envs: give {given_by}, a divisor of the horizon {horizon}")
    check_value("--num-envs", num_envs, Count)
    check_value(path, size, Count)
    check_value("the horizon", horizon, PerIteration)
    divisors = [steps for steps in range(1, horizon + 1) if horizon % steps == 0]
    near = min(divisors, key=lambda steps: abs(steps * num_envs - size))
    if near * num_envs == size:
        return near, ""
    return near, (
        f"{path} {size} is not {counted(num_envs, 'env')} times a divisor of the horizon {horizon}, so it is rounded "
        f"to {near * num_envs} ({given_by} {near})"
    )


def _one_of(choices: Iterable[Any]) -> str:
    return f"one of {', '.join(shown(choice) for choice in choices)}"
