"""Entry point of the command line: choose the command and turn errors into exit codes."""

import os
import sys
from importlib import import_module

from rich.console import Console

from paceline import __version__
from paceline.distributed.launcher import is_first_rank
from paceline.errors import UserError, unknown
from paceline.process import streams
from paceline.process.stage import stage

# The module of each command, which has a function COMMAND(argv, console) -> exit code.
_COMMANDS = {
    "train": "train",
    "launch": "launch",
    "status": "jobs",
    "logs": "jobs",
    "cancel": "jobs",
    "tensorboard": "jobs",
    "scale": "scale",
    "tasks": "commands",
    "eval": "evaluate",
    "report": "report",
    "play": "commands",
    "export": "commands",
    "doctor": "commands",
    "check": "check",
    "new-task": "new_task",
}

OVERVIEW = f"""Paceline {__version__}: train robot policies in thousands of MuJoCo environments.

  paceline train TASK       Train a policy, or continue a run: --resume RUN.
  paceline launch FILE      Run a workflow file: several nodes or tasks.
  paceline status JOB       Show a job of paceline launch.
  paceline logs JOB         Print the output of the tasks of a job.
  paceline cancel JOB       End a job.
  paceline tensorboard JOB  Print the address of the TensorBoard of a job.
  paceline scale            Compare training on several numbers of ranks.
  paceline tasks            List the tasks.
  paceline eval RUN         Evaluate a trained policy over many episodes.
  paceline report RUN...    Compare the learning curves and speed of runs.
  paceline play RUN         Record a video of a policy, or show it in a browser.
  paceline export RUN       Export a trained policy as ONNX or TorchScript.
  paceline doctor           Check this machine before training.
  paceline new-task NAME    Write a package with a task, to start your own.
  paceline check TASK       Check a task or an env against its contract.

`paceline COMMAND --help` lists the options of a command.
To start, run `paceline train cartpole`.
"""


def main() -> int:
    """Run the command in `sys.argv` and return the exit code."""
    # OpenMP threads spin for a short time only, because the physics needs their cores between two torch operations.
    # torch reads the variable when it is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    output = streams.install()
    argv = sys.argv[1:]
    try:
        code = _dispatch(argv)
    except UserError as error:
        print(f"paceline: {error}", file=sys.stderr)
        code = 2
    except SystemExit as end:
        # A help page was printed.
        code = int(end.code or 0)
    sys.stdout.flush()
    # Training continues without its output. A pipe that its reader closed is not an error.
    if output.error and argv[:1] != ["train"] and not isinstance(output.error, BrokenPipeError):
        print(f"paceline: cannot write to standard output: {output.error.strerror}", file=sys.stderr)
        code = code or 1
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(OVERVIEW, end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return 0
    if argv[0] not in _COMMANDS:
        raise unknown("command", argv[0], _COMMANDS)
    console = Console(highlight=False, soft_wrap=True)
    module = f"paceline.cli.{_COMMANDS[argv[0]]}"
    if argv[0] == "train" and is_first_rank():
        with stage(console, "Loading PyTorch and MuJoCo"):
            import_module(module)
    return getattr(import_module(module), argv[0].replace("-", "_"))(argv[1:], console)
