"""Log file of each rank. The main rank also prints to the terminal."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from paceline.distributed.rank import Rank
from paceline.process.streams import open_log

# Environment variables with the log directory. They override the command line; empty writes no files.
_VARIABLES = ("PACELINE_WORKER_LOG_DIR", "TORCHRUNX_LOG_DIR")


@dataclass(frozen=True)
class WorkerLog:
    """Log of this rank. Without a file, `path` is empty."""

    is_main: bool
    path: str = ""
    file: TextIO | None = None

    def write(self, text: str) -> None:
        if self.file:
            self.file.write(text)
            self.file.flush()

    def consoles(self, terminal: Console) -> list[Console]:
        """Return the consoles to print to."""
        if self.file is None:
            return [terminal]
        in_file = Console(file=self.file, highlight=False, soft_wrap=True, no_color=True, width=120)
        return [terminal, in_file] if self.is_main else [in_file]


def begin(rank: Rank, directory: str | None, default: Path) -> WorkerLog:
    """Open the log file of this rank in the directory of the environment variable, in `directory` or in `default`.
    The output of ranks other than the main one, also that of libraries, goes only there."""
    directory = next((os.environ[name] for name in _VARIABLES if name in os.environ), directory)
    if not rank.launched or directory == "":
        return WorkerLog(rank.is_main)
    path = Path(directory or default) / f"rank_{rank.index}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_log(path)
    if not rank.is_main:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        # A launcher may have replaced the streams.
        sys.stdout = sys.stderr = file
    return WorkerLog(rank.is_main, str(path), file)
