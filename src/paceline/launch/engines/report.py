"""Show the tasks of a job while it runs, and write its result."""

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.launch.engines.task_run import Job, State

_STYLES = {State.RUNNING: "cyan", State.COMPLETED: "green", State.FAILED: "bold red"}


class Report:
    def __init__(self, job: Job, console: Console):
        self._job, self._console = job, console
        self._shown = dict[str, str]()

    def table(self) -> Table:
        table = Table("task", "group", "state", "time", "exit code", "restarts", box=None, header_style="bold")
        for group in self._job.groups:
            for run in group.tasks:
                lead = " (lead)" if run is group.lead and len(group.tasks) > 1 else ""
                code = "" if run.exit_code is None else str(run.exit_code)
                table.add_row(
                    Text(run.task.name + lead),
                    Text(group.group.name),
                    Text(run.state, style=_STYLES.get(run.state, "")),
                    f"{run.seconds:.0f} s" if run.started is not None else "",
                    code,
                    str(run.restarts or ""),
                )
        return table

    def print_changes(self) -> None:
        """Print a line for each task whose state has changed."""
        for name, run in self._job.tasks.items():
            line = f"{run.state}{f': {run.reason}' if run.reason else ''}"
            if run.restarts:
                line = f"{line}; restarts: {run.restarts}"
            if line != self._shown.get(name, State.WAITING):
                self._shown[name] = line
                self._console.print(escape(f"{name}: {line}"))

    def print_failures(self) -> None:
        """Print the reason and the log of each task that has failed, and of those that ended with their group."""
        for group in self._job.groups:
            for run in group.tasks:
                if run.state == State.FAILED or (group.state != State.COMPLETED and run.state != State.COMPLETED):
                    last = _last_line(run.log)
                    ending = f"; log: {run.log}\n  last line: {last}" if last else ""
                    self._console.print(escape(f"{run.task.name} {run.state}: {run.reason}{ending}"))

    def write_result(self, interrupted: bool) -> None:
        """Write result.json to the directory of the job."""
        completed = all(group.state == State.COMPLETED for group in self._job.groups)
        result = {
            "workflow_id": self._job.workflow_id,
            "status": "interrupted" if interrupted else "completed" if completed else "failed",
            "groups": {group.group.name: str(group.state) for group in self._job.groups},
            "tasks": {
                name: {
                    "state": str(run.state),
                    "exit_code": run.exit_code,
                    "seconds": round(run.seconds, 3),
                    "restarts": run.restarts,
                    "reason": run.reason,
                }
                for name, run in self._job.tasks.items()
            },
        }
        (self._job.directory / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:200] if lines else ""
