"""Run the command-line tools of engines. A tool ends with this process, also if a signal ends it."""

import subprocess
from typing import Any

from paceline.errors import UserError
from paceline.process.interrupts import cleanup_on_exit


def call(command: list[str], text: str | None = None, **options: Any) -> int:
    """Run a program, whose output goes to the terminal, and return its exit code. `text` is its standard input, and
    `options` are those of subprocess.Popen."""
    return _run(command, text, stdin=None if text is None else subprocess.PIPE, **options)[0]


def output(command: list[str]) -> str:
    """Run a program and return its standard output. Raise UserError if it fails; its errors go to the terminal."""
    code, printed = _run(command, stdout=subprocess.PIPE)
    if code:
        raise UserError(f"{command[0]} has failed with exit code {code}; its message is above")
    return printed


def _run(command: list[str], text: str | None = None, **options: Any) -> tuple[int, str]:
    try:
        process = subprocess.Popen(command, encoding="utf-8", **options)
    except OSError as error:
        raise UserError(
            f"cannot run {command[0]}: {error.strerror}; install it, or choose another engine with --on"
        ) from None
    with cleanup_on_exit(process.terminate):
        printed, _ = process.communicate(text)
    return process.returncode, printed
