"""Metrics of a run: means over episodes and the console."""

import math
import time
from collections import deque
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from paceline.validation import shown

# Minimum number of latest episodes that a mean covers, so that it is not noisy.
EPISODES = 100
# Minimum time between two lines where the output is not a terminal, s.
PLAIN_SECONDS = 5.0


class EpisodeMeans:
    """Means over the latest episodes, from the sums of each iteration."""

    def __init__(self) -> None:
        self._sums: deque[dict[str, float]] = deque()

    def add(self, sums: dict[str, float]) -> None:
        """Add the sums over the episodes that ended in an iteration; `episodes` is their number."""
        if sums["episodes"]:
            self._sums.append(sums)
        while sum(s["episodes"] for s in list(self._sums)[1:]) >= EPISODES:
            self._sums.popleft()

    def means(self) -> dict[str, float]:
        """Return the means by name; empty before the first episode has ended."""
        episodes = sum(s["episodes"] for s in self._sums)
        names = [name for name in self._sums[0] if name != "episodes"] if self._sums else []
        return {name: sum(s[name] for s in self._sums) / episodes for name in names}

    def state(self) -> dict[str, object]:
        return {"sums": list(self._sums)}

    def load_state(self, state: dict, names: Iterable[str]) -> None:
        """Restore the sums of a checkpoint. Sums with other names are dropped, because the rewards of the task may
        have changed."""
        for sums in state["sums"]:
            numbers = all(type(number) in (int, float) for number in sums.values())
            if not numbers or not 1 <= sums["episodes"] < math.inf:
                raise ValueError(f"episodes are {shown(sums)}, not sums over episodes that ended")
        self._sums = deque(sums for sums in state["sums"] if sums.keys() == {"episodes", *names})


class ConsoleProgress:
    """A progress bar on a terminal, with `below` under it; a line every few seconds elsewhere."""

    def __init__(
        self,
        console: Console,
        first_iteration: int,
        iterations: int,
        max_episode_steps: int,
        below: RenderableType | None = None,
    ):
        self._console, self._iterations, self._episode_steps = console, iterations, max_episode_steps
        self._started, self._first, self._printed = time.monotonic(), first_iteration, -PLAIN_SECONDS
        columns = [MofNCompleteColumn(), BarColumn(bar_width=10), TextColumn("{task.description}")]
        if console.width < 74 + 2 * len(str(iterations)):
            del columns[1]  # the numbers need its room
        left = _TimeLeftColumn(compact=True, table_column=Column(no_wrap=True))
        self._bar = Progress("iteration", *columns, left)
        self._line = self._bar.add_task("first iteration", total=iterations, completed=first_iteration)
        shown = (self._bar, below) if below else (self._bar,)
        self._live = Live(Group(*shown), console=console) if console.is_terminal else None

    def __enter__(self) -> "ConsoleProgress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, iteration: int, steps_per_second: float, means: dict[str, float]) -> None:
        reward, length = means.get("return"), means.get("length")
        text = f"{_short(steps_per_second)} steps/s"
        if reward is not None and length is not None:
            text += f"  return {reward:.1f}  length {length:.0f}/{self._episode_steps}"
        if self._live:
            self._bar.update(self._line, completed=iteration, description=text)
            return
        now = time.monotonic() - self._started
        if now - self._printed >= PLAIN_SECONDS or iteration == self._iterations:
            self._printed = now
            left = now / (iteration - self._first) * (self._iterations - iteration)
            self._console.print(f"iteration {iteration}/{self._iterations}  {text}  {left:.0f} s left", soft_wrap=True)


class _TimeLeftColumn(TimeRemainingColumn):
    """The time left, or the time since the start while the first iteration, which compiles, is not complete."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.time_remaining is None and not task.finished:
            return Text(f"{task.elapsed or 0.0:.0f} s")
        return super().render(task).append(" left")


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
