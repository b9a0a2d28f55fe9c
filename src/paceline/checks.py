"""Values from outside: known by name, of the right kind, within bounds."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from typeguard import TypeCheckError, check_type

from paceline.errors import UserError, unknown


def from_dict(kind: type, values: dict[str, Any], source: str) -> Any:
    """Return a dataclass made of plain values, such as YAML holds; an unknown key is an error that names the nearest
    valid one, and so is a value of the wrong type."""
    known, hints = {f.name: f for f in dataclasses.fields(kind)}, get_type_hints(kind)
    converted = {}
    for key, plain in values.items():
        if key not in known:
            raise UserError(f"{source}: {unknown('key', str(key), known)}")
        try:
            converted[key] = _convert(plain, hints[key], f"{source}: {key}")
            check_type(converted[key], hints[key])
        except RecursionError:
            raise UserError(f"{source}: {key} contains itself, or is nested too deeply") from None
        except TypeCheckError as error:
            raise UserError(f"{source}: {key} is {converted[key]!r}, but {str(error).splitlines()[0]}") from None
    missing = [name for name, f in known.items() if name not in values and is_required(f)]
    if missing:
        raise UserError(f"{source}: no value for {', '.join(missing)}")
    return kind(**converted)


def is_required(field: dataclasses.Field) -> bool:
    """Return whether a field of a dataclass has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(value: Any, hint: Any, source: str) -> Any:
    """Return a plain value in the containers of its type: YAML has neither tuples nor dataclasses. A list becomes a
    tuple unless its type is a list. Whether the result fits its type is for the caller to check."""
    if get_origin(hint) in (Union, UnionType):
        return _convert_to_one_of(value, get_args(hint), source)
    if isinstance(value, dict):
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return from_dict(hint, value, source)
        item = get_args(hint)[1] if len(get_args(hint)) == 2 else Any
        return {key: _convert(each, item, source) for key, each in value.items()}
    if type(value) in (list, tuple):
        types = _item_types(hint, len(value))
        items = [_convert(each, item, source) for each, item in zip(value, types, strict=True)]
        if _is_named_tuple(hint) and len(items) == len(hint._fields):
            return hint(*items)
        return items if list in (hint, get_origin(hint)) else tuple(items)
    return value


def _convert_to_one_of(value: Any, hints: tuple[Any, ...], source: str) -> Any:
    """Return the value as the first of some types that it fits, or unchanged."""
    for hint in hints:
        with suppress(UserError, TypeCheckError):
            return check_type(_convert(value, hint, source), hint)
    return value


def _item_types(hint: Any, count: int) -> tuple[Any, ...]:
    """Return the type of each item of a list or tuple; `Any` where the type does not say."""
    if _is_named_tuple(hint):
        types = tuple(get_type_hints(hint).values())
    elif get_origin(hint) is tuple and get_args(hint)[-1:] != (...,):
        types = get_args(hint)
    else:
        types = get_args(hint)[:1] * count
    return types if len(types) == count else (Any,) * count


def _is_named_tuple(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


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
