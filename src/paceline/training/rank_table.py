"""A table of all ranks for the terminal, while they train."""

from rich.table import Table
from rich.text import Text
from torch import Tensor

from paceline.errors import counted
from paceline.training.ranks import Member

RANK_METRICS = ("seconds/collect", "seconds/update", "seconds/sync", "memory/used_mib")
"""Metrics that each rank measures for itself."""
MOST_ROWS = 8
SLOW = 1.2
"""A rank is slow if it works longer than the median rank by this factor. Its work is an iteration without the
synchronization, in which it waits for the others."""
_SMOOTHING = 0.2


class RankTable:
    """Shows means over the latest iterations for each rank: all ranks, or the slowest ones and a summary of the
    others."""

    def __init__(self, members: list[Member], restarts: int):
        self._members, self._restarts = members, restarts
        self._values: Tensor | None = None

    def update(self, values: Tensor | None) -> None:
        """Add the `RANK_METRICS` of all ranks in an iteration, [rank, metric]."""
        if self._values is None or values is None:
            self._values = values
        else:
            self._values = self._values.lerp(values, _SMOOTHING)

    def __rich__(self) -> Table:
        restarts = f", {counted(self._restarts, 'restart')}" if self._restarts else ""
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", title_justify="left", title_style="")
        table.caption_justify = "left"
        table.title = f"{counted(len(self._members), 'rank')}{restarts}"
        table.add_column("rank", justify="right")
        table.add_column("host", max_width=14, no_wrap=True)
        table.add_column("device", max_width=16, no_wrap=True)
        for name in ("envs", "collect", "update", "sync", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        if self._values is None:
            table.caption = "waiting for the first iteration"
            return table
        work = self._values[:, 0] + self._values[:, 1] - self._values[:, 2]
        order = work.argsort(descending=True).tolist()
        median = float(work.median())
        for index in sorted(order[:MOST_ROWS]):
            member, (collect, update, sync, memory) = self._members[index], self._values[index].tolist()
            seconds = (f"{part:.3f} s" for part in (collect, update, sync))
            slow = Text("slow", "yellow") if float(work[index]) > SLOW * median else ""
            device = member.device.removeprefix("NVIDIA ").removeprefix("the ")
            size = f"{memory / 1024:.1f} GiB"
            table.add_row(str(index), member.host.partition(".")[0], device, str(member.num_envs), *seconds, size, slow)
        if others := work[order[MOST_ROWS:]].tolist():
            num_slow = int((work > SLOW * median).sum())
            table.caption = (
                f"{counted(len(others), 'faster rank')}: {min(others):.3f} to {max(others):.3f} s without sync. "
                f"Slow ranks: {num_slow}. Median: {median:.3f} s."
            )
        return table
