"""Configuration of a run. It is frozen: run.yaml holds what ran."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import yaml
from annotated_types import Ge, Gt, Interval, Le
from pydantic_core import to_jsonable_python
from tyro.conf import arg

from paceline.errors import UserError, one_line
from paceline.validation import Count, check, from_dict, parse_yaml

MOST_ENVS = 2**24
Engine = Literal["auto", "mujoco", "warp"]
Logger = Literal["tensorboard", "wandb", "mlflow", "none"]
EnvCount = Annotated[int, Ge(1), Le(MOST_ENVS)]


def option(metavar: str) -> Any:
    """Annotate an option with the name of its value. The help page shows the default only if there is one."""
    return arg(metavar=metavar, help_behavior_hint=_default_hint)


def _default_hint(default: str) -> str:
    return "" if default in ("None", "") else f"(default: {default})"


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the settings that differ, each as "NAME VALUE, now VALUE"."""
    names = dict.fromkeys((*now, *then))
    return [f"{name} {then.get(name)}, now {now.get(name)}" for name in names if then.get(name) != now.get(name)]


def plain(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, as run.yaml holds them: nested dataclasses are dicts, tuples are
    lists."""
    try:
        return to_jsonable_python(options)
    except ValueError as error:
        raise UserError(
            f"an option has a value which run.yaml cannot hold: {one_line(error)}; options are numbers, strings, and "
            "lists of them"
        ) from None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that the command line and run.yaml share."""

    num_envs: Annotated[EnvCount | None, option("N")] = None
    """Number of envs per rank, from 1 to 2^24. The default depends on the task and on the device."""
    total_envs: Annotated[EnvCount | None, option("N")] = None
    """Number of envs over all ranks, from 1 to 2^24. Replaces --num-envs."""
    max_iterations: Annotated[Count, option("M")] = 100
    """Number of iterations after which training stops, including those before a resume; at least 1. Each task has its
    own default."""
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    """Seed of all random numbers, from 0 to 2^63 - 1. On a CPU, the same seed gives bitwise identical runs."""
    engine: Engine = "auto"
    """Physics engine: auto, mujoco (on CPUs) or warp (MuJoCo Warp, on GPUs). Leave it out for gymnasium:ID."""
    logger: Annotated[tuple[Logger, ...], option(f"{{{','.join(get_args(Logger))}}}")] = ("tensorboard",)
    """Loggers of the training metrics: one or more of tensorboard, wandb and mlflow, or none. The file metrics.jsonl is
    always written."""
    image_every: Annotated[int, Ge(0), option("K")] = 50
    """Number of iterations between two pictures of up to 16 envs that the logger shows; at least 0.
    The pictures show what the cameras see, beginning with the first iteration. With 0 there are none."""
    video_every: Annotated[int, Ge(0), option("N")] = 0
    """Number of iterations between two videos of the policy in one env, 5 s each, in RUN/videos and in the loggers; at
    least 0. With 0 there are none. Another process records them. Training is the same with and without them."""
    eval_every: Annotated[int, Ge(0), option("N")] = 0
    """Number of iterations between two evaluations of the policy without exploration noise, as by `paceline eval`; at
    least 0. With 0 there are none. Training is the same with and without them."""
    eval_episodes: Annotated[int, Ge(2), Le(MOST_ENVS), option("N")] = 128
    """Number of episodes of an evaluation, from 2 to 2^24, rounded up to a multiple of the number of ranks. All of
    them run at once, beside the envs of the training."""
    sync: Literal["every-minibatch", "every-iteration", "periodic"] = "every-minibatch"
    """Time at which the ranks of --learner ppo synchronize: every-minibatch averages the gradient of each minibatch, so
    any number of ranks computes the same run. For slow links, every-iteration and periodic instead update each rank
    with its own samples and average the parameters after every iteration, or after --sync-every iterations."""
    sync_every: Annotated[Count | None, option("K")] = None
    """Number of iterations between two syncs of --sync periodic, at least 1. Each checkpoint also synchronizes."""
    checkpoint_every: Annotated[Count, option("N")] = 50
    """Number of iterations between two checkpoints, at least 1."""
    keep_checkpoints: Annotated[Count, option("K")] = 3
    """Number of newest checkpoints to keep, at least 1. The best one is always kept."""
    timeout: Annotated[float, Gt(0), Le(1e6), option("SECONDS")] = 60.0
    """Seconds without a heartbeat after which a rank counts as failed and all ranks exit; above 0, at most 1e6."""
    worker_log_dir: Annotated[str | None, option("DIR")] = None
    """Directory of the logs of all ranks; "" for no logs. The default is RUN/workers.
    The environment variable PACELINE_WORKER_LOG_DIR takes precedence."""


@dataclass(frozen=True)
class TrainConfig(RunOptions):
    """Complete configuration of a run, sufficient to start it again."""

    task: str
    env: dict[str, Any]
    """Options of the task, see `plain`."""
    learner: str = "ppo"
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the learner, see `plain`. A setting that is not here has its default."""
    gpu_ids: tuple[int, ...] = ()
    """GPU indices relative to CUDA_VISIBLE_DEVICES, one rank each. Empty means the CPU."""
    num_envs: EnvCount = field(default=64, kw_only=True)

    def total(self, ranks: int) -> int:
        """Return the number of envs over all ranks. The numbers of two ranks differ by at most one."""
        return self.total_envs or self.num_envs * ranks

    def check(self) -> None:
        """Raise UserError for an invalid value. The options of the task and the settings of the learner are
        checked where these are known."""
        if "none" in self.logger and len(self.logger) > 1:
            raise UserError(f"--logger {' '.join(self.logger)}: none means no logger, so give it alone")
        check(self, "--")
        if self.sync == "periodic" and self.sync_every is None:
            raise UserError("--sync periodic needs --sync-every K, the number of iterations between two syncs")
        if self.sync != "periodic" and self.sync_every is not None:
            raise UserError(f"--sync-every {self.sync_every} with --sync {self.sync}: it needs --sync periodic")
        self.to_yaml()

    def by_name(self) -> dict[str, Any]:
        """Return all values that determine the training, by name, such as "num_envs" or "ppo.clip". The GPUs and the
        directory of logs differ from host to host and are left out."""
        found: dict[str, Any] = {}
        for name, value in plain(self).items():
            name = self.learner if name == "settings" else name
            if name not in ("gpu_ids", "worker_log_dir"):
                found |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        return found

    def to_yaml(self) -> str:
        return yaml.safe_dump({"task": self.task, "learner": self.learner} | plain(self), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str, source: str) -> "TrainConfig":
        try:
            values = parse_yaml(text)
        except ValueError as error:
            raise UserError(f"{source} is not valid YAML: {error}") from None
        if not isinstance(values, dict) or "task" not in values or "env" not in values:
            raise UserError(f"{source} is not a run's configuration: it has no 'task' and 'env'")
        # Every run.yaml of version 0.1 has this key, and no later one.
        if "timeout_seconds" in values:
            raise UserError(f"{source} was written by Paceline 0.1: use that version, or train the task again")
        # Earlier versions had one logger.
        if isinstance(values.get("logger"), str):
            values["logger"] = [values["logger"]]
        return from_dict(cls, values, source)
