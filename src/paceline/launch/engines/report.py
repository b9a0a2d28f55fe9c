"""Show the tasks of a job, and write its result."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.launch.job_record import RESULT, JobRecord, State

_STYLES = {State.RUNNING: "cyan", State.COMPLETED: "green", State.FAILED: "bold red"}


class Report:
    def __init__(self, record: JobRecord, console: Console):
        self._record, self._console = record, console
        self._shown = dict[str, str]()

    def table(self) -> Table:
        table = Table("task", "group", "host", "state", "time", "exit code", "restarts", box=None, header_style="bold")
        for name, task in self._record.tasks.items():
            table.add_row(
                Text(name + (" (lead)" if task.lead else "")),
                Text(task.group),
                Text(task.host),
                Text(task.state, style=_STYLES.get(task.state, "")),
                f"{task.seconds:.0f} s" if task.started is not None else "",
                "" if task.exit_code is None else str(task.exit_code),
                str(task.restarts or ""),
            )
        return table

    def changes(self, printed: bool) -> bool:
        """Return whether the state of a task has changed since the last call; with `printed`, print a line for each."""
        changed = False
        for name, task in self._record.tasks.items():
            line = f"{task.state}{f': {task.reason}' if task.reason else ''}"
            if task.restarts:
                line = f"{line}; restarts: {task.restarts}"
            if line != self._shown.get(name, State.WAITING):
                self._shown[name] = line
                changed = True
                if printed:
                    self._console.print(escape(f"{name}: {line}"))
        return changed

    def print_failures(self) -> None:
        """Print the reason and the log of each task that has failed, and of those that ended with their group."""
        for name, task in self._record.tasks.items():
            is_group_completed = self._record.groups.get(task.group) == State.COMPLETED
            if task.state == State.FAILED or not (is_group_completed or task.state == State.COMPLETED):
                log = self._record.log(name)
                last = last_line(log)[:200]
                ending = f"; log: {log}\n  last line: {last}" if last else ""
                self._console.print(escape(f"{name} {task.state}: {task.reason}{ending}"))

    def write_result(self) -> None:
        """Write result.json to the directory of the job."""
        result = {
            "workflow_id": self._record.workflow_id,
            "status": self._record.status,
            "groups": {name: str(state) for name, state in self._record.groups.items()},
            "tasks": {
                name: {
                    "state": str(task.state),
                    "exit_code": task.exit_code,
                    "seconds": round(task.seconds, 3),
                    "restarts": task.restarts,
                    "reason": task.reason,
                }
                for name, task in self._record.tasks.items()
            },
        }
        (self._record.directory / RESULT).write_text(json.dumps(result, indent=2) + "\n")


class LogPrinter:
    """Prints the logs of tasks as they grow, with the name of the task before each line if there are several."""

    def __init__(self, record: JobRecord, tasks: list[str]):
        width = max(map(len, tasks)) if len(tasks) > 1 else 0
        self._prefixes = {name: f"{name:{width}} | " if width else "" for name in tasks}
        self._logs = {name: record.log(name) for name in tasks}
        self._read = dict.fromkeys(tasks, 0)
        """Number of bytes that are printed."""

    def print_new(self, is_last: bool = False) -> None:
        """Print the lines that are complete; with `is_last`, also a line without an end."""
        for name, log in self._logs.items():
            try:
                with log.open("rb") as file:
                    file.seek(self._read[name])
                    text = file.read()
            except OSError:
                continue
            complete = text if is_last else text[: text.rfind(b"\n") + 1]
            self._read[name] += len(complete)
            for line in complete.decode(errors="replace").splitlines():
                print(f"{self._prefixes[name]}{line}")
        sys.stdout.flush()


def last_line(log: Path) -> str:
    """Return the last line of a log, at most 1000 characters, or "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:1000] if lines else ""
