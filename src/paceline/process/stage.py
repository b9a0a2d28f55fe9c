"""Show on a terminal what a process is doing before it has results to print."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
from rich.text import Text

from paceline.process.interrupts import cleanup_on_exit


class _DetailColumn(ProgressColumn):
    max_refresh = 1.0

    def __init__(self, detail: Callable[[], str]):
        super().__init__()
        self._detail = detail

    def render(self, task: Task) -> Text:
        return Text(self._detail())


@contextmanager
def stage(console: Console, text: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Show `text`, the elapsed time and `detail()` on the last line of a terminal while the block runs. Do nothing
    elsewhere."""
    if not console.is_terminal:
        yield
        return
    line = Progress(SpinnerColumn("line"), "{task.description}", TimeElapsedColumn(), _DetailColumn(detail))
    line.add_task(text, total=None)
    with (
        cursor_restored(console),
        Live(line, console=console, transient=True, redirect_stdout=False, refresh_per_second=4),
    ):
        yield


@contextmanager
def cursor_restored(console: Console) -> Iterator[None]:
    """Show the cursor again when the block ends, also if a signal ends the process inside it."""
    with cleanup_on_exit(lambda: console.show_cursor(True)):
        yield
