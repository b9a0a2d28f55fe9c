"""Ctrl-C, termination requests and lost terminals, turned into a clean end."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INHERITED_IGNORED = frozenset(
    number for number in (*SIGNALS, signal.SIGQUIT) if signal.getsignal(number) == signal.SIG_IGN
)
"""Signals that were ignored when this process was started, for example SIGHUP under nohup, or SIGINT in the background
of a script. They stay ignored. Determined at import, before any handler is installed."""
# A terminal or a scheduler and a launcher pass on the same request, each in its turn.
SAME_REQUEST_SECONDS = 2.0

received: list[int] = []
"""Requests so far that have not ended the process."""


def ignore() -> None:
    """From here on: what ends anyway must not be ended before it has said why."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Interrupts:
    """While entered, the first of `SIGNALS` sets `asked`; the second ends the process at once, unless it comes within
    `same_seconds` of the first. Signals that the process inherited as ignored stay ignored."""

    def __init__(self, same_seconds: float = 0.0) -> None:
        self.asked, self._asked_at = False, 0.0
        self._same_seconds = same_seconds
        self._cut_in = False

    def __enter__(self) -> "Interrupts":
        handled = [number for number in SIGNALS if number not in INHERITED_IGNORED]
        self._before = {number: signal.signal(number, self._receive) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def cutting_in(self, allowed: bool) -> Iterator[None]:
        """Inside, if `allowed`, a request raises KeyboardInterrupt there and then instead of waiting to be noticed."""
        self._cut_in = allowed
        try:
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
                os._exit(EXIT_CODE)
            return
        self.asked, self._asked_at = True, now
        if self._cut_in:
            raise KeyboardInterrupt
