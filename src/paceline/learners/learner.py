"""What the trainer asks of every learner."""

from typing import Any, Protocol

from torch import nn


class Learner(Protocol):
    """Learns from a `VecEnv`, one iteration at a time."""

    iteration: int
    """Iterations done."""

    def learn(self) -> dict[str, float]:
        """One iteration: collect, update; return what to log. The only place where the host waits for the device."""
        ...

    def state(self) -> dict[str, Any]:
        """All that the future depends on, the environment's state included: nested dicts of tensors and numbers."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def load_policy(self, state: dict[str, Any]) -> None:
        """Of that, only what acts: enough to play and to export, in any number of worlds."""
        ...

    def policy(self) -> nn.Module:
        """From the observations of group "policy", [batch, n], to actions, with the normaliser folded in."""
        ...
