"""How long the parts of an iteration take."""

import time
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Seconds between laps, without making the device wait."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.lap()

    def lap(self) -> None:
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self._marks.append(mark)
        else:
            self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """To be called once the device is known to be done."""
        return [a.elapsed_time(b) / 1000.0 if self._cuda else b - a for a, b in pairwise(self._marks)]
