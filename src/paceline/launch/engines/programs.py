"""Run the command-line tools of engines."""

import subprocess

from paceline.errors import UserError


def call(command: list[str], text: str | None = None) -> int:
    """Run a program, whose output goes to the terminal, and return its exit code. `text` is its standard input."""
    try:
        return subprocess.run(command, input=text, encoding="utf-8", check=False).returncode
    except OSError as error:
        raise _cannot_run(command, error) from None


def output(command: list[str]) -> str:
    """Run a program and return its standard output. Raise UserError if it fails; its errors go to the terminal."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    except OSError as error:
        raise _cannot_run(command, error) from None
    if done.returncode:
        raise UserError(f"{command[0]} has failed with exit code {done.returncode}; its message is above")
    return done.stdout


def _cannot_run(command: list[str], error: OSError) -> UserError:
    return UserError(f"cannot run {command[0]}: {error.strerror}; install it, or choose another engine with --on")
