"""What opening a file and reading a command line must not do: run a program, change a file, take for ever."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

CASES = "PACELINE_FUZZ_CASES"
"""Environment variable: how many cases each fuzzer tries, in place of a few."""
LONGEST_SECONDS = 30.0

_PROGRAMS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_active, _seen = False, list[str]()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or "__pycache__" in str(arguments):
        # Modules that are imported for the first time leave their bytecode.
        return
    writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & _WRITING)
    if (writes and arguments[0] != os.devnull) or event.startswith((*_PROGRAMS, *_CHANGES)):
        _seen.append(f"{event} {arguments}")


@cache
def _install() -> None:
    """Once per process: an audit hook cannot be removed."""
    sys.addaudithook(_audit)


def cases(default: int) -> range:
    return range(int(os.environ.get(CASES, default)))


@contextmanager
def harmless() -> Iterator[None]:
    """Inside, nothing may be started or changed, and all must end in time."""
    global _active
    _install()
    _seen.clear()
    started, _active = time.monotonic(), True
    try:
        yield
    finally:
        _active = False
        assert not _seen, f"it did more than read: {_seen}"
        assert time.monotonic() - started < LONGEST_SECONDS
