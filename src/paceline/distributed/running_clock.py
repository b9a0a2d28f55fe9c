"""A clock for timeouts that stands still while the process is stopped."""

import threading
import time


class RunningClock:
    """Measures the time in which this process ran. Time in which it was stopped does not count, for example while a job
    is suspended by a scheduler or a container is paused.

    `read` advances the clock by the time since it was last read, by at most `max_step_seconds`. It must be read more
    often than that, or it falls behind.
    """

    def __init__(self, max_step_seconds: float):
        self._max_step_seconds = max_step_seconds
        self._seconds, self._read_at = 0.0, time.monotonic()
        self._lock = threading.Lock()

    def read(self) -> float:
        """Return the running time in seconds since the clock was made."""
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._read_at, self._max_step_seconds)
            self._read_at = now
            return self._seconds
