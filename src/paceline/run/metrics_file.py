"""The file metrics.jsonl of a run: the metrics of each iteration, for `paceline report` and other programs.

Each line is a JSON object. A line with `iteration` holds metrics of that iteration; several lines of one iteration are
merged. A line with `first_iteration` marks the start of a session: metrics that an earlier session wrote for this
iteration or a later one are replaced. The file is only appended to.
"""

import json
from pathlib import Path
from typing import Any

from paceline.validation import parse_json


class MetricsFile:
    """Appends the metrics of a session. Implements `Logger`."""

    def __init__(self, file: Path, first_iteration: int, facts: dict[str, Any]):
        self._file = file
        self._record: dict[str, Any] = {}
        if file.exists():
            self._append("\n")  # a killed process may have left an incomplete line
        self._write({"first_iteration": first_iteration} | facts)

    def log(self, iteration: int, values: dict[str, float]) -> None:
        """Add metrics of an iteration. They are written when the next iteration begins, or by `flush`."""
        if self._record.get("iteration") != iteration:
            self.flush()
            self._record = {"iteration": iteration}
        self._record |= values

    def flush(self) -> None:
        if self._record:
            self._write(self._record)
            self._record = {}

    def close(self, status: str = "completed") -> None:
        self.flush()

    def _write(self, record: dict[str, Any]) -> None:
        self._append(json.dumps(record) + "\n")

    def _append(self, text: str) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(text)


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the metrics of each iteration and the facts of each session. Incomplete lines, which a killed process
    leaves, are skipped."""
    iterations: dict[int, dict[str, Any]] = {}
    sessions = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if "first_iteration" in record:
            sessions.append(record)
            iterations = {index: values for index, values in iterations.items() if index < record["first_iteration"]}
        elif "iteration" in record:
            iterations.setdefault(record["iteration"], {}).update(record)
    return [iterations[index] for index in sorted(iterations)], sessions
