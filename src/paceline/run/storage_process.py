"""Transfer files in a separate process: `python -m paceline.run.storage_process URL PARENT`.

The libraries of object stores need several milliseconds of CPU time per request. In a thread of the training process
they would compete with training for Python's interpreter lock. The process has the lowest priority, so that it uses the
CPU time that training leaves.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import UserError
from paceline.process import interrupts
from paceline.process.parent import die_with
from paceline.run.storage import Folder, StorageError, check_url, lower_priority


class FolderProcess:
    """A `Folder` whose methods run in a separate process, which is started by the first call and ends with this
    process. Each method may also raise the UserError of `Folder()`, for example if a package is not installed."""

    def __init__(self, url: str):
        """Raise UserError if the URL is invalid."""
        self.url = check_url(url).rstrip("/")
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, name: str) -> bytes | None:
        return self._call("read", name)

    def write(self, name: str, content: bytes) -> None:
        self._call("write", name, content)

    def upload(self, file: Path, name: str) -> str | None:
        return self._call("upload", file.absolute(), name)

    def delete(self, name: str) -> None:
        self._call("delete", name)

    def close(self) -> int:
        """End the process and return its exit code. A later call starts another process."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.communicate()
        return process.returncode

    def _call(self, method: str, *arguments: Any) -> Any:
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        try:
            pickle.dump((method, arguments), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self.close()
            raise StorageError(f"the process that transfers to {self.url} has ended with exit code {code}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "paceline.run.storage_process", self.url, str(os.getpid())]
        # In another process group, Ctrl-C in the terminal does not reach it: the last files are uploaded afterwards. It
        # is not in another session, because Linux first divides CPU time among sessions and ignores their priorities.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def _serve(url: str, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the other process closes the pipe."""
    folder: Folder | None = None
    while True:
        try:
            method, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            folder = folder or Folder(url)
            answer = getattr(folder, method)(*arguments)
        except (StorageError, UserError) as error:
            answer = type(error)(str(error))
        pickle.dump(answer, answers)
        answers.flush()


def _main() -> None:
    url, parent = sys.argv[1:]
    # A scheduler may send its signals to all processes of a run.
    interrupts.ignore()
    die_with(int(parent))
    lower_priority()
    with os.fdopen(os.dup(1), "wb") as answers:
        # Only answers are written to the pipe, also if a library prints.
        os.dup2(2, 1)
        _serve(url, sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
