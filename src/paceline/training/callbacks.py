"""Callbacks of a training session, for parts in higher layers such as the viewer and videos."""

from typing import TYPE_CHECKING, Protocol

from paceline.errors import one_line

if TYPE_CHECKING:
    from paceline.training.session import Session


class Callback(Protocol):
    """Called on the main rank only. A callback that raises an exception is closed with a warning, and training
    continues without it. It must not use the training's random numbers or change the env."""

    def begin(self, session: "Session") -> None:
        """Start before the first iteration."""
        ...

    def after_iteration(self, session: "Session") -> None: ...

    def close(self) -> None:
        """Stop after the last iteration, and also after an interrupt or failure."""
        ...


class Callbacks:
    """All callbacks of a session."""

    def __init__(self, callbacks: tuple[Callback, ...], session: "Session"):
        self._callbacks, self._session = list(callbacks), session
        self._call("begin", session)

    def after_iteration(self) -> None:
        self._call("after_iteration", self._session)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: "Session") -> None:
        for callback in list(self._callbacks):
            try:
                getattr(callback, method)(*arguments)
            except Exception as error:
                self._callbacks.remove(callback)
                self._session.warn(
                    f"{type(callback).__name__} failed: {one_line(error)}. Training continues without it."
                )
