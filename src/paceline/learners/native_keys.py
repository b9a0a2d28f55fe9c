"""Kinds of keys in the configuration files of RSL-RL, RL-Games and skrl."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEEP = object()
"""Value of a key that leaves the setting unchanged."""


@dataclass(frozen=True)
class Setting:
    """Key that sets a setting of the learner. Several keys of one setting must agree."""

    name: str
    values: Mapping[Any, Any] | None = None
    """Allowed values of the key, mapped to values of the setting; by default any value of its type."""
    null: Any = None
    """Value of the setting for null; by default null is an error."""
    unless: str = ""
    """Name of a key of the same group that takes precedence over this one."""


@dataclass(frozen=True)
class RunOption:
    """Key that sets an option of the run. Null and values below `minimum`, such as -1, leave it unset."""

    name: str
    minimum: int = 1
    auto: bool = False
    """True if the value "auto" leaves the option unset as well."""
    in_steps: bool = False
    """True if the key counts steps per env; the option counts iterations."""
    setting: str = ""
    """Setting of the learner that the key sets as well."""


class Only:
    """Key of which Paceline supports only these values, usually the default. Without values the key is an error."""

    def __init__(self, *values: Any, remedy: str = ""):
        self.values, self.remedy = values, remedy


@dataclass(frozen=True)
class Ignored:
    """Key without effect, because Paceline does this itself. It is listed at the start of a run."""

    note: str = ""


Key = Setting | RunOption | Only | Ignored

Keys = Mapping[str, Any]
"""Keys, and groups of keys as nested mappings, by name."""


def same(names: str) -> dict[str, Key]:
    """Return keys that set the settings of the same names, which are separated by spaces."""
    return {name: Setting(name) for name in names.split()}


def only(value: Any, names: str) -> dict[str, Key]:
    return {name: Only(value) for name in names.split()}


def ignored(names: str) -> dict[str, Key]:
    return {name: Ignored() for name in names.split()}
