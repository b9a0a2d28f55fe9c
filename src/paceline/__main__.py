"""The entry point, light enough that Ctrl-C is heard from the start."""

import atexit
import os
import sys

from paceline import interrupts

_INTERRUPTED = "paceline: interrupted"


def main() -> None:
    if "RANK" in os.environ:
        # The launcher sends the signal to all ranks, and prints what happened.
        interrupts.use_defaults()
    else:
        interrupts.exit_at_once(line=_INTERRUPTED)
    # Registered first, so called last: Python then resets handlers, and a late signal would change the exit code.
    atexit.register(interrupts.ignore)
    try:
        from paceline.cli import main as run

        code = run()
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        code = interrupts.EXIT_CODE
    interrupts.exit_at_once(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
