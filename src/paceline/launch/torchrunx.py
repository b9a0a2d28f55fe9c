"""Start several ranks on this machine or on several machines over SSH with torchrunx.

torchrunx is licensed under the GPL-3.0 and therefore a separate extra: `pip install paceline[torchrunx]`. It does not
restart ranks after a failure; torch's elastic launcher does.
"""

import logging
import os
import runpy
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, TextIO

from paceline.errors import UserError, one_line
from paceline.launch.local import RankFailedError, end_descendants, signals_to_handle
from paceline.process import interrupts
from paceline.process.parent import die_with

if TYPE_CHECKING:
    from torchrunx import Launcher

_SAFE_PATH = "PYTHONSAFEPATH"
# The launcher receives the output of ranks in a separate thread.
_LAST_OUTPUT_SECONDS = 0.5
# Ranks that receive a stop request save a checkpoint first.
_STOP_SECONDS = 10.0


def launch(argv: list[str], ranks: int, hosts: tuple[str, ...]) -> None:
    """Run `paceline ARGV` in `ranks` processes on each of `hosts`, or on this machine. Paceline must be installed on
    each host."""
    try:
        import torchrunx
    except ModuleNotFoundError:
        raise UserError("--launcher torchrunx needs torchrunx (GPL-3.0): pip install 'paceline[torchrunx]'") from None
    hosts = hosts or ("localhost",)
    # Read by torch in torchrunx's agents, which start the ranks. torchrunx copies TORCH* variables to the agents, and
    # ends them with SIGTERM.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals_to_handle(signal.SIGTERM)
    launcher = torchrunx.Launcher(
        hostnames=list(hosts),
        workers_per_host=ranks,
        backend=None,  # the ranks form their own group
        copy_env_vars=(*torchrunx.DEFAULT_ENV_VARS_FOR_COPY, "PACELINE*", "GLOO*", "OMP*", "GOMP*", "MUJOCO*"),
        # The agents are started with `python -m` and must not import modules of the current directory.
        extra_env_vars={_SAFE_PATH: "1"},
    ).set_logging_handlers(partial(_handlers, hosts[0], os.getpid()))
    interrupts.raise_keyboard_interrupt()
    try:
        codes = _exit_codes(launcher, argv)
    finally:
        interrupts.ignore()
        end_descendants(_STOP_SECONDS)
    if worst := max(codes):
        raise RankFailedError(f"ended with {worst}", worst)


def _exit_codes(launcher: "Launcher", argv: list[str]) -> list[int]:
    """Run the ranks and return their exit codes.

    An exception is raised without the traceback of torchrunx, which would keep the connections to the agents open. The
    agents wait for an answer of the launcher until their connections are closed."""
    try:
        ended = launcher.run(_run_rank, argv)
    except KeyboardInterrupt:
        stopped = KeyboardInterrupt()
    except Exception as error:
        stopped = RankFailedError(f"{type(error).__name__}: {one_line(error)}")
    else:
        return [code for codes in ended.results.values() for code in codes]
    raise stopped


def _handlers(main_host: str, launcher: int) -> list[logging.Handler]:
    """Print the output of the main rank, in torchrunx's logging process. The other ranks have their log files."""
    die_with(launcher)

    def handler(stream: TextIO, errors: bool) -> logging.Handler:
        found = logging.StreamHandler(stream)
        found.addFilter(lambda record: record.__dict__.get("hostname") == main_host)
        found.addFilter(lambda record: record.__dict__.get("local_rank") == 0)
        found.addFilter(lambda record: (record.levelno >= logging.ERROR) == errors)
        return found

    return [handler(sys.stdout, errors=False), handler(sys.stderr, errors=True)]


def _run_rank(argv: list[str]) -> int:
    """Run one rank; return its exit code."""
    sys.argv, code = ["paceline", *argv], 0
    # Only for the agent: programs that an env starts import as usual.
    os.environ.pop(_SAFE_PATH, None)
    try:
        runpy.run_module("paceline", run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    if code == 1 or interrupts.received:
        # A rank that returns after a failure or a stop request would wait forever for a launcher that may have ended.
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LAST_OUTPUT_SECONDS)
        os._exit(code)
    return code
