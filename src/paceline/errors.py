"""What went wrong, in the user's words."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: one line that names the value, what is allowed and what to do. The command line exits with 2."""

    reported: bool = False
    """True if all ranks of the run know of the error. Then only the main rank prints it."""


def unknown(kind: str, value: str, choices: Iterable[str]) -> UserError:
    """An unknown name, with the nearest valid one first."""
    choices, value = sorted(choices), value if len(value) <= 80 else f"{value[:77]}..."
    near = difflib.get_close_matches(value, choices, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {value!r}: {hint}choose from {', '.join(choices)}")


def one_line(error: BaseException) -> str:
    """Another library's message, as a part of one of ours."""
    return " ".join(str(error).split())[:200] or "no message"
