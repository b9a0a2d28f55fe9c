"""Errors of the user's input, and parts of messages."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Invalid input. The message is one line that names the value, the allowed values and a remedy. The command line
    exits with 2."""

    def __init__(self, message: str, reported: bool = False):
        super().__init__(message)
        self.reported = reported
        """True if all ranks of the run have received the error, so that only the main rank prints it."""


def unknown(kind: str, value: str, choices: Iterable[str], similar: Iterable[str] = ()) -> UserError:
    """Return the error for an unknown name. It suggests the nearest valid name; names of `similar` are valid, but not
    listed."""
    choices, value = sorted(choices), value if len(value) <= 80 else f"{value[:77]}..."
    near = difflib.get_close_matches(value, [*choices, *similar], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    allowed = f"choose from {', '.join(choices)}" if choices else f"there are no {kind}s"
    return UserError(f"unknown {kind} {value!r}: {hint}{allowed}")


def one_line(error: BaseException) -> str:
    """Return the message of another library's exception, shortened to one line."""
    return " ".join(str(error).split())[:200] or "no message"


def counted(quantity: int | str, noun: str) -> str:
    """Return a quantity with its noun, for example "1 rank" or "2 ranks". The quantity may be formatted already, for
    example with separators of thousands."""
    return f"{quantity} {noun}{'' if str(quantity) == '1' else 's'}"
