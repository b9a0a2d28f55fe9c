"""Check values from files and command lines: names, types and ranges.

The allowed range of an option is part of the type of its field, for example `horizon: PerIteration = 24` or
`discount: UnitInterval = 0.99`, and `check` compares the values of a dataclass with these ranges.
"""

import dataclasses
import json
import re
import reprlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NotRequired, get_args, get_type_hints

import yaml
from annotated_types import Ge, Gt, Interval, Le, MinLen
from pydantic import AfterValidator, ConfigDict, FiniteFloat, TypeAdapter, ValidationError, with_config
from pydantic_core import to_json
from typing_extensions import TypedDict

from paceline.errors import UserError, one_line, unknown

LARGEST_COUNT = 2**31
LARGEST_NUMBER = 1e9
"""Largest float in the options of a task. Larger numbers are not useful in float32 physics."""
_WIDEST_LAYER, _MOST_WEIGHTS = 2**13, 2**24
# The configuration of a run has a few thousand bytes. Parsing a million bytes takes seconds.
_LARGEST_FILE = 2**20
_MOST_BITS = 64
# Phrases of pydantic's error messages, and the texts that replace them.
_WORDING = {
    r"^\w+ should": "must",
    r"^Value error, ": "",
    r"greater than or equal to": "at least",
    r"greater than": "above",
    r"less than or equal to": "at most",
    r" after validation": "",
    r"a valid integer": "a whole number",
    r"a valid boolean": "true or false",
    r"a valid (array|tuple)": "a list",
    r"an? (valid )?(object|dictionary)": "a mapping",
    r"a valid ": "a ",
}


def read_text(file: Path) -> str:
    """Return the content of a text file of a run. Raise OSError or ValueError if it is too large or not text."""
    with file.open("rb") as opened:
        content = opened.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise ValueError(f"more than {_LARGEST_FILE} bytes")
    return content.decode()


def parse_yaml(text: str, foreign: bool = False) -> Any:
    """Return plain values from YAML. Raise ValueError with a one-line message if the text is invalid. Only files that
    other programs wrote, with `foreign`, may have aliases, which can make a short file arbitrarily large, and tuples of
    Python, which are read as lists."""
    return _parse(text, partial(yaml.load, Loader=_ForeignLoader if foreign else _TreeLoader))


def parse_json(text: str) -> dict[str, Any]:
    """Return a dict of plain values from JSON. Raise ValueError if the text holds anything else."""
    values = _parse(text, json.loads)
    if not isinstance(values, dict):
        raise ValueError(f"it holds {shown(values)} in place of names and values")
    return values


def _parse(text: str, load: Callable[[str], Any]) -> Any:
    try:
        values = load(text)
        for _, value in _leaves(values, ""):
            # Neither torch nor float can represent larger integers.
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise ValueError(f"it has a number of {value.bit_length()} bits, more than {_MOST_BITS}")
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


class _ForeignLoader(yaml.SafeLoader):
    """Reads tuples as PyYAML writes them. Nothing in the file is executed."""


_ForeignLoader.add_constructor(
    "tag:yaml.org,2002:python/tuple",
    lambda loader, node: loader.construct_sequence(node, deep=True),  # pyright: ignore[reportArgumentType]
)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all keys and values in nested dicts, lists and tuples, each with the name of the value that holds it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield name, key
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, name)
    else:
        yield name, value


def from_dict(kind: type, values: dict[str, Any], source: str) -> Any:
    """Return a dataclass with the given plain values, for example from YAML. Raise UserError for an unknown key, with
    the nearest valid one, for a missing key and for a value that its type does not allow."""
    try:
        # YAML has the types of JSON. From JSON, pydantic's strict mode accepts arrays for tuples and objects for
        # dataclasses, but neither strings nor bools for numbers.
        return kind(**_fields(kind).validate_json(to_json(values, inf_nan_mode="constants"), strict=True))
    except ValidationError as error:
        raise _user_error(error, kind, f"{source}: ") from None
    except ValueError as error:
        # The constructor of the dataclass may raise it too.
        raise UserError(f"{source}: {one_line(error)}") from None


def check(instance: Any, prefix: str) -> None:
    """Raise UserError for the first field of a dataclass whose value violates the constraints in its type. The error
    names the option, which is `prefix` + name. Items of tuples and fields of nested dataclasses are checked too."""
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    try:
        _fields(type(instance)).validate_python(values)
    except ValidationError as error:
        raise _user_error(error, type(instance), prefix) from None


