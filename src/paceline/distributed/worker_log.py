"""Where each rank's words go: a file per rank; the main rank speaks to the terminal as well."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from paceline.distributed.rank import Rank
from paceline.process.streams import open_log

VARIABLES = ("PACELINE_WORKER_LOG_DIR", "TORCHRUNX_LOG_DIR")
"""Either wins over the command line; empty turns the files off."""


@dataclass(frozen=True)
class WorkerLog:
    """Of this rank; `path` is empty where there is no file."""

    path: str
    file: TextIO | None
    is_main: bool

    def write(self, text: str) -> None:
        if self.file:
            self.file.write(text)
            self.file.flush()

    def consoles(self, terminal: Console) -> list[Console]:
        """Where to print for people."""
        if self.file is None:
            return [terminal]
        in_file = Console(file=self.file, highlight=False, soft_wrap=True, no_color=True, width=120)
        return [terminal, in_file] if self.is_main else [in_file]


def none(rank: Rank) -> WorkerLog:
    """No file: all that is printed goes where the process was told to print."""
    return WorkerLog("", None, rank.is_main)


def begin(rank: Rank, alone: bool, asked: str | None, default: Path) -> WorkerLog:
    """Open this rank's file in the directory of the environment variable, of `asked` or in `default`. What ranks other
    than the main one print, also from inside libraries, goes there and nowhere else."""
    directory = next((os.environ[name] for name in VARIABLES if name in os.environ), asked)
    if directory is None:
        directory = str(default)
    if alone or not directory:
        return none(rank)
    path = Path(directory) / f"rank_{rank.index}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_log(path)
    if not rank.is_main:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        # A launcher may have put something of its own in their places.
        sys.stdout = sys.stderr = file
    return WorkerLog(str(path), file, rank.is_main)
