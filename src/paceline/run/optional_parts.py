"""Parts without which training can continue, such as loggers and the viewer."""

from collections.abc import Callable
from typing import Any

from paceline.errors import one_line


class OptionalParts:
    """Parts of a run by name. A part that raises an exception has ended its processes. It is dropped with a warning,
    and training continues without it."""

    def __init__(self, warn: Callable[[str], object]):
        self._parts: dict[str, Any] = {}
        self._warn = warn

    def add(self, name: str, make: Callable[[], Any]) -> None:
        try:
            self._parts[name] = make()
        except Exception as error:
            self._drop(name, error)

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of all parts that have it."""
        for name, part in list(self._parts.items()):
            try:
                if function := getattr(part, method, None):
                    function(*arguments)
            except Exception as error:
                self._drop(name, error, is_last_call=method == "close")

    def close(self, status: str) -> None:
        """Close all parts; `status` as in result.json. Further calls do nothing."""
        self.call("close", status)
        self._parts.clear()

    def _drop(self, name: str, error: Exception, is_last_call: bool = False) -> None:
        self._parts.pop(name, None)
        remedy = "" if is_last_call else " Training continues without it."
        self._warn(f"The {name} failed: {one_line(error)}.{remedy}")
