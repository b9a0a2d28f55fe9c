"""Ctrl-C, termination requests and lost terminals, turned into a clean end."""

import os
import signal
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
NOTICE = "Stopping after this iteration. Press Ctrl-C again to stop at once, without a checkpoint."
# A terminal or a scheduler and a launcher pass on the same request, each in its turn.
SAME_REQUEST_SECONDS = 2.0

received: list[int] = []
"""Requests so far that have not ended the process."""


def use_defaults() -> None:
    """From here on, have `SIGNALS` end the process by their default action. Unlike a Python handler, this also works
    inside calls that do not return, such as waiting for other ranks."""
    _handle(signal.SIG_DFL)


def raise_keyboard_interrupt() -> None:
    """From here on, have `SIGNALS` raise KeyboardInterrupt, as Python does by default for SIGINT alone."""
    _handle(signal.default_int_handler)


def exit_at_once(code: int = EXIT_CODE, line: str = "") -> None:
    """From here on, have `SIGNALS` print `line` and end the process with `code`, without an exception: where libraries
    are being imported they may discard it, or fail in another place because of it."""

    def end(_number: int, _frame: FrameType | None) -> None:
        if line:
            _print_from_handler(line)
        os._exit(code)

    _handle(end)


def _handle(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> dict[int, Any]:
    """Install a handler, except for signals that were inherited as ignored; return the previous handlers."""
    return {number: signal.signal(number, handler) for number in SIGNALS if number not in INHERITED_IGNORED}


def ignore() -> None:
    """From here on: what ends anyway must not be ended before it has said why."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Interrupts:
    """While entered, the first of `SIGNALS` sets `asked`; the second calls `before_exit` and ends the process at once,
    unless it comes within `same_seconds` of the first. The first prints `notice`, unless it takes effect at once.
    Signals that the process inherited as ignored stay ignored."""

    def __init__(
        self, same_seconds: float = 0.0, notice: str = "", before_exit: Callable[[], object] = lambda: None
    ) -> None:
        self.asked, self._asked_at = False, 0.0
        self._same_seconds, self._notice, self._before_exit = same_seconds, notice, before_exit
        self._cut_in = False

    def __enter__(self) -> "Interrupts":
        self._before = _handle(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def cutting_in(self, allowed: bool) -> Iterator[None]:
        """Inside, if `allowed`, a request raises KeyboardInterrupt there and then instead of waiting to be noticed; an
        earlier one raises it at the start."""
        self._cut_in = allowed
        try:
            if allowed and self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._cut_in = False

    def wait(self, seconds: float) -> None:
        """Until asked, but no longer than this."""
        deadline = time.monotonic() + seconds
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.1)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        received.append(number)
        now = time.monotonic()
        if self.asked:
            if now - self._asked_at >= self._same_seconds:
                self._exit()
            return
        self.asked, self._asked_at = True, now
        if self._cut_in:
            raise KeyboardInterrupt
        if self._notice:
            _print_from_handler(self._notice)

    def _exit(self) -> None:
        exit_at_once()
        try:
            self._before_exit()
        finally:
            os._exit(EXIT_CODE)


def _print_from_handler(line: str) -> None:
    """Print to standard error without `sys.stderr`, whose lock may be held where a signal handler runs."""
    # On a terminal there is "^C", and maybe a progress bar, without a line break.
    start = "\n" if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{start}{line}\n".encode())
