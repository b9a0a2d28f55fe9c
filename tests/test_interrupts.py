import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import time
from paceline.interrupts import Interrupts
with Interrupts(SAME) as interrupts:
    print("ready", flush=True)
    while not interrupts.asked:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
"""


def start(same_seconds: float) -> "subprocess.Popen[str]":
    script = SCRIPT.replace("SAME", str(same_seconds))
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_the_first_request_is_noted_and_the_second_ends_the_process():
    with start(0.0) as process:
        assert process.stdout is not None
        for heard in ("ready", "asked"):
            assert process.stdout.readline().strip() == heard
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_one_request_may_come_twice_but_a_later_one_ends_the_process():
    with start(2.0) as process:
        assert process.stdout is not None
        for heard in ("ready", "asked"):
            assert process.stdout.readline().strip() == heard
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        time.sleep(2.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
