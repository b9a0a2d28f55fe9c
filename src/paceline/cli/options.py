"""Parse the options of one command with tyro and report errors in one line."""

import dataclasses
import difflib
import re
from itertools import takewhile
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro import _errors
from tyro.conf import FlagCreatePairsOff, Positional

from paceline.errors import UserError
from paceline.validation import shown

T = TypeVar("T")
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
        raise UserError(_explain(event, argv))

    with _errors.on_parse_error(refuse):
        return tyro.cli(kind, args=argv, prog=f"paceline {command}", return_unknown_args=True, add_help=add_help)  # pyright: ignore[reportReturnType]


def _explain(event: Any, argv: list[str]) -> str:
    """Return what is wrong with the arguments."""
    if isinstance(event, _errors.MissingArgs):
        argument = event.missing_arguments[0].arg
        name = argument.lowered.metavar if argument.is_positional() else argument.display_name()
        return f"{name} is missing: `{event.prog} --help` describes it"
    name = event.argument.display_name()
    if isinstance(event, _errors.InvalidChoice):
        return f"{name} {event.value}: choose from {', '.join(event.choices)}"
    count = event.argument.lowered.nargs
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


def option_names(kind: type, prefix: str = "--") -> list[str]:
    """Return the names of all options of a dataclass and of the dataclasses in its fields."""
    names, hints = list[str](), get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], field.name.replace("_", "-")
        plain, *annotations = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if isinstance(plain, type) and dataclasses.is_dataclass(plain):
            names += option_names(plain, f"{prefix}{name}.")
        elif Positional not in annotations:
            names.append(prefix + name)
            if plain is bool and FlagCreatePairsOff not in annotations:
                names.append(f"{prefix}no-{name}")
    return names
