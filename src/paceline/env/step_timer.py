"""Time of the parts of env steps on the CPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Sums the seconds that env steps spend in each part. If it is disabled, it measures nothing: on a GPU the host
    only starts kernels or a CUDA graph, so it cannot measure them."""

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._seconds = dict[str, float]()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        if not self._enabled:
            yield
            return
        started = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
