"""Values from outside: known by name, of the right kind, within bounds."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_type_hints

from typeguard import TypeCheckError, check_type

from paceline.errors import UserError, unknown


def from_dict(kind: type, values: dict[str, Any], source: str) -> Any:
    """A dataclass from plain values; an unknown key is an error that names the nearest valid one, and so is a value of
    the wrong type."""
    known, hints = {f.name: f for f in dataclasses.fields(kind)}, get_type_hints(kind)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{source}: {unknown('key', key, known)}")
        try:
            check_type(value, hints[key])
        except TypeCheckError as error:
            raise UserError(f"{source}: {key} is {value!r}, but {str(error).splitlines()[0]}") from None
    return kind(**values)


def at_least_one(flag: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{flag} {value} must be at least 1")


def above_zero(flag: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise UserError(f"{flag} {value:g} must be above 0, and finite")


def within_unit(flag: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UserError(f"{flag} {value:g} must be between 0 and 1")


def not_negative(flag: str, value: float) -> None:
    if not value >= 0.0:
        raise UserError(f"{flag} {value:g} must not be negative")


def widths(flag: str, value: tuple[int, ...]) -> None:
    if not value or min(value) < 1:
        raise UserError(f"{flag} {value} is not a list of widths: give for example 64 64")


def options(check: Callable[[str, Any], None], task: Any, *names: str) -> None:
    """Hold some of a task's own options to a check."""
    for name in names:
        check(f"--env.{name.replace('_', '-')}", getattr(task, name))


def flag(settings: Any, name: str) -> str:
    """How the command line calls a learner's setting."""
    return f"--{settings.flags}.{name.replace('_', '-')}"
