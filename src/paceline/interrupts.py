"""Ctrl-C, termination requests and lost terminals, turned into a clean end."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore() -> None:
    """From here on: what ends anyway must not be ended before it has said why."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Interrupts:
    """While entered, the first of `SIGNALS` sets `asked`; the second ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        self._cut_in = False

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
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

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            os._exit(EXIT_CODE)
        self.asked = True
        if self._cut_in:
            raise KeyboardInterrupt
