"""Measure the parts of an iteration, from the metrics of a run and by short trainings."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from math import inf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from paceline.device.cpu import cores_of_new_processes
from paceline.distributed.launcher import variables_without_launcher
from paceline.errors import UserError, counted, one_line
from paceline.experiments.run_data import RunData, read_run
from paceline.process.parent import dying_with_this
from paceline.process.stage import stage
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir, write_atomically
from paceline.train import train
from paceline.validation import from_dict, parse_json, read_text

_WARMUP_ITERATIONS = 2
_NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution whose median absolute deviation is 1."""
_MOST_ENVS_TO_COUNT = 64
_FEWER_ENVS = 4
"""Ratio of two numbers of envs for which the parts of an iteration are measured."""
_MOST_MEASUREMENTS = 4
_MOST_ATTEMPTS = 3
_PLAUSIBLE = 1.5
"""Largest ratio of the times of two iterations of which the first one has fewer envs. Larger ones are due to other
processes."""


@dataclass(frozen=True)
class Parts:
    """Times of an iteration on one rank, s."""

    num_envs: int
    """Number of envs of the rank."""
    collect: float
    update: float
    """Without the synchronization."""
    other: float
    """Metrics and logging."""
    variation: float
    """Standard deviation of the time of a rank between iterations."""

    @property
    def busy(self) -> float:
        """Time of collection and update."""
        return self.collect + self.update


@dataclass(frozen=True)
class Sums:
    """Sums over ranks."""

    per_iteration: float
    num_bytes: float
    """Mean size of a message, bytes."""


