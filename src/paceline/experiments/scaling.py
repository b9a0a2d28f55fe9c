"""Run a scaling experiment: train the cells of a grid, each as a process, then write the report."""

import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape

from paceline.errors import UserError, counted
from paceline.experiments.formatting import duration
from paceline.experiments.grid import Cell, Grid, open_grid
from paceline.experiments.report import PAGE, check_installed, print_findings, write_report
from paceline.experiments.run_data import log_file
from paceline.launch.engines.report import last_line
from paceline.process.interrupts import EXIT_CODE, STOP_NOTICE, Interrupts
from paceline.process.parent import dying_with_this
from paceline.run.directory import RunDir

_POLL_SECONDS = 0.2
_SAME_REQUEST_SECONDS = 0.5
"""Time within which a second stop request is the first one, s. `timeout` signals a process and its process group."""


def run(grid: Grid, directory: Path, console: Console) -> int:
    """Run the cells of a grid that have not completed, then write the report of those that have. Return the exit code:
    0, 1 if cells have failed, or 130 after an interruption."""
    check_installed()
    most_jobs = open_grid(grid, directory)
    runs = _Runs(grid, directory, console)
    if runs.run_all():
        return EXIT_CODE
    completed = [cell for cell in grid.cells if cell not in runs.failures]
    failed = [f"{cell.name} has failed: {cause}." for cell, cause in runs.failures.items()]
    if completed:
        try:
            print_findings(_write_report(grid, directory, completed, [*grid.notes(most_jobs), *failed]), console)
            console.print(escape(f"Report: {directory / PAGE}"))
        except UserError as error:
            failed.append(f"there is no report: {error}")
    for line in failed:
        print(f"paceline: {line}", file=sys.stderr)
    return 1 if failed else 0


def _write_report(grid: Grid, directory: Path, cells: list[Cell], notes: list[str]) -> dict[str, Any]:
    groups = dict[str, list[Path]]()
    for cell in sorted(cells, key=lambda cell: (cell.ranks, cell.seed)):
        groups.setdefault(grid.label(cell), []).append(directory / cell.name)
    envs = f"{counted(grid.envs, 'env')} {'per rank' if grid.kind == 'horizontal' else 'in total'}"
    title = f"{grid.kind.capitalize()} scaling of {grid.task}, {envs}"
    return write_report(directory, groups, title, notes, grid.emulate_ranks)


@dataclass
class _Process:
    """A cell that is running."""

    process: subprocess.Popen[bytes]
    gpu_ids: tuple[int, ...]
    began: float


