"""Check values from files and command lines: names, types and ranges.

The allowed range of an option is part of the type of its field, for example `horizon: PerIteration = 24` or
`discount: UnitInterval = 0.99`, and `check` compares the values of a dataclass with these ranges.
"""

import dataclasses
import json
import math
import reprlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import isfunction
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Gt, Interval, Le
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from paceline.errors import UserError, one_line, unknown

LARGEST_COUNT = 2**31
# Range of a float without another constraint. Larger numbers are not useful in float32 physics.
LARGEST_NUMBER = 1e9
_UNCONSTRAINED = Interval(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)
_WIDEST_LAYER, _MOST_WEIGHTS = 2**13, 2**24
# The configuration of a run has a few thousand bytes. Parsing a million bytes takes seconds.
_LARGEST_FILE = 2**20
_MOST_BITS = 64


def read_text(file: Path) -> str:
    """Return the content of a text file of a run. Raise OSError or ValueError if it is too large or not text."""
    with file.open("rb") as opened:
        content = opened.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise ValueError(f"more than {_LARGEST_FILE} bytes")
    return content.decode()


def parse_yaml(text: str, aliases: bool = False) -> Any:
    """Return plain values from YAML. Raise ValueError with a one-line message if the text is invalid. Aliases are
    refused by default, because they can make a short file arbitrarily large."""
    return _parse(text, partial(yaml.load, Loader=yaml.SafeLoader if aliases else _TreeLoader))


def parse_json(text: str) -> dict[str, Any]:
    """Return a dict of plain values from JSON. Raise ValueError if the text holds anything else."""
    values = _parse(text, json.loads)
    if not isinstance(values, dict):
        raise ValueError(f"it holds {shown(values)} in place of names and values")
    return values


def _parse(text: str, load: Callable[[str], Any]) -> Any:
    try:
        values = load(text)
        _check_numbers(values)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except Exception as error:
        # PyYAML raises YAMLError, and other exceptions for some malformed numbers and dates.
        raise ValueError(one_line(error)) from None
    return values


class _TreeLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*), which a run's configuration never has")
        return super().compose_node(parent, index)


def _check_numbers(value: Any) -> None:
    """Raise ValueError for integers that neither torch nor float can represent."""
    items = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else ()
    for item in items:
        _check_numbers(item)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"it has a number of {value.bit_length()} bits, more than {_MOST_BITS}")


def from_dict(kind: type, values: dict[str, Any], source: str) -> Any:
    """Return a dataclass with the given plain values, for example from YAML. Raise UserError for an unknown key, with
    the nearest valid one, for a missing key and for a value of the wrong type."""
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
    """Convert lists and dicts to the containers of a type, because YAML has neither tuples nor dataclasses. A list
    becomes a tuple unless the type is a list. The caller checks that the result has the type."""
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
    """Convert a value to the first of several types that it fits, or return it unchanged."""
    for hint in hints:
        with suppress(UserError, TypeCheckError):
            return check_type(_convert(value, hint, source), hint)
    return value


