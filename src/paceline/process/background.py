"""Run a function in a thread that does not keep the process alive."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Background(Generic[T]):
    """Runs a function, which may never return, in a daemon thread."""

    def __init__(self, work: Callable[[], T]):
        self._value: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="background")
        self._thread.start()

    def done(self) -> bool:
        """Return True if the thread has ended."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the thread and return the result of the function, or raise its error. Raise TimeoutError
        after `timeout` seconds."""
        # A thread that still frees the tensors of `work` while the interpreter exits would abort the process.
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError
        if self._error:
            raise self._error
        return cast("T", self._value)

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._value = work()
        except Exception as error:
            self._error = error
