"""Parse the options of one command with tyro and report errors in one line."""

import dataclasses
import difflib
import io
import re
from contextlib import redirect_stderr
from typing import Annotated, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, Positional

from paceline.errors import UserError

T = TypeVar("T")

# Error messages of tyro as regular expressions, and the texts that replace them.
_MESSAGES = {
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: '(.*)'": r"\1 \2 must be an integer",
    r"Error parsing (\S+): could not convert string to float: '(.*)'": r"\1 \2 must be a number",
    r"Error parsing (\S+): no type matching \{None\}\|INT .* from \['(.*)'\]\.": r"\1 \2 must be an integer",
    r"Missing value for argument '(\S+)'\. Expected 1 values\.": r"\1 needs a value",
    r"Missing value for argument '(\S+)'\. Expected (\d+) values\.": r"\1 needs \2 values",
    r"Missing from paceline \w+: (\S+) (.*)\. \(required\)": r"\1 is missing: \2",
}


def parse_options(kind: type[T], argv: list[str], command: str) -> T:
    """Return an instance of the dataclass `kind`. Print the help page and exit if `argv` contains --help."""
    options, rest = parse_known_options(kind, argv, command, add_help=True)
    if rest:
        raise _unexpected(rest[0], option_names(kind), command)
    return options


def parse_known_options(kind: type[T], argv: list[str], command: str, add_help: bool = False) -> tuple[T, list[str]]:
    """Return an instance of the dataclass `kind` and the arguments that are not options of it. Without `add_help`,
    --help is one of them."""
    # tyro has no public interface for errors. It prints them to stderr in a box and exits with 2.
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.cli(kind, args=argv, prog=f"paceline {command}", return_unknown_args=True, add_help=add_help)  # pyright: ignore[reportReturnType]
    except SystemExit as end:
        if not end.code:
            raise
        message = _first_paragraph(printed.getvalue())
        for pattern, text in _MESSAGES.items():
            message = re.sub(f"^{pattern}$", text, message)
        raise UserError(message) from None


def _unexpected(argument: str, names: list[str], command: str) -> UserError:
    """Return the error for an argument that is not an option of the command. It suggests the nearest options."""
    argument, help_page = argument[:80], f"`paceline {command} --help` lists the options"
    if not argument.startswith("-"):
        return UserError(f"unexpected argument {argument!r}: {help_page}")
    name = argument.partition("=")[0].replace("_", "-")
    near = " or ".join(map(repr, difflib.get_close_matches(name, names)))
    return UserError(f"unknown option {name!r}: {f'did you mean {near}? ' if near else ''}{help_page}")


def _first_paragraph(box: str) -> str:
    """Return the first paragraph of a text in a box, without the title, as one line."""
    lines = [line.strip("│╭╮╰╯─ ") for line in box.splitlines()[1:]]
    end = lines.index("") if "" in lines else len(lines)
    return " ".join(" ".join(lines[:end]).split())


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
