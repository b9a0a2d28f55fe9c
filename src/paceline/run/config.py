"""Configuration of a run. It is frozen: run.yaml holds what ran."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import yaml

from paceline.errors import UserError, unknown
from paceline.validation import above_zero, at_least_one, from_dict, parse_yaml

MOST_ENVS = 2**24
LOGGERS = ("tensorboard", "none")
LONGEST_TIMEOUT = 1e6
"""Largest timeout, s."""


@dataclass(frozen=True)
class TrainConfig:
    """Complete configuration of a run, sufficient to start it again."""

    task: str
    env: dict[str, Any]
    """Options of the task, by field name."""
    learner: str = "ppo"
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the learner, by field name. A setting that is not here has its default."""
    engine: str = "auto"
    gpu_ids: tuple[int, ...] = ()
    """GPU indices relative to CUDA_VISIBLE_DEVICES, one rank each. Empty means the CPU."""
    num_envs: int = 64
    """Number of envs per rank."""
    total_envs: int | None = None
    """Number of envs over all ranks, in place of `num_envs`. The numbers of envs of two ranks differ by at most one."""
    max_iterations: int = 100
    """Total number of iterations, including those before a resume."""
    seed: int = 0
    logger: str = "tensorboard"
    checkpoint_every: int = 50
    """Number of iterations between checkpoints."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep. The best one is kept as well."""
    timeout_seconds: float = 60.0
    """Time without a heartbeat after which a rank counts as failed and all ranks end, s."""
    worker_log_dir: str | None = None
    """Directory for the log of each rank, by default workers/ in the run directory. Empty writes no logs."""

    def total(self, ranks: int) -> int:
        """Return the number of envs over all ranks."""
        return self.total_envs or self.num_envs * ranks

    def check(self) -> None:
        """Raise UserError for a value that cannot work. The options of the task and the settings of the learner are
        checked where these are known."""
        if self.logger not in LOGGERS:
            raise unknown("logger", self.logger, LOGGERS)
        for name in ("num_envs", "max_iterations", "checkpoint_every", "keep_checkpoints"):
            at_least_one("--" + name.replace("_", "-"), getattr(self, name))
        if self.total_envs is not None:
            at_least_one("--total-envs", self.total_envs)
        above_zero("--timeout", self.timeout_seconds, LONGEST_TIMEOUT)
        if self.total(1) > MOST_ENVS:
            flag = "--total-envs" if self.total_envs else "--num-envs"
            raise UserError(f"{flag} {self.total(1)} must be at most {MOST_ENVS}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed} must be between 0 and 2^63 - 1")
        self.to_yaml()

    def by_name(self) -> dict[str, Any]:
        """Return all values that determine the training, by name, such as "num_envs" or "ppo.clip". The GPUs and the
        directory of logs differ from host to host and are left out."""
        found: dict[str, Any] = {}
        for name, value in _plain(dataclasses.asdict(self)).items():
            name = self.learner if name == "settings" else name
            if name not in ("gpu_ids", "worker_log_dir"):
                found |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        return found

    def to_yaml(self) -> str:
        try:
            return yaml.safe_dump(_plain(dataclasses.asdict(self)), sort_keys=False)
        except yaml.representer.RepresenterError as error:
            value = error.args[1]
            raise UserError(
                f"task {self.task!r} has an option with a {type(value).__name__} in it ({value!r}), "
                "which run.yaml cannot hold: options are numbers, words, and lists of them"
            ) from None

    @classmethod
    def from_yaml(cls, text: str, source: str) -> "TrainConfig":
        try:
            values = parse_yaml(text)
        except ValueError as error:
            raise UserError(f"{source} is not valid YAML: {error}") from None
        if not isinstance(values, dict) or "task" not in values or "env" not in values:
            raise UserError(f"{source} is not a run's configuration: it has no 'task' and 'env'")
        return from_dict(cls, values, source)


def _plain(value: Any) -> Any:
    """Return `value` with tuples as lists, as YAML has them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
