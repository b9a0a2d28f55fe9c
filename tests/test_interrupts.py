import signal
import subprocess
import sys

SCRIPT = """
import time
from paceline.interrupts import Interrupts
with Interrupts() as interrupts:
    print("ready", flush=True)
    while not interrupts.asked:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
"""


def test_the_first_request_is_noted_and_the_second_ends_the_process():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for heard in ("ready", "asked"):
            assert process.stdout.readline().strip() == heard
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
