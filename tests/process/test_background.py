"""Functions in threads that do not keep the process alive."""

import subprocess
import sys
import threading

import pytest

from paceline.process.background import Background

# Freeing many tensors takes longer than the exit of the interpreter takes to begin.
FREES_TENSORS_AT_ITS_END = """
import torch
from paceline.process.background import Background

def work(tensors):
    return lambda: len(tensors)

print(Background(work([torch.zeros(1000, 1000) for _ in range(100)])).result())
"""


def test_a_process_exits_cleanly_after_a_result_whose_thread_held_tensors():
    done = subprocess.run([sys.executable, "-c", FREES_TENSORS_AT_ITS_END], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "100\n", "")


def test_a_function_that_does_not_return_in_time_is_a_timeout():
    end = threading.Event()
    waiting = Background(end.wait)
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    assert not waiting.done()
    end.set()
    assert waiting.result(10.0)
    assert waiting.done()


def test_the_error_of_a_function_is_raised():
    with pytest.raises(ZeroDivisionError):
        Background(lambda: 1 / 0).result()
