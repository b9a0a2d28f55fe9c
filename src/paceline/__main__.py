"""Entry point. It imports little, so that Ctrl-C works from the start."""

import atexit
import os
import sys


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

from paceline.distributed.launcher import under_launcher  # noqa: E402
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
    if under_launcher():
        # A thread that waits for torch's store, which may be slow while other ranks end, would abort the process when
        # it returns to an interpreter that is shutting down. The run is closed, so nothing is lost.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
