"""Standard output and standard error that may become unwritable: a closed pipe, a lost terminal, a full disk."""

import io
import os
import sys
from pathlib import Path
from typing import TextIO


class LossyFile(io.FileIO):
    """A file that discards data that cannot be written. `error` is the first error."""

    error: OSError | None = None

    def write(self, data) -> int:
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError as error:
            self.error = self.error or error
            return size
        # None if the descriptor is non-blocking and its buffer is full.
        return size if written is None else written


def open_closed_descriptors() -> None:
    """Open the null device in place of each standard descriptor that is closed. Call this before any other file is
    opened: that file would get the descriptor's number, and C libraries would print to it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def install() -> LossyFile:
    """Make sys.stdout and sys.stderr discard data that cannot be written. Return the file of sys.stdout. Streams that
    other code has replaced stay unchanged."""
    output, errors = LossyFile(1, "w", closefd=False), LossyFile(2, "w", closefd=False)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(output, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(errors, sys.stderr)
    return output


def open_log(path: Path) -> TextIO:
    """Open a text file for appending lines."""
    return io.TextIOWrapper(io.BufferedWriter(LossyFile(path, "a")), "utf-8", "backslashreplace", line_buffering=True)


def _text(file: LossyFile, stream: TextIO | None) -> TextIO:
    """Return `file` with the encoding and the buffering of `stream`. Characters outside the encoding are escaped."""
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(file), "utf-8", "backslashreplace")
    lines, through = stream.line_buffering, stream.write_through
    buffer = file if through else io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=lines, write_through=through)
