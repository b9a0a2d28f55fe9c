"""Numbers of a report as text."""

from collections.abc import Callable

from paceline.experiments.statistics import Interval


def number(value: float) -> str:
    """Return a number with three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    value, unit = scaled_duration(seconds)
    return f"{seconds * 1000:.3g} ms" if 0 < seconds < 0.1 else f"{value:.3g} {unit}"


def scaled_duration(seconds: float) -> tuple[float, str]:
    """Return a time in s, min or h, and its unit."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 10 * size:
            return seconds / size, unit
    return seconds, "s"


def with_interval(interval: Interval | None, show: Callable[[float], str] = number) -> str:
    """Return a mean with its interval, for example "210 (190 to 230)"."""
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return show(interval.mean)
    return f"{show(interval.mean)} ({show(interval.low)} to {show(interval.high)})"


def listed(items: list[str]) -> str:
    """Return for example "a, b and c"."""
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))