def _item_types(hint: Any, count: int) -> tuple[Any, ...]:
    """Return the type of each item of a list or tuple; `Any` if the type of the container does not specify it."""
    if _is_named_tuple(hint):
        types = tuple(get_type_hints(hint, include_extras=True).values())
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
    """Return a value as text, shortened to fit into one line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def check(instance: Any, prefix: str, bounded: bool = False) -> None:
    """Raise UserError for the first field of a dataclass whose value violates the constraints in its type. The error
    names the option, which is `prefix` + name. Items of tuples and fields of nested dataclasses are checked too. A
    float without constraints, or with `bounded` every float, must be between -1e9 and 1e9."""
    hints = get_type_hints(type(instance), include_extras=True)
    for field in dataclasses.fields(instance):
        flag = f"{prefix}{field.name.replace('_', '-')}"
        check_value(flag, getattr(instance, field.name), hints[field.name], bounded)


def check_options(task: Any) -> None:
    """Check the options of a task, see `check`."""
    check(task, "--env.", bounded=True)


def check_value(flag: str, value: Any, hint: Any, bounded: bool = False) -> None:
    """Raise UserError if a value violates the constraints of the type `hint`. A constraint is one of annotated_types,
    or a function that raises UserError for a flag and a value that is not allowed."""
    if value is None:
        return
    plain, constraints = _constraints(hint)
    for constraint in constraints:
        if isfunction(constraint):
            constraint(flag, value)
        else:
            _check_number(flag, value, constraint)
    if dataclasses.is_dataclass(value):
        check(value, f"{flag}.", bounded)
    elif isinstance(value, (tuple, list)):
        for item, item_hint in zip(value, _item_types(plain, len(value)), strict=True):
            check_value(flag, item, item_hint, bounded)
    elif isinstance(value, float) and (bounded or not constraints):
        _check_number(flag, value, _UNCONSTRAINED)


def _constraints(hint: Any) -> tuple[Any, list[Any]]:
    """Return a type without `Annotated` and `| None`, and the constraints that annotate it."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        plain, inner = _constraints(arguments[0])
        known = (Ge, Gt, Interval, Le)
        return plain, inner + [item for item in arguments[1:] if isfunction(item) or isinstance(item, known)]
    if get_origin(hint) in (Union, UnionType) and len(arguments) == 2 and type(None) in arguments:
        return _constraints(next(argument for argument in arguments if argument is not type(None)))
    return hint, []


def _check_number(flag: str, value: float, constraint: Any) -> None:
    """Compare a number with a constraint of annotated_types. NaN and infinity violate every constraint."""
    gt, ge, le = (getattr(constraint, name, None) for name in ("gt", "ge", "le"))
    above_minimum = (gt is None or value > gt) and (ge is None or value >= ge)
    if above_minimum and (le is None or value <= le) and (isinstance(value, int) or math.isfinite(value)):
        return
    if le is None:
        allowed = f"be above {gt:g}" if gt is not None else f"be at least {ge:g}" if ge else "not be negative"
        allowed += ", and finite" * isinstance(value, float)
    else:
        allowed = f"be between {_short(ge)} and {_short(le)}" if ge is not None else f"be at most {_short(le)}"
    raise UserError(f"{flag} {_short(value)} must {allowed}")


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _check_widths(flag: str, value: tuple[int, ...]) -> None:
    given = " ".join(map(str, value[:20]))
    if not value or min(value) < 1:
        raise UserError(f"{flag} {given} is not a list of widths: give for example 64 64")
    if max(value) > _WIDEST_LAYER:
        raise UserError(f"{flag} {given}: a layer has at most {_WIDEST_LAYER} units")
    weights = sum(before * after for before, after in pairwise(value))
    if weights > _MOST_WEIGHTS:
        raise UserError(f"{flag} {given} are {weights} weights between hidden layers: at most {_MOST_WEIGHTS}")


def _check_order(flag: str, value: tuple[float, float]) -> None:
    low, high = value
    if low > high:
        raise UserError(f"{flag} {low:g} {high:g} must be a minimum and a maximum")


Count = Annotated[int, Ge(1), Le(LARGEST_COUNT)]
PerIteration = Annotated[int, Ge(1), Le(2**16)]
"""Number of steps, epochs or minibatches per iteration."""
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
UnitInterval = Annotated[float, Interval(ge=0, le=1)]
PhysicsRate = Annotated[float, Interval(ge=1.0, le=1e5)]
"""Number of physics steps per second."""
Range = Annotated[tuple[float, float], _check_order]
"""Minimum and maximum of a range."""
NonNegativeRange = Annotated[tuple[NonNegative, NonNegative], _check_order]
LayerWidths = Annotated[tuple[int, ...], _check_widths]
"""Widths of the hidden layers of a network."""