class Measurements:
    """The parts and the sums of iterations of a run, from its metrics and from short trainings. Results of short
    trainings are stored in RUN/forecast/measured.json and used again."""

    def __init__(self, run: RunData, iterations: int, console: Console):
        """`iterations` is the number of measured iterations of a short training. Progress is shown on `console`."""
        self._run, self._iterations, self._console = run, iterations, console
        self._file = run.path / "forecast" / "measured.json"
        self._stored: dict[str, Any] = {"parts": [], "sums": None}
        if self._file.exists():
            try:
                self._stored |= parse_json(read_text(self._file))
            except (OSError, ValueError) as error:
                raise UserError(f"cannot read {self._file}: {one_line(error)}; delete it to measure again") from None

    def sums(self) -> Sums:
        if found := sums_of(self._run):
            return found
        if not self._stored["sums"]:
            with self._showing("Counting the sums over ranks"):
                self._store(sums=asdict(count_sums(self._run)))
        return from_dict(Sums, self._stored["sums"], str(self._file))

    def parts(self, fewest_envs: int | None) -> list[Parts]:
        """Return the parts for the number of envs per rank of the run and for smaller ones down to `fewest_envs`,
        ascending. With None, no training is started."""
        own = parts_of(self._run)
        if fewest_envs is None:
            return [own]
        known = {part.num_envs: part for part in self._stored_parts()}
        known |= {own.num_envs: own} if can_separate(self._run) else {}
        wanted = [own.num_envs]
        while len(wanted) < _MOST_MEASUREMENTS and wanted[-1] > fewest_envs:
            wanted.append(max(fewest_envs, wanted[-1] // _FEWER_ENVS))
        more = None
        for num_envs in wanted:
            if num_envs not in known:
                known[num_envs] = self._measure(num_envs, more)
            more = known[num_envs]
        return [known[num_envs] for num_envs in sorted(known)]

    def _measure(self, num_envs: int, more: Parts | None) -> Parts:
        """Measure and store the parts. `more` are those with more envs. A measurement that takes longer than with more
        envs is repeated; if it still does, a warning is printed."""
        found = list[Parts]()
        limit = _PLAUSIBLE * more.busy if more else inf
        with self._showing(f"Measuring iterations with {counted(num_envs, 'env')}"):
            while not found or (found[-1].busy > limit and len(found) < _MOST_ATTEMPTS):
                found.append(measure_parts(self._run, num_envs, self._iterations))
        best = min(found, key=lambda parts: parts.busy)
        self._store(parts=[*self._stored["parts"], asdict(best)])
        if more and best.busy > limit:
            self._console.print(
                f"Iterations with {counted(num_envs, 'env')} took {best.busy:.2g} s, those with {more.num_envs} "
                f"{more.busy:.2g} s. Other processes disturb the measurement: delete {escape(str(self._file))} and "
                "repeat the command on an idle machine.",
                soft_wrap=True,
            )
        return best

    def _stored_parts(self) -> list[Parts]:
        return [from_dict(Parts, values, str(self._file)) for values in self._stored["parts"]]

    def _store(self, **values: Any) -> None:
        self._stored |= values
        self._file.parent.mkdir(exist_ok=True)
        write_atomically(self._file, json.dumps(self._stored, indent=2).encode() + b"\n")

    def _showing(self, text: str) -> AbstractContextManager[None]:
        if not self._console.is_terminal:
            self._console.print(text)
        return stage(self._console, text)


def parts_of(run: RunData) -> Parts:
    """Return the parts of an iteration of a run, means over its iterations without the first two."""
    collect, update, sync = (run.over_ranks(f"seconds/{name}")["mean"] for name in ("collect", "update", "sync"))
    whole = np.diff(run.metrics["progress/train_seconds"], prepend=np.nan)
    known = [run.steady(values) for values in (collect, update - sync, whole - collect - update)]
    # A run with one iteration does not show its other work.
    in_collect, in_update, other = (max(float(values.mean()), 0.0) if len(values) else 0.0 for values in known)
    # Differences between successive iterations do not contain slow changes, and a mean over ranks varies less than one
    # rank.
    changes = np.diff(run.steady(collect + update - sync))
    variation = _NORMAL_MAD * float(np.median(np.abs(changes))) / sqrt(2) if len(changes) else 0.0
    return Parts(run.envs_per_rank, in_collect, in_update, other, variation * sqrt(run.facts.world_size))


def can_separate(run: RunData) -> bool:
    """Return whether the metrics of a run show its update without the synchronization."""
    return run.facts.world_size == 1 or run.facts.backend != "nccl"


def measure_parts(run: RunData, num_envs: int, iterations: int) -> Parts:
    """Train for a few iterations with one rank and `num_envs` envs, on the device of the run."""
    config = replace(_short(run.config, num_envs, _WARMUP_ITERATIONS + iterations), gpu_ids=run.config.gpu_ids[:1])
    return parts_of(_train_apart(config, run.facts.cores if not config.gpu_ids else 0))


def sums_of(run: RunData) -> Sums | None:
    """Return the sums over ranks of a run, or None if it had only one rank, or if they were part of a CUDA graph."""
    if "sync/collectives" not in run.metrics or not np.nansum(run.metrics["sync/collectives"]):
        return None
    counts, num_bytes = (run.metrics[f"sync/{name}"] for name in ("collectives", "bytes"))
    return Sums(float(np.nanmean(counts)), float(np.nansum(num_bytes) / np.nansum(counts)))


def count_sums(run: RunData) -> Sums:
    """Train for a few iterations with one CPU rank that takes part in sums, and count them. They depend neither on the
    device nor on the number of envs."""
    config = _short(run.config, min(run.envs_per_rank, _MOST_ENVS_TO_COUNT), 2 * (run.config.sync_every or 1))
    config = replace(config, gpu_ids=(), engine="auto" if config.engine == "warp" else config.engine)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    found = sums_of(_train_apart(config, 0, **rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
    assert found
    return found


def _short(config: TrainConfig, num_envs: int, iterations: int) -> TrainConfig:
    """Return a configuration that trains for a few iterations and writes little."""
    quiet: dict[str, Any] = {"logger": ("none",), "image_every": 0, "video_every": 0, "eval_every": 0}
    quiet |= {"checkpoint_every": iterations, "worker_log_dir": ""}
    return replace(config, num_envs=num_envs, total_envs=None, max_iterations=iterations, **quiet)


def _train_apart(config: TrainConfig, cores: int, **rank: Any) -> RunData:
    """Train in another process, on the given number of cores if it is not 0, and return the run. `rank` are the
    variables of a launcher."""
    with tempfile.TemporaryDirectory(prefix="paceline_") as folder:
        directory, log = Path(folder) / "run", Path(folder) / "log"
        with log.open("wb") as output:
            command = [sys.executable, "-P", "-m", "paceline.experiments.iteration_parts", str(directory)]
            with cores_of_new_processes(cores):
                process = subprocess.Popen(
                    dying_with_this(command),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=variables_without_launcher(os.environ) | {name: str(value) for name, value in rank.items()},
                )
            try:
                process.communicate(config.to_yaml().encode())
            finally:
                process.kill()
        if process.returncode:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise UserError(f"a short training with {counted(config.num_envs, 'env')} failed: {lines[-1]}")
        return read_run(directory, needs_returns=False)


if __name__ == "__main__":
    train(TrainConfig.from_yaml(sys.stdin.read(), "standard input"), RunDir(Path(sys.argv[1])), Console(quiet=True))
