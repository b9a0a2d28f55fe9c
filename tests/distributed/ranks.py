"""Real processes as ranks, over gloo."""

import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch

from tests.forked import CONTEXT, paceline


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def variables(index: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables that a launcher sets for a rank of one host."""
    return {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def on_ranks(count: int, work: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> list[Any]:
    """Return what `work(*arguments)` returns in each of `count` processes. An exception in one is raised here."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(index) for index in range(count)]
        processes = [
            CONTEXT.Process(target=_enter, args=(os.environ | variables(index, count, port), file, work, arguments))
            for index, file in enumerate(files)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(seconds)
        finally:
            for process in processes:
                process.kill()
        failed = [(index, process.exitcode) for index, process in enumerate(processes) if process.exitcode]
        assert not failed, f"ranks and their exit codes: {failed}"
        return [torch.load(file, weights_only=False) for file in files]


RankCommand = tuple[list[str], dict[str, str]]
"""Arguments of `paceline` and environment variables."""


def paceline_on_ranks(cwd: Path, *ranks: RankCommand) -> list[CompletedProcess[str]]:
    """Run `paceline` with the arguments and variables of each rank, without a launcher, and wait for the end of all."""
    port, count = free_port(), len(ranks)

    def run(index: int) -> CompletedProcess[str]:
        argv, environment = ranks[index]
        return paceline(*argv, cwd=cwd, **environment | variables(index, count, port))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def _enter(environment: dict[str, str], file: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        torch.save(work(*arguments), file)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
