import signal
import subprocess
import sys
import time

import pytest

from tests.signals import DEFAULT_SIGNALS

SCRIPT = """
import time
from paceline.process.interrupts import Interrupts
with Interrupts(SAME) as interrupts:
    print("ready", flush=True)
    while not interrupts.requested:
        time.sleep(0.01)
    print("requested", flush=True)
    time.sleep(60)
"""


def start(same_seconds: float) -> "subprocess.Popen[str]":
    script = SCRIPT.replace("SAME", str(same_seconds))
    return subprocess.Popen([*DEFAULT_SIGNALS, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_the_first_request_is_noted_and_the_second_ends_the_process():
    with start(0.0) as process:
        assert process.stdout is not None
        for line in ("ready", "requested"):
            assert process.stdout.readline().strip() == line
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_one_request_may_come_twice_but_a_later_one_ends_the_process():
    with start(2.0) as process:
        assert process.stdout is not None
        for line in ("ready", "requested"):
            assert process.stdout.readline().strip() == line
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        time.sleep(2.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130


def test_signals_inherited_as_ignored_stay_ignored():
    script = (
        "import signal\n"
        "from paceline.process.interrupts import Interrupts\n"
        "with Interrupts() as interrupts:\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "    assert not interrupts.requested\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    assert interrupts.requested\n"
        "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\n"
    )
    command = [*DEFAULT_SIGNALS, "--ignore-signal=HUP", sys.executable, "-c", script]
    assert subprocess.run(command, timeout=30).returncode == 0


def test_a_signal_that_only_this_process_ignored_is_handled():
    script = (
        "import signal\n"
        "from paceline.process.interrupts import Interrupts, ignore\n"
        "ignore()\n"
        "with Interrupts() as interrupts:\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "    assert interrupts.requested\n"
    )
    assert subprocess.run([*DEFAULT_SIGNALS, sys.executable, "-c", script], timeout=30).returncode == 0
