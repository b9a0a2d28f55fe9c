"""Kinds of keys in the configuration files of RSL-RL, RL-Games and skrl."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEEP = object()
"""Means that a setting stays as it is."""


@dataclass(frozen=True)
class Setting:
    """Becomes a setting of the learner's; several keys of one setting must agree."""

    name: str
    words: Mapping[Any, Any] | None = None
    """What the file may say, and what it means to us; by default any value of the setting's type."""
    null: Any = None
    """What null means, as in `words`; by default it is refused."""
    unless: str = ""
    """Where the file has this key beside it, that one counts."""


@dataclass(frozen=True)
class RunOption:
    """Becomes an option of the run."""

    name: str
    least: int = 1
    """What is below it, such as -1, leaves the choice to the library, and here to Paceline."""
    in_steps: bool = False
    """Counted in steps of each world, where ours are iterations."""
    unset: tuple[str, ...] = ()
    """Words that do the same."""
    setting: str = ""
    """The learner's setting that it becomes too."""


class Only:
    """Paceline supports these values alone, which are what most files have; if there is none, it lacks the thing."""

    def __init__(self, *values: Any, remedy: str = ""):
        self.values, self.remedy = values, remedy


@dataclass(frozen=True)
class Ours:
    """Paceline's own business, so the user is told that it has no effect."""

    note: str = ""


Key = Setting | RunOption | Only | Ours

Group = Mapping[str, Any]
"""Keys by name, or groups of them."""


def same(*names: str) -> dict[str, Key]:
    """Settings of the same names."""
    return {name: Setting(name) for name in names}


def ours(*names: str) -> dict[str, Key]:
    return {name: Ours() for name in names}
