"""End a process together with the process that started it.

`python -m paceline.process.parent PARENT PROGRAM ARGUMENT...` runs a program that ends with the process PARENT.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends. End it now if its parent is no longer the process `parent`."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def dying_with_this(command: Iterable[str]) -> list[str]:
    """Return a command that is killed when this process ends. It needs no `preexec_fn`, which would run code between
    fork and exec in a process that may have threads."""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), *command]


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
