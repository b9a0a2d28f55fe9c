"""Callbacks of a training session, for parts in higher layers such as the viewer and videos."""

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from paceline.training.session import Session


class Callback(Protocol):
    """Called on the main rank only, as one of the `OptionalParts` of a run. It must not use the training's random
    numbers or change the env."""

    name: str
    """Name in messages for the user."""

    def begin(self, session: "Session") -> Self:
        """Start before the first iteration. Return this callback."""
        ...

    def after_iteration(self, session: "Session") -> None: ...

    def close(self, status: str) -> None:
        """Stop after the last checkpoint and the result, or after a failure; `status` as in result.json."""
        ...
