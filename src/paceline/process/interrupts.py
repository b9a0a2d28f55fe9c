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


def raise_keyboard_interrupt() -> None:
    """Have `SIGNALS` raise KeyboardInterrupt from here on, as Python does by default for SIGINT alone."""
    _watcher.action = None
    _handle(signal.default_int_handler)


def exit_at_once(code: int = EXIT_CODE, line: str = "") -> None:
    """Have `SIGNALS` print `line` and end the process with `code` from here on.

    No exception is raised: libraries may discard it while they are imported. This works also while the main thread
    waits inside a library, where Python runs no signal handlers.
    """

    def end() -> None:
        if line:
            _print_from_handler(line)
        for cleanup in reversed(_cleanups):
            cleanup()
        os._exit(code)

    _watcher.action = end
    _watcher.start()
    _handle(_do_nothing)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal that `_watcher` acts on."""


class _SignalWatcher:
    """Calls `action` in a thread as soon as one of `SIGNALS` arrives."""

    def __init__(self) -> None:
        self.action: Callable[[], object] | None = None
        self._process = 0

    def start(self) -> None:
        if self._process == os.getpid() or threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        self._arrived, arrivals = os.pipe()
        os.set_blocking(arrivals, False)
        # Python writes the number of each signal that has a handler to this file, at once.
        signal.set_wakeup_fd(arrivals, warn_on_full_buffer=False)
        threading.Thread(target=self._run, daemon=True, name="signals").start()

    def _run(self) -> None:
        while number := os.read(self._arrived, 1):
            if number[0] in SIGNALS and self.action:
                self.action()


_watcher = _SignalWatcher()


@contextmanager
def cleanup_on_exit(cleanup: Callable[[], object]) -> Iterator[None]:
    """Call `cleanup` when the block ends, also if a signal ends the process inside it (see `exit_at_once`)."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)
        cleanup()


def _handle(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Install a handler, except for signals that were inherited as ignored; return the previous handlers."""
    return {number: signal.signal(number, handler) for number in SIGNALS if number not in INHERITED_IGNORED}


def ignore() -> None:
    """Ignore `SIGNALS` from here on, so that a process that is ending can still report why."""
    _watcher.action = None
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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
        self._action, _watcher.action = _watcher.action, self._print_or_exit
        _watcher.start()
        self._before = _handle(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        _watcher.action = self._action

    def wait(self, seconds: float) -> None:
        """Wait for a stop request, at most this long."""
        deadline = time.monotonic() + seconds
        while not self.requested and time.monotonic() < deadline:
            time.sleep(0.1)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        received.append(number)
        self.requested = True

    def _print_or_exit(self) -> None:
        """Act on a signal at once, in a thread, while the main thread may be waiting inside a library."""
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


def _print_from_handler(line: str) -> None:
    """Print to standard error without `sys.stderr`, whose lock may be held where a signal handler runs."""
    # On a terminal, "^C" or a progress bar may stand there without a line break.
    start = "\n" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{start}{line}\n".encode())
