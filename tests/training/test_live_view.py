"""The output of `paceline train` on a real pseudo-terminal, from the first line to the table of ranks."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

COLUMNS = 80
SMALL = ["--gpu-ids", "none", "--num-envs", "8", "--ppo.horizon", "8", "--ppo.hidden", "8", "--logger", "none"]


def on_terminal(*argv: str, cwd: Path) -> str:
    """Return everything that a command writes to a terminal of 80 columns."""
    terminal, process_side = pty.openpty()
    fcntl.ioctl(process_side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *argv],
        cwd=cwd,
        env=environment | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        stdin=process_side,
        stdout=process_side,
        stderr=process_side,
    )
    os.close(process_side)
    written = b""
    try:
        # Linux reports the end of the last process on a terminal as an error.
        while data := os.read(terminal, 65536):
            written += data
    except OSError:
        pass
    finally:
        os.close(terminal)
        process.kill()
        process.wait()
    return written.decode()


def test_a_terminal_shows_each_stage_of_the_start_and_then_all_ranks(tmp_path: Path):
    written = on_terminal("train", "cartpole", *SMALL, "--ranks", "2", "--max-iterations", "5", cwd=tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)
    stages = ("Loading PyTorch and MuJoCo", "Waiting for 2 ranks", "Building the envs", "Building the networks")
    # The table is shown below the progress, on a busy machine already during the first iterations.
    for shown in ("iteration 5/5", "rank host"):
        positions = [plain.index(text) for text in (*stages, shown, "completed")]
        assert positions == sorted(positions), plain
    last = plain[plain.rindex("iteration 5/5") :].splitlines()
    assert last[1].rstrip() == "2 ranks"
    for rank in (0, 1):
        assert re.match(rf" +{rank} +\S+ +CPU +8 +[\d.]+ s +[\d.]+ s +[\d.]+ s +[\d.]+ GiB", last[3 + rank])
    assert max(map(len, last[:5])) <= COLUMNS
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is hidden"