class _Runs:
    """Runs the cells of a grid that have not completed."""

    def __init__(self, grid: Grid, directory: Path, console: Console):
        self._grid, self._directory, self._console = grid, directory, console
        self._waiting = [cell for cell in grid.cells if not self._completed(cell)]
        self._running = dict[Cell, _Process]()
        self._seconds = dict[int, list[float]]()
        """Durations of the cells that have completed in this session, by their number of ranks."""
        self.failures = dict[Cell, str]()

    def run_all(self) -> bool:
        """Run all cells. Return whether this was interrupted."""
        cells = self._grid.cells
        if done := len(cells) - len(self._waiting):
            self._print(f"Completed before: {done} of {counted(len(cells), 'cell')}.")
        with Interrupts(_SAME_REQUEST_SECONDS, STOP_NOTICE, self._kill) as stop:
            was_stopped = False
            while self._running or (self._waiting and not stop.requested):
                while self._waiting and len(self._running) < self._grid.jobs and not stop.requested:
                    cell = self._waiting.pop(0)
                    try:
                        self._start(cell)
                    except OSError as error:
                        self._fail(cell, f"cannot start: {error.strerror}: {error.filename}")
                if stop.requested and not was_stopped:
                    was_stopped = True
                    self._stop()
                for cell in [cell for cell, running in self._running.items() if running.process.poll() is not None]:
                    self._end(cell, stop.requested)
                time.sleep(_POLL_SECONDS)
            if stop.requested and not all(map(self._completed, cells)):
                self._print(f"Interrupted. The same command with --run-dir {self._directory} continues.")
                return True
        return False

    def _run_dir(self, cell: Cell) -> Path:
        return self._directory / cell.name

    def _completed(self, cell: Cell) -> bool:
        return RunDir(self._run_dir(cell)).result().get("status") == "completed"

    def _log(self, cell: Cell) -> Path:
        return log_file(self._run_dir(cell))

    def _start(self, cell: Cell) -> None:
        # GPUs that no other cell uses come first.
        used = [gpu for running in self._running.values() for gpu in running.gpu_ids]
        gpu_ids = tuple(sorted(self._grid.gpu_ids, key=used.count)[: self._grid.processes(cell)])
        argv = self._grid.command(cell, self._run_dir(cell), gpu_ids)
        with self._log(cell).open("ab") as log:
            log.write(f"$ {shlex.join(['paceline', *argv])}\n".encode())
            log.flush()
            process = subprocess.Popen(
                dying_with_this([sys.executable, "-P", "-m", "paceline", *argv]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A terminal sends Ctrl-C to this process only, which then stops the cells.
                start_new_session=True,
            )
        self._running[cell] = _Process(process, gpu_ids, time.monotonic())
        self._print(f"{self._title(cell)}: started; log: {self._log(cell)}")

    def _end(self, cell: Cell, interrupted: bool) -> None:
        running = self._running.pop(cell)
        seconds, result = time.monotonic() - running.began, RunDir(self._run_dir(cell)).result()
        if result.get("status") == "completed":
            self._seconds.setdefault(cell.ranks, []).append(seconds)
            left = self._seconds_left()
            self._print(
                f"{self._title(cell)}: completed after {duration(seconds)}, {_outcome(result)}"
                + (f"; about {duration(left)} left" if left else "")
            )
        elif interrupted:
            self._print(f"{self._title(cell)}: stopped after iteration {result.get('iterations', 0)}")
        else:
            self._fail(cell, self._reason(cell, running.process.returncode, result))

    def _fail(self, cell: Cell, reason: str) -> None:
        self.failures[cell] = reason
        self._print(f"{self._title(cell)}: failed: {reason}")

    def _reason(self, cell: Cell, code: int, result: dict[str, Any]) -> str:
        if code == 0:
            return f"{self._run_dir(cell)} has no result; the nodes and this machine must share this directory"
        stated = result.get("cause") if result.get("status") == "failed" else None
        ended = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
        return f"{stated or last_line(self._log(cell)).removeprefix('paceline: ')} ({ended}; log: {self._log(cell)})"

    def _seconds_left(self) -> float:
        """Return the estimated time until the last cell has ended, s. A cell is expected to take as long as others with
        as many ranks, or as the longest ones if there are none."""
        means = {ranks: fmean(seconds) for ranks, seconds in self._seconds.items()}
        expected = sum(means.get(cell.ranks, max(means.values())) for cell in self._waiting)
        for cell, running in self._running.items():
            elapsed = time.monotonic() - running.began
            expected += max(0.0, means.get(cell.ranks, max(means.values())) - elapsed)
        return expected / self._grid.jobs

    def _stop(self) -> None:
        """Ask all cells to save a checkpoint and to end."""
        for cell, running in self._running.items():
            running.process.terminate()
            if self._grid.nodes:
                try:
                    self._grid.nodes.cancel(self._run_dir(cell))
                except UserError as error:
                    self._print(f"{self._title(cell)}: not canceled: {error}")

    def _kill(self) -> None:
        for running in self._running.values():
            running.process.kill()

    def _title(self, cell: Cell) -> str:
        grid, cells = self._grid, self._grid.cells
        number = f"[{cells.index(cell) + 1}/{len(cells)}]"
        return f"{number} {grid.label(cell)}, {counted(grid.total_envs(cell), 'env')}, seed {cell.seed}"

    def _print(self, line: str) -> None:
        self._console.print(escape(line))


def _outcome(result: dict[str, Any]) -> str:
    value = result.get("mean_return")
    shown = "no episode has ended" if value is None else f"return {value:.1f}"
    return f"{shown}, {result['steps_per_second']:,.0f} steps/s"
