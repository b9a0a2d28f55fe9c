"""What the trainer asks of every learner."""

from typing import Any, Protocol

from torch import nn


class Learner(Protocol):
    """Learns from a `VecEnv`, one iteration at a time."""

    iteration: int
    """Iterations done."""

    def learn(self) -> dict[str, float]:
        """One iteration: collect, update; return what to log, over all ranks: "episodes" that ended and the sum over
        them of each of the env's `log_names`, "failures" and "overflows" as `VecEnv.faults`, losses, and this rank's
        "seconds/collect" and "seconds/update"."""
        ...

    def state(self) -> dict[str, Any]:
        """All that the future depends on: nested dicts of tensors and numbers. "iteration" is how many are done, and
        "worlds" what each of this rank's worlds has of its own, tensors [world, ...]; the rest is the same on all
        ranks."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def set_learning_rate(self, learning_rate: float) -> None:
        """Replace the current learning rate, which may have been adapted since the start."""
        ...

    def load_policy(self, state: dict[str, Any]) -> None:
        """Of that, only what acts: enough to play and to export, in any number of worlds."""
        ...

    def first_non_finite(self) -> str | None:
        """Return a phrase that names the first reward or observation of this rank's envs in the latest iteration that
        is not finite, or None if all are. Not for the hot path."""
        ...

    def policy(self) -> nn.Module:
        """From the observations of group "policy", [batch, n], to actions, with the normaliser folded in."""
        ...
