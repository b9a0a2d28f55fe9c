"""Read the configuration files of RSL-RL, RL-Games and skrl.

`native_keys.yaml` in the folder of a learner lists all keys that such a file may have. Its tags are the classes below:
!setting, !run, !only and !ignored, followed by the first field of the class or by several fields in braces.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from paceline.errors import UserError, unknown
from paceline.learners.learner import LEARNERS
from paceline.learners.settings import Settings
from paceline.validation import Count, PerIteration, check_value, parse_yaml, read_text

# YAML reads 5e-4, without a decimal point, as a string.
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass(frozen=True)
class Setting:
    """Key that sets a setting of the learner. Several keys of one setting must agree."""

    name: str = ""
    """Name of the setting; by default that of the key."""
    values: Mapping[Any, Any] | None = None
    """Allowed values of the key, mapped to values of the setting; by default any value of its type."""
    if_null: Any = None
    """Value of the setting for null, or "unchanged"; by default null is an error."""
    unless: str = ""
    """Name of a key of the same group that takes precedence over this one."""


@dataclass(frozen=True)
class RunOption:
    """Key that sets an option of the run. Null and values below `minimum`, such as -1, leave it unset."""

    option: str
    minimum: int = 1
    unset: str | None = None
    """Another value that leaves the option unset."""
    in_steps: bool = False
    """True if the key counts steps per env; the option counts iterations."""
    setting: str = ""
    """Setting of the learner that the key sets as well."""


@dataclass(frozen=True)
class Only:
    """Key of which Paceline supports only these values, usually the default. Without values the key is an error."""

    values: Sequence[Any]
    remedy: str = ""


@dataclass(frozen=True)
class Ignored:
    """Key without effect, because Paceline does this itself. It is listed at the start of a run."""

    note: str = ""


Key = Setting | RunOption | Only | Ignored
Keys = Mapping[str, Any]
"""Keys, and groups of keys as nested mappings, by name."""

_KINDS: dict[str, Any] = {"setting": Setting, "run": RunOption, "only": Only, "ignored": Ignored}


class _KeysLoader(yaml.SafeLoader):
    """Loads native_keys.yaml."""

    def construct_key(self, tag: str, node: yaml.Node) -> Key:
        if isinstance(node, yaml.MappingNode):
            fields: dict[Any, Any] = self.construct_mapping(node, deep=True)
            return _KINDS[tag](**fields)
        if isinstance(node, yaml.SequenceNode):
            return _KINDS[tag](self.construct_sequence(node, deep=True))
        return _KINDS[tag](node.value) if node.value else _KINDS[tag]()


_KeysLoader.add_multi_constructor("!", _KeysLoader.construct_key)


@cache
def native_keys(learner: str) -> Keys:
    """Return all keys of the configuration files of a learner's library; none for the native PPO."""
    folder = LEARNERS[learner].learner.partition(".")[0]
    file = files("paceline.learners") / folder / "native_keys.yaml"
    return yaml.load(file.read_text(), _KeysLoader) if file.is_file() else {}


@dataclass(frozen=True)
class Native:
    """Content of a configuration file of a library."""

    settings: Settings
    run: dict[str, int]
    """Options of the run that the file sets: max_iterations, seed, checkpoint_every."""
    ignored: tuple[str, ...]
    """Paths of the keys that have no effect in Paceline."""


