"""Parse the options of one command with tyro and report errors in one line."""

import dataclasses
import difflib
import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro import _errors
from tyro.conf import FlagCreatePairsOff, Positional
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from paceline.errors import UserError
from paceline.validation import shown

T = TypeVar("T")
_MIN_COLUMNS = 40
"""Minimum width of a help page. The lines of a narrower terminal are wrapped by the terminal."""
_MOST_VALUES = 20
"""Maximum number of values of an option that an error shows."""


def parse_options(kind: type[T], argv: list[str], command: str) -> T:
    """Return an instance of the dataclass `kind`. Print the help page and exit if `argv` contains --help."""
    options, rest = parse_known_options(kind, argv, command, add_help=True)
    if rest:
        raise _unexpected(rest[0], option_names(kind), command)
    return options


def parse_known_options(kind: type[T], argv: list[str], command: str, add_help: bool = False) -> tuple[T, list[str]]:
    """Return an instance of the dataclass `kind` and the arguments that are not options of it. Without `add_help`,
    --help is one of them."""

    def refuse(event: _errors.ParseErrorEvent) -> None:
        if explanation := _explain(event, argv):
            raise UserError(explanation)

    with _errors.on_parse_error(refuse), _minimum_width():
        return tyro.cli(  # pyright: ignore[reportReturnType]
            kind,
            args=argv,
            prog=f"paceline {command}",
            description=_wrapped(inspect.getdoc(kind) or ""),
            return_unknown_args=True,
            add_help=add_help,
            registry=_REGISTRY,
        )


@contextmanager
def _minimum_width() -> Iterator[None]:
    """Let tyro find at least `_MIN_COLUMNS` columns inside the context: it does not return if the terminal is narrower
    than the names of the options."""
    before = os.environ.get("COLUMNS")
    if shutil.get_terminal_size().columns < _MIN_COLUMNS:
        os.environ["COLUMNS"] = str(_MIN_COLUMNS)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before


_REGISTRY = ConstructorRegistry()


class _OwnRule(StructTypeInfo):
    """A dataclass that tyro describes by its own rule."""


@_REGISTRY.struct_rule
def _join_lines(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Make each help text of a dataclass one paragraph. tyro keeps the line breaks of docstrings that are indented."""
    if isinstance(info, _OwnRule) or not dataclasses.is_dataclass(info.type):
        return None
    spec = ConstructorRegistry.get_struct_spec(_OwnRule(**vars(info)))
    assert isinstance(spec, StructConstructorSpec)
    fields = (dataclasses.replace(field, helptext=partial(_paragraph, field.helptext)) for field in spec.fields)
    return dataclasses.replace(spec, fields=tuple(fields))


def _paragraph(text: str | Callable[[], str | None] | None) -> str | None:
    text = text() if callable(text) else text
    return text and " ".join(text.split())


def _wrapped(text: str) -> str:
    """Return paragraphs in lines that fit the terminal. They are indented, because tyro joins other lines."""
    width = shutil.get_terminal_size().columns
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n".join(textwrap.fill(each, width, initial_indent="  ", subsequent_indent="  ") for each in paragraphs)


def _explain(event: _errors.ParseErrorEvent, argv: list[str]) -> str:
    """Return what is wrong with the arguments; empty for an event that tyro describes itself."""
    if isinstance(event, _errors.MissingArgs):
        argument = event.missing_arguments[0].arg
        name = argument.lowered.metavar if argument.is_positional() else argument.display_name()
        return f"{name} is missing: `{event.prog} --help` describes it"
    if not isinstance(event, (_errors.InvalidChoice, _errors.BadValue, _errors.InstantiationFailure)):
        return ""
    if event.argument is None:
        # The constructor of a dataclass has raised an error.
        return " ".join(event.message.split())
    name, count = event.argument.display_name(), event.argument.lowered.nargs
    if isinstance(event, _errors.InvalidChoice):
        return f"{name} {event.value}: choose from {', '.join(event.choices)}"
    if isinstance(event, _errors.BadValue):
        return f"{name} needs {'a value' if count == 1 else f'{count} values'}"
    kind = "numbers" if float in _leaf_types(event.argument.field.type_stripped) else "integers"
    allowed = {1: {"numbers": "a number", "integers": "an integer"}[kind], "*": kind}.get(count, f"{count} {kind}")
    values = [shown(value) for value in _values_of(name, argv)[:_MOST_VALUES]]
    return f"{' '.join([name, *values])} must be {allowed}"


def _leaf_types(hint: Any) -> set[Any]:
    """Return the types in a nested type such as tuple[int, ...] | None."""
    parts = get_args(hint)
    return set[Any]().union(*map(_leaf_types, parts)) if parts else {hint}


def _values_of(name: str, argv: list[str]) -> list[str]:
    """Return the values that follow the last use of an option."""
    spelled = [argument.partition("=")[0].replace("_", "-") for argument in argv]
    place = max(index for index, each in enumerate(spelled) if each == name)
    given = argv[place].partition("=")[2]
    if given:
        return [given]
    return list(takewhile(lambda value: not re.match("--[a-z]", value), argv[place + 1 :]))


def _unexpected(argument: str, names: list[str], command: str) -> UserError:
    """Return the error for an argument that is not an option of the command. It suggests the nearest options."""
    argument, help_page = argument[:80], f"`paceline {command} --help` lists the options"
    if not argument.startswith("-"):
        return UserError(f"unexpected argument {argument!r}: {help_page}")
    name = argument.partition("=")[0].replace("_", "-")
    near = " or ".join(map(repr, difflib.get_close_matches(name, names)))
    return UserError(f"unknown option {name!r}: {f'did you mean {near}? ' if near else ''}{help_page}")


def option_names(kind: type) -> list[str]:
    """Return the names of all options of a dataclass and of the dataclasses in its fields."""
    return [name for name, _ in _options(kind)]


def switch_names(kind: type) -> set[str]:
    """Return the names of the options that have no value."""
    return {name for name, is_switch in _options(kind) if is_switch}


def _options(kind: type, prefix: str = "--") -> Iterator[tuple[str, bool]]:
    """Yield the name of each option, and whether it is a switch, which has no value."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], field.name.replace("_", "-")
        plain, *annotations = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if isinstance(plain, type) and dataclasses.is_dataclass(plain):
            yield from _options(plain, f"{prefix}{name}.")
        elif Positional not in annotations:
            yield prefix + name, plain is bool
            if plain is bool and FlagCreatePairsOff not in annotations:
                yield f"{prefix}no-{name}", True
