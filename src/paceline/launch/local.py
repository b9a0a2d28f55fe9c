"""Several ranks on this machine, started and watched over by torch's own elastic launcher."""

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.interrupts import INHERITED_IGNORED, ignore, raise_keyboard_interrupt


class RankFailedError(Exception):
    """A rank ended otherwise than by finishing, and no restart was left; the message says which, and how."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


QUIRKS = {
    # Without it, torch's c10d rendezvous has a killed worker use up several restarts, and a lost node does not come back.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # Ranks that were asked to stop finish their iteration and save; by default they are killed after 30 s.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
}


def launch(words: list[str], ranks: int, max_restarts: int) -> None:
    """Run `paceline WORDS` in so many processes, which find each other by what the launcher tells them. When one fails
    all are started anew, up to `max_restarts` times."""
    os.environ.update(QUIRKS)
    # What it has to say of a failure or a signal, the ranks have said in fewer words.
    logging.disable(logging.CRITICAL)
    raise_keyboard_interrupt()
    with tempfile.TemporaryDirectory(prefix="paceline_") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=signals_to_handle(),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "paceline", *words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
            message = f"rank {rank} {how}, and no restart was left (--max-restarts {max_restarts})"
            raise RankFailedError(message, failure.exitcode) from None
        except SignalException as error:
            raise KeyboardInterrupt from error
        finally:
            # Torch's handlers raise; what is left to do here and in the caller takes no time.
            ignore()
            end_descendants()


def signals_to_handle(*required: signal.Signals) -> str:
    """Names of the signals for which torch's launcher installs handlers, separated by commas: all that it handles by
    default, except those that this process inherited as ignored and that are not `required`."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return ",".join(number.name for number in handled if number in required or number not in INHERITED_IGNORED)


def end_descendants(patience_seconds: float = 0.0) -> None:
    """Nothing is left behind, however the launcher was ended; with patience, what is left is asked to end first."""
    deadline = time.monotonic() + patience_seconds
    if patience_seconds:
        _signal_descendants(signal.SIGTERM)
    while time.monotonic() < deadline and _descendants(os.getpid()):
        time.sleep(0.05)
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
    _signal_descendants(signal.SIGKILL)


def _signal_descendants(number: int) -> None:
    for pid in _descendants(os.getpid()) if sys.platform == "linux" else ():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in children.read_text().split()]
    return found + [deeper for child in found for deeper in _descendants(child)]
