"""Handle Ctrl-C, termination requests and lost terminals."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INHERITED_IGNORED = frozenset(
    number for number in (*SIGNALS, signal.SIGQUIT) if signal.getsignal(number) == signal.SIG_IGN
)
"""Signals that were ignored when this process was started, for example SIGHUP under nohup, or SIGINT in the background
of a script. They stay ignored. Determined at import, before any handler is installed."""
PARENT = os.getppid()
"""Process that started this one, determined at import."""

STOP_NOTICE = "Stopping. Press Ctrl-C again to stop at once, without a checkpoint."
received: list[int] = []
"""Signals received so far that have not ended the process."""

_cleanups: list[Callable[[], object]] = []
_action: Callable[[], object] | None = None
_watching_process = 0


def raise_keyboard_interrupt() -> None:
    """Make `SIGNALS` raise KeyboardInterrupt from now on. By default, Python does this for SIGINT only."""
    _handle(signal.default_int_handler)


def ignore() -> None:
    """Ignore `SIGNALS` from now on, so that a process that is ending can still report the cause."""
    _handle(signal.SIG_IGN)


def exit_at_once(code: int = EXIT_CODE, line: str = "") -> None:
    """Make `SIGNALS` print `line` and end the process with `code` from now on. No exception is raised, because
    libraries may discard it while they are imported."""

    def end() -> None:
        if line:
            _print_from_handler(line)
        for cleanup in reversed(_cleanups):
            cleanup()
        os._exit(code)

    _handle(lambda _number, _frame: None, end)


@contextmanager
def cleanup_on_exit(cleanup: Callable[[], object]) -> Iterator[None]:
    """Call `cleanup` when the block ends, also if a signal ends the process inside it (see `exit_at_once`)."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)
        cleanup()


class Interrupts:
    """Turns signals into stop requests while entered.

    The first of `SIGNALS` sets `requested` and prints `notice`. The second calls `before_exit` and ends the process at
    once, unless it comes within `same_seconds` of the first. Signals that were inherited as ignored stay ignored.
    """

    def __init__(
        self, same_seconds: float = 0.0, notice: str = "", before_exit: Callable[[], object] = lambda: None
    ) -> None:
        self.requested, self._first_at = False, math.inf
        self._same_seconds, self._notice, self._before_exit = same_seconds, notice, before_exit

    def __enter__(self) -> "Interrupts":
        self._action_before = _action
        self._handlers_before = _handle(self._receive, self._print_or_exit)
        return self

    def __exit__(self, *_: object) -> None:
        global _action
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        _action = self._action_before

    def wait(self, seconds: float) -> None:
        """Wait for a stop request, at most this long."""
        deadline = time.monotonic() + seconds
        while not self.requested and time.monotonic() < deadline:
            time.sleep(0.1)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        received.append(number)
        self.requested = True

    def _print_or_exit(self) -> None:
        now = time.monotonic()
        if self._first_at == math.inf:
            self._first_at = now
            if self._notice:
                _print_from_handler(self._notice)
        elif now - self._first_at >= self._same_seconds:
            try:
                self._before_exit()
            finally:
                os._exit(EXIT_CODE)


def _handle(handler: Any, action: Callable[[], object] | None = None) -> dict[int, Any]:
    """Install a handler of `SIGNALS`, except of those inherited as ignored; return the previous handlers.

    A thread calls `action` as soon as a signal arrives, also while the main thread waits inside a library, where Python
    runs no handlers.
    """
    global _action, _watching_process
    _action = action
    if action and _watching_process != os.getpid():
        _watching_process = os.getpid()
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        # Python writes the number of each signal that has a handler to this file, at once.
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(read_end,), daemon=True, name="signals").start()
    return {number: signal.signal(number, handler) for number in SIGNALS if number not in INHERITED_IGNORED}


def _watch(read_end: int) -> None:
    while number := os.read(read_end, 1):
        if number[0] in SIGNALS and _action:
            _action()


def _print_from_handler(line: str) -> None:
    """Print to standard error without `sys.stderr`, whose lock may be held where a signal handler runs."""
    # On a terminal, "^C" or a progress bar may be on the line already.
    start = "\n" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{start}{line}\n".encode())
