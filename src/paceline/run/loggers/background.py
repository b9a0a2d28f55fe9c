"""A logger in its own process. A slow or unreachable server does not delay training, and the threads, signal handlers
and subprocesses of the logger's library stay out of the training process."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from paceline.errors import one_line

if TYPE_CHECKING:
    from torch import Tensor

CLOSE_SECONDS, STOP_SECONDS = 60.0, 10.0
"""Time limit for the end of the process, s: after all iterations, and after an interrupt or failure."""
_MOST_WAITING = 100_000


class BackgroundLogger:
    """Sends the calls of a logger to its process. Implements `Logger`.

    The process runs the class `Logger` of `paceline.run.loggers.NAME`. It ends when this process ends.
    """

    def __init__(
        self, name: str, directory: Path, title: str, options: dict[str, Any], notify: Callable[[str], object]
    ):
        """`title` names the run, `options` are its configuration; `notify` prints a line for the user."""
        self._name, self._notify = name, notify
        self._calls, self._replies = SimpleQueue[tuple[str, tuple] | None](), SimpleQueue[tuple[str, str]]()
        # Ctrl-C on a terminal signals all processes of the session of the training process.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"logger {name}")
            for target in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()
        self._calls.put(("open", (directory, title, options)))

    def log(self, iteration: int, values: dict[str, float]) -> None:
        self._call("log", iteration, values, time.time())

    def log_image(self, iteration: int, name: str, picture: "Tensor") -> None:
        self._call("log_image", iteration, name, picture.permute(1, 2, 0).contiguous().numpy())

    def log_video(self, iteration: int, name: str, file: Path) -> None:
        self._call("log_video", iteration, name, file.absolute())

    def flush(self) -> None:
        self._call("flush")

    def close(self, status: str) -> None:
        seconds = CLOSE_SECONDS if status == "completed" else STOP_SECONDS
        self._calls.put(("close", (status,)))
        self._calls.put(None)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise TimeoutError(f"it did not end within {seconds:.0f} s, so its last values may be missing") from None
        for thread in self._threads:
            thread.join()
        self._read_replies()

    def _call(self, method: str, *arguments: Any) -> None:
        """Add a call to the queue. Raise the first error of the process."""
        self._read_replies()
        if self._calls.qsize() > _MOST_WAITING:
            self._process.kill()
            raise RuntimeError(f"{_MOST_WAITING} calls wait for it: it is too slow")
        self._calls.put((method, arguments))

    def _read_replies(self) -> None:
        while not self._replies.empty():
            kind, text = self._replies.get()
            if kind == "error":
                self._calls.put(None)
                raise RuntimeError(text)
            self._notify(f"{self._name}: {text}")

    def _send(self) -> None:
        """Write the calls to the process, which reads its input until the end."""
        assert self._process.stdin
        with suppress(BrokenPipeError), self._process.stdin as stream:
            while call := self._calls.get():
                pickle.dump(call, stream)
                stream.flush()

    def _receive(self) -> None:
        assert self._process.stdout
        with self._process.stdout as stream:
            for reply in _load_all(stream):
                self._replies.put(reply)
        if self._process.wait():
            self._replies.put(("error", f"its process ended with {self._process.returncode}"))


def _load_all(stream: IO[bytes]) -> Any:
    """Yield the objects of a stream until its end."""
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(stream)


def _serve(name: str, calls: IO[bytes], replies: IO[bytes]) -> None:
    """Open the logger and make the calls. If they end without `close`, the training process was killed."""

    def reply(kind: str, text: str) -> None:
        with suppress(BrokenPipeError):
            pickle.dump((kind, text), replies)
            replies.flush()

    logger: Any = None
    try:
        for method, arguments in _load_all(calls):
            if method == "open":
                logger = import_module(f"paceline.run.loggers.{name}").Logger(
                    *arguments, lambda text: reply("note", text)
                )
            else:
                getattr(logger, method)(*arguments)
            if method == "close":
                return
        # After an error the training process closes the pipe too.
        _exit_after(STOP_SECONDS)
        if logger:
            logger.close("failed")
    except Exception as error:
        reply("error", one_line(error))


def _exit_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _main() -> None:
    # A scheduler or terminal signals all processes of the job. The training process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Libraries print to standard output, and may read standard input.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    _serve(sys.argv[1], calls, replies)


if __name__ == "__main__":
    _main()
