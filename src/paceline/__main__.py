"""The entry point, light enough that Ctrl-C is heard from the start."""

import atexit
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

from paceline.process import interrupts, streams  # noqa: E402

_INTERRUPTED = "paceline: interrupted"


def main() -> None:
    streams.open_closed_descriptors()
    # A launcher sends the signal to all ranks, and prints what happened.
    interrupts.exit_at_once(line="" if "RANK" in os.environ else _INTERRUPTED)
    # Registered first, so called last: Python then resets handlers, and a late signal would change the exit code.
    atexit.register(interrupts.ignore)
    try:
        from paceline.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        code = interrupts.EXIT_CODE
    interrupts.exit_at_once(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
