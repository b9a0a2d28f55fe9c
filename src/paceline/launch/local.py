"""Start several ranks on this machine with torch's elastic launcher."""

import logging
import os
import signal
import sys
import tempfile
import uuid
from contextlib import suppress

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.distributed.failure import REFUSAL_EXIT_CODE
from paceline.process.interrupts import INHERITED_IGNORED, ignore, raise_keyboard_interrupt

_TORCH_VARIABLES = {
    # Without it, a killed worker uses up several restarts of torch's c10d rendezvous, and a lost node does not rejoin.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # Ranks that receive a stop request finish their iteration and save. By default they are killed after 30 s.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
}


class RankFailedError(Exception):
    """A rank failed and no restart was left. The message names the rank and how it ended. If a signal ended it, so that
    it could not print the cause, `exit_code` is negative."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


def launch(argv: list[str], ranks: int, max_restarts: int) -> None:
    """Run `paceline ARGV` in `ranks` processes. When one fails, end all and restart all, up to `max_restarts` times,
    unless a rank refused its input."""
    os.environ.update(_TORCH_VARIABLES)
    # The ranks print the causes of failures and signals themselves.
    logging.disable(logging.CRITICAL)
    run_id = uuid.uuid4().hex
    for restart in range(max_restarts + 1):
        try:
            return _launch_once(argv, ranks, run_id)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
            if failure.exitcode == REFUSAL_EXIT_CODE or restart == max_restarts:
                message = f"rank {rank} {how}, and no restart was left (--max-restarts {max_restarts})"
                raise RankFailedError(message, failure.exitcode) from None
            print(f"paceline: rank {rank} {how}: restart {restart + 1} of {max_restarts}", file=sys.stderr, flush=True)


def _launch_once(argv: list[str], ranks: int, run_id: str) -> None:
    raise_keyboard_interrupt()
    with tempfile.TemporaryDirectory(prefix="paceline_") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=signals_to_handle(),
        )
        try:
            # -P: no rank imports modules of the current directory.
            elastic_launch(config, sys.executable)("-P", "-m", "paceline", *argv)
        except SignalException as error:
            raise KeyboardInterrupt from error
        finally:
            # Replace torch's signal handlers, which raise exceptions.
            ignore()
            end_descendants()


def signals_to_handle(*required: signal.Signals) -> str:
    """Return the names of the signals for which torch's launcher installs handlers, separated by commas. Signals
    that this process inherited as ignored are left out unless they are `required`."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return ",".join(number.name for number in handled if number in required or number not in INHERITED_IGNORED)


def end_descendants(grace_seconds: float = 0.0) -> None:
    """Kill all processes that descend from this one. With `grace_seconds`, send SIGTERM first and wait that long."""
    for number in (signal.SIGTERM, signal.SIGKILL) if grace_seconds else (signal.SIGKILL,):
        descendants = psutil.Process().children(recursive=True)
        for process in descendants:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if number == signal.SIGTERM:
            psutil.wait_procs(descendants, grace_seconds)
