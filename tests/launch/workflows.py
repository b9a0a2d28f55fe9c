"""Workflow files of tests, and their jobs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from paceline.launch.engines.processes import MARK
from tests.forked import paceline
from tests.signals import DEFAULT_SIGNALS

SECONDS = 90.0


def task(name: str, script: str, *lines: str) -> str:
    """Return a task that runs a script of bash."""
    text = "".join(f"        {line}\n" for line in script.strip().splitlines())
    more = "".join(f"    {line}\n" for line in lines)
    return f"  - name: {name}\n    image: image\n    command: [bash, -euc]\n    args:\n      - |\n{text}{more}"


def workflow(*tasks: str, head: str = "") -> str:
    return f"version: 2\nworkflow:\n  name: test\n{head}  tasks:\n{''.join(tasks)}"


def group(*tasks: str, keys: str = "") -> str:
    text = "".join(f"  {line}\n" for part in tasks for line in part.splitlines())
    return f"version: 2\nworkflow:\n  name: test\n  groups:\n  - name: together\n{keys}    tasks:\n{text}"


def launch(text: str, folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "file.yaml").write_text(text)
    return paceline("launch", "file.yaml", *argv, cwd=folder, **{"XDG_CONFIG_HOME": str(folder)} | environment)


def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DEFAULT_SIGNALS, sys.executable, "-m", "paceline", *argv],
        cwd=folder,
        env=os.environ | {"XDG_CONFIG_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def result(folder: Path, job: str = "test-1") -> dict[str, Any]:
    return json.loads((folder / "jobs" / job / "result.json").read_text())


def states(folder: Path, job: str = "test-1") -> dict[str, tuple[str, int | None]]:
    return {name: (found["state"], found["exit_code"]) for name, found in result(folder, job)["tasks"].items()}


def log(folder: Path, name: str) -> str:
    return (folder / "jobs" / "test-1" / f"{name}.log").read_text()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def marked(folder: Path, name: str = "") -> list[psutil.Process]:
    """Return the processes of the tasks whose working directory is below a folder."""
    found = list[psutil.Process]()
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK)
            if mark and mark.endswith(name) and Path(process.cwd()).is_relative_to(folder):
                found.append(process)
        except psutil.Error:
            pass
    return found
