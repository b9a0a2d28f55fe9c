"""Fail tests in which parsing starts a program, changes a file or takes too long."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

CASES = "PACELINE_FUZZ_CASES"
"""Environment variable with the number of cases of each fuzzer."""
LONGEST_SECONDS = 30.0

_PROGRAMS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_active, _seen = False, list[str]()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or "__pycache__" in str(arguments):
        # Importing a module for the first time writes its bytecode.
        return
    writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & _WRITING)
    if (writes and arguments[0] != os.devnull) or event.startswith((*_PROGRAMS, *_CHANGES)):
        _seen.append(f"{event} {arguments}")


@cache
def _install() -> None:
    """Install the audit hook once per process, because it cannot be removed."""
    sys.addaudithook(_audit)


def cases(default: int) -> range:
    return range(int(os.environ.get(CASES, default)))


@contextmanager
def harmless() -> Iterator[None]:
    """Fail if code inside the context starts a program, changes a file or takes too long."""
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
