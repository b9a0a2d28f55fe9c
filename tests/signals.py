"""Processes that tests send signals to."""

from contextlib import suppress
from pathlib import Path

DEFAULT_SIGNALS = ("env", "--default-signal=INT,TERM,HUP,QUIT")
"""Put before a command that a test sends signals to: without it, the command ignores what the test run itself ignores,
for example SIGINT where `make test` runs in the background of a script. The process ID stays the same."""


def processes_of_group(group: int) -> list[int]:
    """Process IDs of a process group that have not ended; zombies have."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group, *_ = file.read_text().rsplit(")", 1)[1].split()
            if int(of_group) == group and state != "Z":
                found.append(int(file.parent.name))
    return found
