"""Options and errors of envs that another library makes, such as those of `gymnasium:ID`."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from paceline.errors import UserError, one_line
from paceline.validation import parse_yaml


def parse_options(options: tuple[str, ...], example: str) -> dict[str, Any]:
    """Return the values of --env.options, which are KEY=VALUE with values in YAML. An error shows `example`."""
    found = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise UserError(f"--env.options {option}: give KEY=VALUE, for example {example}")
        try:
            found[key] = parse_yaml(value)
        except ValueError as error:
            raise UserError(f"--env.options {option}: not a value: {error}") from None
    return found


def import_library(task: str, module: str, remedy: str) -> Any:
    """Return a module that a task needs. Raise UserError if it cannot be imported, with `remedy` if it was not
    found."""
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        # Modules raise their own errors, and some end the process.
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        text = f"it was not found; {remedy}" if is_missing else reason(error)
        raise UserError(f"{task}: the module {module} cannot be imported: {text}") from error


def import_registering(task: str, module: str) -> None:
    """Import a module of the user that registers envs, the MODULE of `gymnasium:MODULE:ID`."""
    remedy = "install it, or add its directory to PYTHONPATH: the current directory is not searched"
    import_library(task, module, remedy)


@contextmanager
def making(library: str, name: str, options: tuple[str, ...]) -> Iterator[None]:
    """Make an env of a library. Its exceptions become a UserError with their cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        given = f" with {' '.join(options)}" if options else ""
        raise UserError(f"{library} cannot make {name}{given}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return type, message and cause of an exception in one line. Without a message, the line of code that raised it is
    named."""
    text, places = one_line(error), traceback.extract_tb(error.__traceback__)
    if not str(error) and places:
        file, line, function, code = places[-1]
        text = f"{code}, line {line} of {os.path.basename(file)}, in {function}"
    found, cause = f"{type(error).__name__}: {text}", error.__cause__
    return f"{found}; caused by {reason(cause)}" if cause else found
