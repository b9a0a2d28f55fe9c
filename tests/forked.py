"""Processes forked from one that has imported torch. Importing it takes longer than what most tests do."""

import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("paceline.cli.train", "paceline.cli.launch", "paceline.env.robot_env"),
        *("torch.distributed.run", "torch.utils.tensorboard", "pytest"),
    ]
)
_SECONDS = 120.0


def paceline(*argv: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `paceline ARGV` in a new process and wait for its end."""
    return python_m("paceline", *argv, cwd=cwd, **environment)


def python_m(module: str, *argv: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGV` in a new process and wait for its end."""
    arguments = [module, *map(str, argv)]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "stdout", Path(folder) / "stderr"
        process = CONTEXT.Process(target=_run, args=(arguments, cwd, os.environ | environment, files))
        process.start()
        process.join(_SECONDS)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, _SECONDS)
        return subprocess.CompletedProcess(arguments, process.exitcode, *(file.read_text() for file in files))


def _run(argv: list[str], cwd: Path, environment: dict[str, str], files: tuple[Path, Path]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
