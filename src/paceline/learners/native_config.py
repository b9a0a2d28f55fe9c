"""Read the configuration files of RSL-RL, RL-Games and skrl."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from paceline.errors import UserError, unknown
from paceline.learners.learner import LEARNERS
from paceline.learners.native_keys import KEEP, Key, Only, Ours, RunOption, Setting
from paceline.learners.settings import Settings
from paceline.validation import Count, PerIteration, check_value, parse_yaml, read_text

# YAML reads 5e-4, without a decimal point, as a string.
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass(frozen=True)
class Native:
    """Content of a configuration file of a library."""

    settings: Settings
    run: dict[str, int]
    """Options of the run that the file sets: max_iterations, seed, checkpoint_every."""
    ours: tuple[str, ...]
    """Paths of the keys that have no effect in Paceline."""


def read(learner: str, file: Path, base: Settings, given: Mapping[str, Any], num_envs: int | None) -> Native:
    """Read a file. Its values replace those of `base`, and the flags in `given` replace both.

    `num_envs` is the number of envs per rank, if it is known; minibatch_size of RL-Games depends on it.
    """
    found = _Found(str(file), get_type_hints(type(base)) | {"minibatch_size": int})
    found.walk(_load(file, learner), (), _native_keys(learner).KEYS)
    values = found.settings
    whole = values.pop("minibatch_size", None)
    if whole is not None and "minibatch_size_per_env" not in given:
        horizon = (vars(base) | values | dict(given))["horizon_length"]
        where = f"{file}: {found.where['minibatch_size']}"
        values["minibatch_size_per_env"] = _per_env(whole, num_envs, horizon, where)
    settings = dataclasses.replace(base, **values | dict(given))  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        settings.check()
    except UserError as error:
        raise UserError(f"{file}, combined with the flags: {error}") from None
    for option in found.in_steps:
        found.run[option] = max(1, found.run[option] // settings.horizon)
    return Native(settings, found.run, tuple(found.ours))


def _native_keys(learner: str) -> Any:
    """Return the module with the keys that a library's files have."""
    return import_module(f"paceline.learners.{LEARNERS[learner].native_keys}")


