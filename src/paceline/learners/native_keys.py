"""Keys of the configuration files of RSL-RL, RL-Games and skrl.

`native_keys.yaml` in the folder of a learner lists all keys that such a file may have, the most important ones first.
Its tags are the classes below: !setting, !run, !only, !ignored and !group, followed by the first field of the class or
by several fields in braces.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from paceline.learners.learner import LEARNERS


@dataclass(frozen=True)
class Setting:
    """Key that sets a setting of the learner. Several keys of one setting must agree."""

    name: str = ""
    """Name of the setting; by default that of the key."""
    values: Mapping[Any, Any] | None = None
    """Allowed values of the key, mapped to values of the setting; by default any value of its type."""
    if_null: Any = None
    """Value of the setting for null, or "unchanged"; by default null is an error unless the setting may be None."""
    unless: str = ""
    """Name of a key of the same group that takes precedence over this one."""
    learner: str = ""
    """Only learner that has this setting; the others ignore the key."""
    note: str = ""
    """Reason why the others ignore it."""
    algorithm: bool = False
    """True if the key names the algorithm: a file of another algorithm is refused for this reason alone."""
    ignored_if: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the same group and the values with which this key has no effect. Absent keys are null."""


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
    algorithm: bool = False
    """See `Setting`."""
    ignored_if: Mapping[str, Any] = field(default_factory=dict)
    """See `Setting`."""


@dataclass(frozen=True)
class Ignored:
    """Key without effect, because Paceline does this itself. It is listed at the start of a run."""

    note: str = ""


Key = Setting | RunOption | Only | Ignored
Keys = Mapping[str, Any]
"""Keys, and groups of keys as nested mappings, by name."""


class Group(dict[str, Any]):
    """Group of keys that needs more than a plain mapping."""

    def __init__(
        self,
        keys: dict[str, Any],
        ignored_if: Mapping[str, Any] | None = None,
        note: str = "",
        parts: str = "",
        columns: bool = False,
        optional: bool = False,
    ):
        super().__init__(keys)
        self.ignored_if = ignored_if or {}
        """Keys beside this group and the values with which the group has no effect."""
        self.note = note
        """Reason why it has no effect then."""
        self.parts = parts
        """Setting that holds the whole group as YAML, if it is a list of other parts than these keys describe."""
        self.columns = columns
        """True if the file has a list of such groups: the settings are tuples with one item from each."""
        self.optional = optional
        """True if the settings of this group have no effect in a file without it."""


_KINDS: dict[str, Any] = {"setting": Setting, "run": RunOption, "only": Only, "ignored": Ignored, "group": Group}


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


def keys_by_path(keys: Keys, above: str = "") -> Iterator[tuple[str, Key]]:
    """Yield each key with its path."""
    for name, key in keys.items():
        if isinstance(key, Mapping):
            yield from keys_by_path(key, f"{above}{name}.")
        else:
            yield f"{above}{name}", key


def support_table(learner: str) -> str:
    """Return the keys of which Paceline supports only some values, as a table in Markdown. docs/config_files.md has
    it."""
    rows = ["| key | supported | otherwise |", "|---|---|---|"]
    for path, key in keys_by_path(native_keys(learner)):
        if isinstance(key, Only):
            rows.append(f"| `{path}` | {supported(key, '`')} | {key.remedy} |")
        elif isinstance(key, Setting) and key.values is not None:
            rows.append(f"| `{path}` | {', '.join(f'`{shown(value)}`' for value in key.values or [None])} | |")
    return "\n".join(rows)


def supported(key: Only, quote: str = "") -> str:
    """Return the supported values of a key as text."""
    return " or ".join(f"{quote}{shown(value)}{quote}" for value in key.values) or "files without it"


def shown(value: Any) -> str:
    """Format a value as YAML in one line."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def bare(value: Any) -> Any:
    """Return the name of a class in lower case and without its module: the libraries ignore case."""
    return re.split(r"[.:]", value)[-1].lower() if isinstance(value, str) else value
