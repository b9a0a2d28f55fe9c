"""What a run is made of. Frozen: what run.yaml says is what ran."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

import yaml
from typeguard import TypeCheckError, check_type

from paceline.errors import UserError, unknown

LEARNERS = ("ppo",)
LEARNING_RATES = (1e-5, 1e-2)
"""Between which it is adapted."""
MOST_ENVS = 2**24
LOGGERS = ("tensorboard", "none")


@dataclass(frozen=True)
class PpoConfig:
    """The native PPO's settings."""

    horizon: int = 24
    """Steps per world and iteration."""
    epochs: int = 5
    """Passes over each iteration's samples."""
    minibatches: int = 4
    """Parts of a pass; each takes its share of time steps from every world, so it must divide the horizon."""
    hidden: tuple[int, ...] = (256, 128, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: Literal["elu", "relu", "tanh"] = "elu"
    learning_rate: float = 1e-3
    """At the start; adapted from then on, between 1e-5 and 1e-2, if `desired_kl` is set."""
    desired_kl: float = 0.01
    """The policy's change per minibatch that the learning rate aims at; 0 keeps the learning rate as it is."""
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    """How far the probability ratio, and the value, may move from where they were."""
    clip_value: bool = True
    value_weight: float = 1.0
    entropy_weight: float = 0.005
    max_gradient_norm: float = 1.0
    initial_std: float = 1.0
    """Of the action noise."""
    normalize_observations: bool = True

    def check(self) -> None:
        for name in ("horizon", "epochs", "minibatches"):
            at_least_one(f"--ppo.{name}", getattr(self, name))
        if self.horizon % self.minibatches:
            raise UserError(
                f"--ppo.minibatches {self.minibatches} does not divide --ppo.horizon {self.horizon}: "
                "each minibatch takes the same number of time steps from every world"
            )
        if not self.hidden or min(self.hidden) < 1:
            raise UserError(f"--ppo.hidden {self.hidden} is not a list of widths: give for example 64 64")
        for name in ("learning_rate", "initial_std", "max_gradient_norm", "clip"):
            above_zero(f"--ppo.{name.replace('_', '-')}", getattr(self, name))
        lowest, highest = LEARNING_RATES
        if self.desired_kl and not lowest <= self.learning_rate <= highest:
            raise UserError(
                f"--ppo.learning-rate {self.learning_rate:g} is outside {lowest:g} to {highest:g}, between which "
                "it is adapted: choose one inside, or keep it as it is with --ppo.desired-kl 0"
            )
        for name in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"--ppo.{name.replace('_', '-')} {getattr(self, name)} must be between 0 and 1")
        for name in ("desired_kl", "value_weight", "entropy_weight"):
            if not getattr(self, name) >= 0:
                raise UserError(f"--ppo.{name.replace('_', '-')} {getattr(self, name)} must not be negative")


@dataclass(frozen=True)
class TrainConfig:
    """One run, complete: enough to start it again."""

    task: str
    env: dict[str, Any]
    """The task's own options, by field name."""
    learner: str = "ppo"
    ppo: PpoConfig = field(default_factory=PpoConfig)
    engine: str = "auto"
    gpu_ids: tuple[int, ...] = ()
    """GPUs, relative to CUDA_VISIBLE_DEVICES, one rank each; none is the CPU."""
    num_envs: int = 64
    """Worlds per rank."""
    total_envs: int | None = None
    """Worlds over all ranks, in place of `num_envs`; they are shared out as evenly as can be."""
    max_iterations: int = 100
    """In all, those before a resume included."""
    seed: int = 0
    logger: str = "tensorboard"
    checkpoint_every: int = 50
    """Iterations from one checkpoint to the next."""
    keep_checkpoints: int = 3
    """The newest so many are kept, and the best beside them."""
    timeout_seconds: float = 60.0
    """A rank that is not heard of for so long has failed, and all others end."""
    worker_log_dir: str | None = None
    """Where each rank's log goes, by default workers/ in the run's directory; empty for no logs."""

    def total(self, ranks: int) -> int:
        """Worlds over all ranks."""
        return self.total_envs or self.num_envs * ranks

    def check(self) -> None:
        """Refuse what cannot work, before anything is made."""
        if self.learner not in LEARNERS:
            raise unknown("learner", self.learner, LEARNERS)
        if self.logger not in LOGGERS:
            raise unknown("logger", self.logger, LOGGERS)
        for name in ("num_envs", "max_iterations", "checkpoint_every", "keep_checkpoints"):
            at_least_one("--" + name.replace("_", "-"), getattr(self, name))
        if self.total_envs is not None:
            at_least_one("--total-envs", self.total_envs)
        above_zero("--timeout", self.timeout_seconds)
        if self.total(1) > MOST_ENVS:
            flag = "--total-envs" if self.total_envs else "--num-envs"
            raise UserError(f"{flag} {self.total(1)} must be at most {MOST_ENVS}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed} must be between 0 and 2^63 - 1")
        self.ppo.check()

    def to_yaml(self) -> str:
        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value

        try:
            return yaml.safe_dump(plain(dataclasses.asdict(self)), sort_keys=False)
        except yaml.representer.RepresenterError as error:
            value = error.args[1]
            raise UserError(
                f"task {self.task!r} has an option with a {type(value).__name__} in it ({value!r}), "
                "which run.yaml cannot hold: options are numbers, words, and lists of them"
            ) from None

    @classmethod
    def from_yaml(cls, text: str, source: str) -> "TrainConfig":
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"{source} is not valid YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(values, dict) or "task" not in values or "env" not in values:
            raise UserError(f"{source} is not a run's configuration: it has no 'task' and 'env'")
        if not isinstance(values.get("ppo", {}), dict):
            raise UserError(f"{source}: ppo is {values['ppo']!r}, not a list of settings")
        return from_dict(cls, values | {"ppo": from_dict(PpoConfig, values.get("ppo", {}), f"{source}: ppo")}, source)


def from_dict(kind: type, values: dict[str, Any], source: str) -> Any:
    """A dataclass from plain values; an unknown key is an error that names the nearest valid one, and so is a value of
    the wrong type."""
    known, hints = {f.name: f for f in dataclasses.fields(kind)}, get_type_hints(kind)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{source}: {unknown('key', key, known)}")
        try:
            check_type(value, hints[key])
        except TypeCheckError as error:
            raise UserError(f"{source}: {key} is {value!r}, but {str(error).splitlines()[0]}") from None
    return kind(**values)


def at_least_one(flag: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{flag} {value} must be at least 1")


def above_zero(flag: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise UserError(f"{flag} {value:g} must be above 0, and finite")
