"""A process beside the training, for the viewer and for videos."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# One thread, so that the other cores are left to the training, and no memory of a GPU.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class SideProcess:
    """A module of Paceline in its own process, with a temporary folder. Its standard input is open until `stop`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, module: str, *arguments: object) -> int:
        """Start the process and return its ID."""
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | _ENVIRONMENT,
                # Ctrl-C on a terminal is for the training. In a separate session, the priority of the process would
                # have no effect where Linux groups processes by session.
                process_group=0,
            )
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, or None while it runs."""
        return self._process.poll() if self._process else None

    def last_line(self) -> str:
        """Return the last line that the process has printed, or its exit code."""
        lines = (self.folder / "log").read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line), f"exit code {self.exit_code}")

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process. Return whether it has ended."""
        try:
            return self._process is None or self._process.wait(seconds) is not None
        except subprocess.TimeoutExpired:
            return False

    def stop(self, seconds: float = 0.0) -> None:
        """Close the standard input of the process, kill it after some time, and remove the folder."""
        if self._process and self._process.stdin:
            self._process.stdin.close()
            if not self.wait(seconds):
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