def _load(file: Path, learner: str) -> dict[str, Any]:
    try:
        text = read_text(file)
    except OSError as error:
        raise UserError(f"cannot read --learner-config {file}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"--learner-config {file} is not a text file: give a YAML file") from None
    try:
        content = parse_yaml(text, aliases=True)
    except ValueError as error:
        raise UserError(f"--learner-config {file} is not plain YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"--learner-config {file} is not a configuration: it holds no keys")
    readable = [name for name, kind in LEARNERS.items() if kind.native_keys]
    marks = {name: _native_keys(name).MARKS & content.keys() for name in readable}
    looks = max(readable, key=lambda name: (len(marks[name]), name == learner))
    if marks[looks] and LEARNERS[looks].native_keys != LEARNERS[learner].native_keys:
        mark = min(marks[looks])
        raise UserError(f"--learner-config {file} is a file of {looks}, by its key {mark!r}: use --learner {looks}")
    if learner not in readable:
        raise UserError(f"--learner-config {file} with --learner {learner}: choose from {', '.join(readable)}")
    return content


@dataclass
class _Found:
    """Values found in a file."""

    file: str
    hints: dict[str, Any]
    """Types of the settings."""
    settings: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    """Path of the key that set each setting."""
    run: dict[str, int] = field(default_factory=dict)
    in_steps: list[str] = field(default_factory=list)
    """Options of the run that the file counts in steps."""
    ours: list[str] = field(default_factory=list)

    def walk(self, content: dict[str, Any], above: tuple[str, ...], known: Mapping[str, Any]) -> None:
        for name, value in content.items():
            path = ".".join((*above, str(name)))
            if name not in known:
                raise UserError(f"{self.file}: {path}: {unknown('key', str(name), known)}")
            key = known[name]
            if isinstance(key, Mapping):
                self.walk(self._group(value, path), (*above, name), key)
            elif isinstance(key, Setting) and key.unless in content:
                self.ours.append(path)
            else:
                self._take(key, value, path)

    def _group(self, value: Any, path: str) -> dict[str, Any]:
        # Networks of skrl are lists of parts.
        parts = value if isinstance(value, list) else [value]
        if len(parts) > 1:
            raise UserError(f"{self.file}: {path} has {len(parts)} parts: Paceline's networks have one")
        group: Any = parts[0] if parts and parts[0] is not None else {}
        if not isinstance(group, dict):
            raise self._wrong(path, value, "a group of keys")
        return group

    def _take(self, key: Key, value: Any, path: str) -> None:
        value = float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value
        match key:
            case Setting():
                self._set(key, value, path)
            case RunOption():
                number = key.least - 1 if value in (None, *key.unset) else self._typed(value, int, path)
                if number >= key.least:
                    self.run[key.name] = number
                    self.in_steps += [key.name] * key.in_steps
                    if key.setting:
                        self.settings[key.setting] = number
            case Only():
                if _bare(value) not in [_bare(allowed) for allowed in key.values]:
                    supported = " or ".join(_shown(allowed) for allowed in key.values) or "files without it"
                    remedy = f"; {key.remedy}" if key.remedy else ""
                    raise UserError(
                        f"{self.file}: {path} is {_shown(value)}: Paceline supports only {supported}{remedy}"
                    )
            case Ours():
                self.ours.append(f"{path} ({key.note})" if key.note else path)

    def _set(self, key: Setting, value: Any, path: str) -> None:
        if key.words is not None:
            words = {_bare(word): meaning for word, meaning in key.words.items()}
            if isinstance(value, (list, dict)) or _bare(value) not in words:
                raise self._wrong(path, value, _one_of(key.words))
            value = words[_bare(value)]
        elif value is None and key.null is not None:
            value = key.null
        if value is KEEP:
            return
        value = self._typed(value, self.hints[key.name], path)
        before = self.settings.setdefault(key.name, value)
        if before != value:
            raise UserError(
                f"{self.file}: {path} is {_shown(value)}, but {self.where[key.name]} is {_shown(before)}: "
                "Paceline has one value for both"
            )
        self.where.setdefault(key.name, path)

    def _typed(self, value: Any, hint: Any, path: str) -> Any:
        """Convert a value to the type of a setting, or raise UserError."""
        if get_origin(hint) is Literal:
            # skrl takes one name for all layers, or one for each layer.
            words = value if isinstance(value, list) else [value]
            if words and words[0] in get_args(hint) and words == words[:1] * len(words):
                return words[0]
            raise self._wrong(path, value, _one_of(get_args(hint)))
        if get_origin(hint) is tuple:
            if isinstance(value, list) and all(type(item) is int for item in value):
                return tuple(value)
            raise self._wrong(path, value, "a list of whole numbers")
        if type(value) is hint or (hint is float and type(value) is int):
            return hint(value)
        raise self._wrong(path, value, {int: "a whole number", float: "a number", bool: "true or false"}[hint])

    def _wrong(self, path: str, value: Any, expected: str) -> UserError:
        return UserError(f"{self.file}: {path} is {_shown(value)}, but must be {expected}")


def _per_env(minibatch_size: int, num_envs: int | None, horizon: int, where: str) -> int:
    """Return the number of steps of each env in a minibatch of the given size."""
    if num_envs is None:
        raise UserError(
            f"{where} {minibatch_size} with --total-envs: give --rl-games.minibatch-size-per-env, a divisor of "
            f"horizon_length {horizon}"
        )
    check_value("--num-envs", num_envs, Count)
    check_value("--rl-games.horizon-length", horizon, PerIteration)
    per_env, rest = divmod(minibatch_size, num_envs)
    if rest or not per_env or horizon % per_env:
        divisors = [steps for steps in range(1, horizon + 1) if horizon % steps == 0]
        near = min(divisors, key=lambda steps: abs(steps * num_envs - minibatch_size))
        raise UserError(
            f"{where} {minibatch_size} does not fit {num_envs} envs per rank and horizon_length {horizon}: "
            f"it must be {num_envs} times a divisor of {horizon}; give --rl-games.minibatch-size-per-env {near}, which "
            f"makes it {near * num_envs}"
        )
    return per_env


def _bare(value: Any) -> Any:
    """Return the name of a class in lower case and without its module: the libraries ignore case."""
    return re.split(r"[.:]", value)[-1].lower() if isinstance(value, str) else value


def _shown(value: Any) -> str:
    """Format a value as YAML in one line."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def _one_of(choices: Iterable[Any]) -> str:
    return f"one of {', '.join(_shown(choice) for choice in choices)}"
