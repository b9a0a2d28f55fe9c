"""Entry point. It imports little, so that Ctrl-C works from the start."""

import atexit
import os
import sys
import threading


def _leave_out_current_directory() -> None:
    """Remove the current directory, which `python -m` puts first in `sys.path`. Opening a run from inside its folder
    must not import modules from there. The program `paceline` never has it in its path."""
    if sys.flags.safe_path:
        return
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    if sys.path[:1] in ([""], [here]):
        del sys.path[0]


if __name__ == "__main__":
    # This comes before all imports of modules outside the interpreter.
    _leave_out_current_directory()

from paceline.distributed.launcher import WATCH_THREAD, under_launcher  # noqa: E402
from paceline.process import interrupts, streams  # noqa: E402

_INTERRUPTED = "paceline: interrupted"


def main() -> None:
    streams.open_closed_descriptors()
    # A launcher sends the signal to all ranks and prints one line for all.
    interrupts.exit_at_once(line="" if under_launcher() else _INTERRUPTED)
    # Registered first, so called last. Python resets the handlers next, and a signal would change the exit code.
    atexit.register(interrupts.ignore)
    try:
        from paceline.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        code = interrupts.EXIT_CODE
    interrupts.exit_at_once(code)
    if any(thread.name == WATCH_THREAD for thread in threading.enumerate()):
        # The watch over other ranks could not be stopped, because it waits for torch's store. It would abort the
        # process when it returns to an interpreter that is shutting down. The run is closed, so nothing is lost.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
