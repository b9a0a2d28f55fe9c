"""What went wrong, in the user's words."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: one line that names the value, what is allowed and what to do. The command line exits with 2."""

    reported: bool = False
    """Whether all ranks of the run know of it; then only the main rank prints it."""


def unknown(kind: str, value: str, choices: Iterable[str]) -> UserError:
    """An unknown name, with the nearest valid one first."""
    choices = sorted(choices)
    near = difflib.get_close_matches(value, choices, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {value!r}: {hint}choose from {', '.join(choices)}")


def first_line(error: BaseException) -> str:
    """The first line of another library's message, cut to what fits into one of ours."""
    lines = str(error).strip().splitlines() or ["no message"]
    return " ".join(lines[0].split())[:200]
