"""Process of one Gymnasium env under async vectorization. It imports little, because every env starts one."""

import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gymnasium.vector.async_vector_env import _async_worker

from paceline.env.mujoco_warnings import as_python_warnings
from paceline.process.interrupts import SIGNALS


def run_worker(index: int, make_env: Callable[[], Any], *arguments: Any) -> None:
    """Run Gymnasium's worker until the trainer closes its end of the pipe.

    It ignores signals. A terminal sends them to the whole process group and a scheduler to all processes of a job, but
    the trainer needs the env to finish its iteration. Only the first worker shows warnings, except those of making an
    env, which the trainer has shown.
    """

    def make_silently() -> Any:
        with warnings.catch_warnings(), as_python_warnings():
            warnings.simplefilter("ignore")
            return make_env()

    if index:
        warnings.simplefilter("ignore")
    for number in SIGNALS:
        # Processes that the env starts would inherit SIG_IGN, but not a handler.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # Raised when the trainer has ended.
    with suppress(BrokenPipeError, ConnectionResetError):
        _async_worker(index, make_silently, *arguments)
