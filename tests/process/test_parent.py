"""Processes end with the process that started them."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

import paceline
from tests.waiting import until

PARENT = """
import subprocess, sys, time
from paceline.process.parent import dying_with_this
script = "print('started', flush=True); import time; time.sleep(60)"
child = subprocess.Popen(dying_with_this([sys.executable, "-c", script]))
print(child.pid, flush=True)
time.sleep(60)
"""


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_process_is_killed_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        printed = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        (pid,) = printed - {"started"}
        child = psutil.Process(int(pid))
        parent.send_signal(signal.SIGKILL)
        parent.wait(30)
        until(lambda: has_ended(child), 30)


def test_the_program_receives_its_arguments_and_its_exit_code_is_returned() -> None:
    script = (
        "import subprocess, sys\n"
        "from paceline.process.parent import dying_with_this\n"
        "command = [sys.executable, '-c', 'import sys; sys.exit(len(sys.argv[1]))', '- b  c']\n"
        "sys.exit(subprocess.run(dying_with_this(command)).returncode)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 6


def test_no_experiment_runs_code_between_fork_and_exec() -> None:
    folder = Path(paceline.__file__).parent / "experiments"
    assert [file.name for file in folder.rglob("*.py") if re.search(r"preexec_fn|os\.fork", file.read_text())] == []