def read(learner: str, file: Path, base: Settings, given: Mapping[str, Any], num_envs: int | None) -> Native:
    """Read a file. Its values replace those of `base`, and the flags in `given` replace both.

    `num_envs` is the number of envs per rank, if it is known; minibatch_size of RL-Games depends on it.
    """
    content = _load(file, learner)
    try:
        found, run, ignored = _interpret(content, native_keys(learner), get_type_hints(type(base)))
        size, where = found.pop("minibatch_size", (None, ""))
        values = {name: value for name, (value, _) in found.items()} | dict(given)
        if size is not None and "minibatch_size_per_env" not in given:
            horizon = (vars(base) | values)["horizon_length"]
            values["minibatch_size_per_env"] = _per_env(size, num_envs, horizon, where)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    settings = dataclasses.replace(base, **values)  # pyright: ignore[reportArgumentType]
    try:
        settings.check()
    except UserError as error:
        raise UserError(f"{file}, combined with the flags: {error}") from None
    options = {key.option: max(1, count // settings.horizon) if key.in_steps else count for key, count in run.items()}
    return Native(settings, options, tuple(ignored))


def _load(file: Path, learner: str) -> dict[str, Any]:
    try:
        content = parse_yaml(read_text(file), aliases=True)
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


def _interpret(
    content: dict[str, Any], keys: Keys, hints: dict[str, Any]
) -> tuple[dict[str, tuple[Any, str]], dict[RunOption, int], list[str]]:
    """Return the settings in a file, each with the path of its key; the options of the run; and the ignored keys.
    `hints` are the types of the settings."""
    settings: dict[str, tuple[Any, str]] = {}
    run: dict[RunOption, int] = {}
    ignored: list[str] = []
    for path, key, value in _flatten(content, keys):
        match key:
            case Ignored():
                ignored.append(f"{path} ({key.note})" if key.note else path)
            case Only():
                if _bare(value) not in map(_bare, key.values):
                    supported = " or ".join(map(_shown, key.values)) or "files without it"
                    remedy = f"; {key.remedy}" if key.remedy else ""
                    raise UserError(f"{path} is {_shown(value)}: Paceline supports only {supported}{remedy}")
            case RunOption():
                number = key.minimum - 1 if value in (None, key.unset) else _typed(value, int, path)
                if number >= key.minimum:
                    run[key] = number
                    settings |= {key.setting: (number, path)} if key.setting else {}
            case Setting(if_null="unchanged") if value is None:
                pass
            case Setting():
                name = key.name or path.rpartition(".")[2]
                setting = _setting(key, value, hints.get(name, int), path)
                first, first_path = settings.setdefault(name, (setting, path))
                if setting != first:
                    raise UserError(
                        f"{path} is {_shown(setting)}, but {first_path} is {_shown(first)}: "
                        "Paceline has one value for both"
                    )
    return settings, run, ignored


def _flatten(content: dict[str, Any], keys: Keys, above: str = "") -> Iterator[tuple[str, Key, Any]]:
    """Yield the path, the kind and the value of each key. Raise UserError for an unknown key."""
    for name, value in content.items():
        path = f"{above}{name}"
        if name not in keys:
            raise UserError(f"{path}: {unknown('key', str(name), keys)}")
        key = keys[name]
        if isinstance(key, Mapping):
            yield from _flatten(_nested(value, path), key, f"{path}.")
        elif isinstance(key, Setting) and key.unless in content:
            yield path, Ignored(), value
        else:
            yield path, key, float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value


def _nested(value: Any, path: str) -> dict[str, Any]:
    # Networks of skrl are lists of parts.
    parts = value if isinstance(value, list) else [value]
    if len(parts) > 1:
        raise UserError(f"{path} has {len(parts)} parts: Paceline's networks have one")
    group: Any = parts[0] if parts and parts[0] is not None else {}
    if not isinstance(group, dict):
        raise _wrong(path, value, "a group of keys")
    return group


def _setting(key: Setting, value: Any, hint: Any, path: str) -> Any:
    """Convert the value of a key to the value of its setting."""
    if value is None and key.if_null is not None:
        return key.if_null
    if key.values is None:
        return _typed(value, hint, path)
    for allowed, meaning in key.values.items():
        if _bare(value) == _bare(allowed):
            return meaning
    raise _wrong(path, value, _one_of(key.values))


def _typed(value: Any, hint: Any, path: str) -> Any:
    """Convert a value to the type of a setting, or raise UserError."""
    if get_origin(hint) is Literal:
        # skrl takes one name for all layers, or one for each layer.
        names = value if isinstance(value, list) else [value]
        if names and names[0] in get_args(hint) and names == names[:1] * len(names):
            return names[0]
        raise _wrong(path, value, _one_of(get_args(hint)))
    if get_origin(hint) is tuple:
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        raise _wrong(path, value, "a list of whole numbers")
    if type(value) is hint or (hint is float and type(value) is int):
        return hint(value)
    raise _wrong(path, value, {int: "a whole number", float: "a number", bool: "true or false"}[hint])


def _wrong(path: str, value: Any, expected: str) -> UserError:
    return UserError(f"{path} is {_shown(value)}, but must be {expected}")


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
