"""Wait for what another process does."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float, report: Callable[[], str] = str) -> None:
    """Wait until `condition` is true. Fail with the text of `report` if it is not true within this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s\n{report()}"
        time.sleep(0.1)
