"""Read the runs that a report compares."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError, one_line
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.metrics_file import read_metrics
from paceline.training.evaluation import Evaluation
from paceline.validation import from_dict, parse_json, read_text, shown

Array = NDArray[np.float64]

# Options by which runs of one group may differ. They do not change what a run learns.
_MINOR_OPTIONS = (
    *("seed", "num_envs", "total_envs", "logger", "image_every", "video_every", "eval_every", "eval_episodes"),
    *("checkpoint_every", "keep_checkpoints", "timeout"),
)
# Metrics without which a run cannot be compared. Those of the second line are measured by each rank.
_REQUIRED = ("speed/steps_per_second", "progress/env_steps", "progress/train_seconds")
_REQUIRED_OF_RANKS = ("seconds/collect", "seconds/update", "seconds/sync", "memory/used_mib")
_STEADY_ITERATIONS = 3


@dataclass(frozen=True)
class SessionFacts:
    """Facts of a session of training, from metrics.jsonl."""

    first_iteration: int
    world_size: int
    total_envs: int
    steps_per_iteration: int
    engine: str
    device_name: str
    backend: str
    cores: int = 0
    """Number of cores of a rank; 0 if the run does not state it."""


@dataclass(frozen=True)
class RunData:
    """A run with its metrics."""

    path: Path
    config: TrainConfig
    status: str
    sessions: list[SessionFacts]
    metrics: dict[str, Array]
    """Values by name, float64 [iteration], and their "iteration". NaN if a metric has no value in an iteration."""
    evaluation: Evaluation | None
    """Evaluation of the policy after the last iteration."""

    @property
    def facts(self) -> SessionFacts:
        """Facts of the last session."""
        return self.sessions[-1]

    @property
    def device(self) -> str:
        """Name of the device for labels and tables, such as "CPU"."""
        return self.facts.device_name.removeprefix("the ")

    @property
    def envs_per_rank(self) -> int:
        return round(self.facts.total_envs / self.facts.world_size)

    @property
    def iterations(self) -> int:
        """The last iteration."""
        return int(self.metrics["iteration"][-1])

    def over_ranks(self, name: str) -> dict[str, Array]:
        """Return the minimum, mean and maximum over ranks of a metric that each rank measures."""
        return {kind: self.metrics.get(f"{name}/{kind}", self._of_one_rank(name)) for kind in ("min", "mean", "max")}

    def steady(self, values: Array) -> Array:
        """Return the known values of iterations after the first two of each session, which compile and record CUDA
        graphs; those of all iterations if too few remain."""
        numbers, known = self.metrics["iteration"], ~np.isnan(values)
        warmup = np.isin(numbers, [session.first_iteration + i for session in self.sessions for i in (0, 1)])
        return values[known & ~warmup] if (known & ~warmup).sum() >= _STEADY_ITERATIONS else values[known]

    def points(self, x_name: str, y_name: str) -> tuple[Array, Array]:
        """Return two metrics in the iterations in which both have a value; empty if the run does not have both."""
        missing = np.array([], dtype=np.float64)
        if x_name not in self.metrics or y_name not in self.metrics:
            return missing, missing
        x, y = self.metrics[x_name], self.metrics[y_name]
        both = ~np.isnan(x) & ~np.isnan(y)
        return x[both], y[both]

    def _of_one_rank(self, name: str) -> Array:
        return self.metrics.get(name, np.full(len(self.metrics["iteration"]), np.nan))

    def options(self) -> dict[str, Any]:
        """Return the options that determine what the run learns and its speed, except the number of envs, by name."""
        return {name: value for name, value in self.config.by_name().items() if name not in _MINOR_OPTIONS}

    def has_cameras(self) -> bool:
        return any("camera" in name for name in self.config.env)


def log_file(run: Path) -> Path:
    """Return the file beside the directory of a run in which a scaling experiment stores the output of the run."""
    return run.parent / f"{run.name}.log"


def without_logs(paths: Iterable[Path]) -> list[Path]:
    """Return the paths, each once, without the logs of runs that are among them: `paceline report GRID/ranks_*` matches
    the directory of a run and its log."""
    unique = dict.fromkeys(paths)
    logs = {log_file(path) for path in unique if path.is_dir()}
    return [path for path in unique if path not in logs or path.is_dir()]


def read_run(path: Path, needs_returns: bool = True) -> RunData:
    """Read a run. Raise UserError if a file is missing or damaged, and with `needs_returns` if no episode has ended."""
    run = RunDir.open(str(path))
    try:
        status = parse_json(read_text(run.result_file)).get("status")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {run.result_file}: {one_line(error)}") from None
    iterations, sessions = _read_metrics(run.metrics_file)
    names = dict.fromkeys(name for metrics in iterations for name in metrics)
    metrics = {name: _column(run.metrics_file, iterations, name) for name in names}
    _check_complete(run.metrics_file, metrics, needs_returns)
    return RunData(
        path=run.path,
        config=run.config(),
        status=str(status),
        sessions=sessions,
        metrics=metrics,
        evaluation=_read_evaluation(run.evaluations, int(metrics["iteration"][-1])),
    )


def _read_metrics(file: Path) -> tuple[list[dict[str, Any]], list[SessionFacts]]:
    """Return the metrics of each iteration and the facts of each session, at least one of both."""
    if not file.exists():
        raise UserError(f"{file.parent} has no {file.name}: an older version of Paceline trained it; train it again")
    try:
        iterations, records = read_metrics(file)
    except (OSError, TypeError) as error:
        raise UserError(f"cannot read {file}: {one_line(error)}") from None
    names = [field.name for field in fields(SessionFacts)]
    known = [{name: record[name] for name in names if name in record} for record in records]
    sessions = [from_dict(SessionFacts, record, str(file)) for record in known]
    if not iterations or not sessions:
        raise UserError(f"{file} has no complete iteration: wait for the run's first one, or train it again")
    return iterations, sessions


def _column(file: Path, iterations: list[dict[str, Any]], name: str) -> Array:
    values = [metrics.get(name) for metrics in iterations]
    for value in values:
        if value is not None and type(value) not in (int, float):
            raise UserError(f"{file} is damaged: {name} is {shown(value)}, not a number")
    column = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return np.where(np.isfinite(column), column, np.nan)


def _check_complete(file: Path, metrics: dict[str, Array], needs_returns: bool) -> None:
    known = {name for name, values in metrics.items() if not np.isnan(values).all()}
    if needs_returns and "episode/return" not in known:
        raise UserError(f"{file} has no return: no episode has ended; train the run longer")
    of_ranks = [name for name in _REQUIRED_OF_RANKS if not known & {name, f"{name}/mean"}]
    if missing := [name for name in _REQUIRED if name not in known] + of_ranks:
        raise UserError(f"{file} is damaged: it has no values of {', '.join(missing)}")


def _read_evaluation(directory: Path, iteration: int) -> Evaluation | None:
    """Return the evaluation of an iteration that has the most episodes."""
    found = [Evaluation.read(file) for file in sorted(directory.glob(f"iteration_{iteration:08d}_*.json"))]
    return max(found, key=lambda evaluation: evaluation.episodes, default=None)
