"""Metrics of a group of runs against iterations, env steps or time."""

from dataclasses import dataclass

import numpy as np

from paceline.experiments.run_data import Array, RunData
from paceline.experiments.statistics import mean_and_half

_POINTS = 400


@dataclass(frozen=True)
class Curve:
    """A metric of a group against iterations, env steps or time."""

    lines: list[tuple[Array, Array]]
    """x and y of each run."""
    x: Array
    mean: Array
    low: Array
    high: Array


def curve(runs: list[RunData], x_name: str, y_name: str, smooth: bool = False) -> Curve | None:
    """Return a metric over its x range that all runs have in common; None if a run has no values.

    The band is the 95 % interval, or the range of two runs, whose interval is too wide to be of use. With `smooth`,
    the mean and the band are those of moving averages over a twentieth of the iterations.
    """
    lines = [run.points(x_name, y_name) for run in runs]
    if any(len(x) == 0 for x, _ in lines):
        return None
    first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    x = np.linspace(first, max(first, last), _POINTS)
    rows = np.stack([np.interp(x, line[0], _moving_average(line[1]) if smooth else line[1]) for line in lines])
    mean, half = mean_and_half(rows)
    if len(runs) == 2:
        return Curve(lines, x, mean, rows.min(0), rows.max(0))
    return Curve(lines, x, mean, mean - half, mean + half)


def _moving_average(values: Array) -> Array:
    """Return averages over a centered window of a twentieth of the values, which is shorter at both ends."""
    window = np.ones(max(len(values) // 20, 1))
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