def check_options(task: Any) -> None:
    """Check the options of a task, see `check`. In addition, all floats must be between -1e9 and 1e9."""
    check(task, "--env.")
    for name, value in _leaves(dataclasses.asdict(task), "--env"):
        if isinstance(value, float) and not abs(value) <= LARGEST_NUMBER:
            flag = name.replace("_", "-")
            raise UserError(f"{flag} {value:g} must be between {-LARGEST_NUMBER:g} and {LARGEST_NUMBER:g}")


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise UserError if a value violates the constraints of the type `hint`."""
    try:
        TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise _user_error(error, object, name) from None


@cache
def _fields(kind: type) -> TypeAdapter[Any]:
    """Return the validator of the fields of a dataclass. It creates no instance of the dataclass, whose `__post_init__`
    may call `check`."""
    hints = get_type_hints(kind, include_extras=True)
    types = {f.name: hints[f.name] if is_required(f) else NotRequired[hints[f.name]] for f in dataclasses.fields(kind)}
    config = ConfigDict(extra="forbid", revalidate_instances="always", arbitrary_types_allowed=True)
    return TypeAdapter(with_config(config)(TypedDict(kind.__name__, types)))  # pyright: ignore[reportArgumentType]


def is_required(field: dataclasses.Field) -> bool:
    """Return whether a field of a dataclass has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _user_error(error: ValidationError, kind: Any, prefix: str) -> UserError:
    """Return the error of the first invalid field of the dataclass `kind`. It names the field after `prefix`, its value
    and the allowed values."""
    # A misspelled key is also a missing one.
    errors = sorted(error.errors(include_url=False), key=lambda each: each["type"] == "missing")
    first, path, names = errors[0], errors[0]["loc"], list[str]()
    for part in map(str, path):
        # The other parts are indices of items and alternatives of unions.
        if hint := get_type_hints(kind).get(part):
            names.append(part)
            kind = next(filter(dataclasses.is_dataclass, (hint, *get_args(hint))), kind)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        groups, choices = "".join(f"{name}: " for name in names), [f.name for f in dataclasses.fields(kind)]
        return UserError(f"{prefix}{groups}{unknown('key', str(path[-1]), choices)}")
    if first["type"] == "missing":
        return UserError(f"{prefix}no value for {'.'.join(map(str, path))}")
    name, value, depth = prefix + ".".join(names), shown(first["input"]), len(names)
    # Each alternative of a union has an error for the same value.
    same = (each for each in errors if each["loc"][:depth] == path[:depth] and shown(each["input"]) == value)
    allowed = " or ".join(dict.fromkeys(reworded(each["msg"]) for each in same))
    if prefix.startswith("--"):
        given = first["input"] if isinstance(first["input"], (tuple, list)) else [first["input"]]
        arguments = " ".join(shown(item).removesuffix(".0") for item in given[:20])
        name, value = name.replace("_", "-"), arguments or value
    return UserError(f"{name} {value} {allowed}")


def reworded(message: str) -> str:
    """Return a message of pydantic in the wording of Paceline's errors."""
    for pattern, text in _WORDING.items():
        message = re.sub(pattern, text, message)
    return message


def shown(value: Any) -> str:
    """Return a value as text, shortened to fit into one line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def _check_weights(widths: tuple[int, ...]) -> tuple[int, ...]:
    weights = sum(before * after for before, after in pairwise(widths))
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"are {weights} weights between hidden layers: at most {_MOST_WEIGHTS}")
    return widths


def _check_order(limits: tuple[float, float]) -> tuple[float, float]:
    if limits[0] > limits[1]:
        raise ValueError("must be a minimum and a maximum")
    return limits


Count = Annotated[int, Ge(1), Le(LARGEST_COUNT)]
PerIteration = Annotated[int, Ge(1), Le(2**16)]
"""Number of steps, epochs or minibatches per iteration."""
Bounded = Annotated[float, Interval(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Positive = Annotated[FiniteFloat, Gt(0)]
NonNegative = Annotated[FiniteFloat, Ge(0)]
UnitInterval = Annotated[FiniteFloat, Interval(ge=0, le=1)]
PhysicsRate = Annotated[FiniteFloat, Interval(ge=1.0, le=1e5)]
"""Number of physics steps per second."""
Range = Annotated[tuple[float, float], AfterValidator(_check_order)]
"""Minimum and maximum of a range."""
NonNegativeRange = Annotated[tuple[NonNegative, NonNegative], AfterValidator(_check_order)]
LayerWidth = Annotated[int, Ge(1), Le(_WIDEST_LAYER)]
"""Width of a layer of a network."""
LayerWidths = Annotated[tuple[LayerWidth, ...], MinLen(1), AfterValidator(_check_weights)]
"""Widths of the hidden layers of a network."""
RecurrentLayers = Annotated[int, Ge(1), Le(16)]
"""Number of layers of a recurrent network."""
