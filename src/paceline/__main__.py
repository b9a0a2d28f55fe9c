"""The entry point, light enough that Ctrl-C is heard from the start."""

import os
import sys


def _leave_out_current_directory() -> None:
    """Remove the current directory, which `python -m` puts in front of `sys.path`: opening somebody's run from inside
    its folder must not import what lies there. The program `paceline` never has it in its path."""
    if sys.flags.safe_path:
        return
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    if sys.path[:1] in ([""], [here]):
        del sys.path[0]


if __name__ == "__main__":
    # Before anything is imported that is not part of the interpreter.
    _leave_out_current_directory()

from paceline.interrupts import EXIT_CODE  # noqa: E402


def main() -> None:
    try:
        from paceline.cli import main as run

        run()
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
