"""Exchange stop requests and timings between ranks."""

from collections.abc import Callable

from torch import Tensor

from paceline.distributed.group import Group

TIMINGS = ("seconds/collect", "seconds/update")
"""Metrics of each rank alone."""


class StopExchange:
    """Exchanges once per iteration whether each rank was requested to stop, and its timings.

    The exchange runs during the next iteration, so no rank waits for it, and all ranks stop after the same iteration.
    """

    def __init__(self, group: Group):
        self._group, self.stop = group, False
        self._pending: Callable[[], Tensor] | None = None

    def exchange(self, stop_requested: bool, metrics: dict[str, float]) -> dict[str, float]:
        """Send the values of this iteration; return the timings of all ranks in the previous iteration."""
        if self._group.alone:
            self.stop = stop_requested
            return {}
        timings = self.finish()
        row = [float(stop_requested), *(metrics[name] for name in TIMINGS)]
        self._pending = self._group.begin_all_gather(row)
        return timings

    def finish(self) -> dict[str, float]:
        """Wait for the exchange that is under way; return the timings of all ranks."""
        if self._pending is None:
            return {}
        stop, *timings = self._pending().unbind(1)
        self._pending = None
        self.stop = bool(stop.any())
        return {
            f"{name}/{kind}": float(getattr(seconds, kind)())
            for name, seconds in zip(TIMINGS, timings, strict=True)
            for kind in ("min", "mean", "max")
        }
