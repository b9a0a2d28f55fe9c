"""Values from outside: known by name, of the right kind, within bounds."""

import dataclasses
import json
import math
import reprlib
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from paceline.errors import UserError, one_line, unknown

LARGEST_COUNT = 2**31
MOST_PER_ITERATION = 2**16
"""Steps, epochs or minibatches."""
LARGEST_NUMBER = 1e9
"""Largest absolute value of a task's option. Physics in float32 cannot use larger numbers."""
PHYSICS_RATES = (1.0, 1e5)
WIDEST_LAYER = 2**13
MOST_WEIGHTS = 2**24
"""Between hidden layers."""
# A run's configuration has a few thousand bytes. Reading a million takes seconds.
_LARGEST_FILE = 2**20
_MOST_BITS = 64


def read_text(file: Path) -> str:
    """A text file of a run; raises OSError or ValueError if it cannot be one."""
    with file.open("rb") as opened:
        content = opened.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise ValueError(f"more than {_LARGEST_FILE} bytes")
    return content.decode()


def parse_yaml(text: str, aliases: bool = False) -> Any:
    """Return the plain values of a YAML text. Raise ValueError with one line if it holds anything else. Aliases can
    expand a short file without limit, so they are refused unless `aliases` is set."""
    try:
        values = yaml.load(text, Loader=yaml.SafeLoader if aliases else _TreeLoader)
        _check_numbers(values)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except Exception as error:
        # For some malformed numbers and dates PyYAML raises errors of other types than its own.
        raise ValueError(one_line(error)) from None
    return values


def parse_json(text: str) -> dict[str, Any]:
    """A dict of plain values from JSON; raises ValueError if that is not what it holds."""
    try:
        values = json.loads(text)
        _check_numbers(values)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(values, dict):
        raise ValueError(f"it holds {shown(values)} in place of names and values")
    return values


class _TreeLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*), which a run's configuration never has")
        return super().compose_node(parent, index)


def _check_numbers(value: Any) -> None:
    """Refuse whole numbers that neither torch nor float can hold."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(key)
            _check_numbers(item)
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item)
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"it has a number of {value.bit_length()} bits, more than {_MOST_BITS}")


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
            check_type(converted[key], hints[key], collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        except RecursionError:
            raise UserError(f"{source}: {key} contains itself, or is nested too deeply") from None
        except TypeCheckError as error:
            raise UserError(f"{source}: {key} is {shown(plain)}, but {one_line(error)}") from None
        if _bool_for_number(converted[key], hints[key]):
            raise UserError(f"{source}: {key} is {shown(plain)}, but must be a number")
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
    # YAML writes a float without a fraction as a whole number.
    return float(value) if type(value) is int and hint is float else value


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


def _bool_for_number(value: Any, hint: Any) -> bool:
    """Return whether a value has a bool in place of a number. typeguard accepts it: bool is a subclass of int."""
    kinds = (hint, *get_args(hint))
    items = value if isinstance(value, tuple) else (value,)
    return any(isinstance(item, bool) for item in items) and bool not in kinds and (int in kinds or float in kinds)


def shown(value: Any) -> str:
    """A value from outside, short enough for one line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def at_least_one(flag: str, value: int, most: int = LARGEST_COUNT) -> None:
    if value < 1:
        raise UserError(f"{flag} {value} must be at least 1")
    if value > most:
        raise UserError(f"{flag} {value} must be at most {most}")


def above_zero(flag: str, value: float, most: float = math.inf) -> None:
    if not 0.0 < value < math.inf:
        raise UserError(f"{flag} {value:g} must be above 0, and finite")
    if value > most:
        raise UserError(f"{flag} {value:g} must be at most {most:g}")


def within_unit(flag: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UserError(f"{flag} {value:g} must be between 0 and 1")


def not_negative(flag: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise UserError(f"{flag} {value:g} must not be negative, and finite")


def physics_rate(flag: str, value: float) -> None:
    lowest, highest = PHYSICS_RATES
    if not lowest <= value <= highest:
        raise UserError(f"{flag} {value:g} must be between {lowest:g} and {highest:g} physics steps per second")


def finite(flag: str, value: float) -> None:
    if not abs(value) <= LARGEST_NUMBER:
        raise UserError(f"{flag} {value:g} must be between {-LARGEST_NUMBER:g} and {LARGEST_NUMBER:g}")


def widths(flag: str, value: tuple[int, ...]) -> None:
    given = " ".join(map(str, value[:20]))
    if not value or min(value) < 1:
        raise UserError(f"{flag} {given} is not a list of widths: give for example 64 64")
    if max(value) > WIDEST_LAYER:
        raise UserError(f"{flag} {given}: a layer has at most {WIDEST_LAYER} units")
    weights = sum(before * after for before, after in pairwise(value))
    if weights > MOST_WEIGHTS:
        raise UserError(f"{flag} {given} are {weights} weights between hidden layers: at most {MOST_WEIGHTS}")


def options(check: Callable[[str, Any], None], task: Any, *names: str) -> None:
    """Hold some of a task's own options to a check."""
    for name in names:
        check(f"--env.{name.replace('_', '-')}", getattr(task, name))


def finite_options(task: Any) -> None:
    """Hold all numbers among a task's options to `finite`."""
    numbers = (f.name for f in dataclasses.fields(task) if isinstance(getattr(task, f.name), float))
    options(finite, task, *numbers)


def flag(settings: Any, name: str) -> str:
    """How the command line calls a learner's setting."""
    return f"--{settings.flags}.{name.replace('_', '-')}"
