"""The process of one Gymnasium env under async vectorization. Imports are few, because each such process has them."""

import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from gymnasium.vector.async_vector_env import _async_worker

from paceline.process.interrupts import SIGNALS


def run_worker(*arguments: Any) -> None:
    """Run Gymnasium's worker until the trainer closes its end of the pipe.

    Signals have no effect on it: a terminal sends them to the whole process group and a scheduler to all processes of a
    job, but the trainer still needs the env to finish its iteration.
    """
    for number in SIGNALS:
        # A handler and not SIG_IGN, which processes started by the env would inherit.
        signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # Raised where the trainer is gone.
    with suppress(BrokenPipeError, ConnectionResetError):
        _async_worker(*arguments)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    pass
