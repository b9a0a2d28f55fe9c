"""The interface of a learner's settings."""

from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError, unknown

LEARNING_RATES = (1e-5, 1e-2)
"""Range of a learning rate that is adapted to the KL divergence, the same as in RSL-RL."""


class Settings(Protocol):
    """Settings of a learner: a frozen dataclass whose fields have the library's names."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    flags: ClassVar[str]
    """Prefix of the flags: a field is --FLAGS.FIELD on the command line."""
    horizon_field: ClassVar[str]
    """Name of the field that sets `horizon`."""
    minibatches_field: ClassVar[str]
    """Name of the field that sets `minibatches`."""
    fixed: ClassVar[tuple[str, ...]]
    """Names of the settings that cannot change when a run is resumed, because the checkpoint's networks, normalizers or
    action noise depend on them. All others take effect at once."""

    @classmethod
    def from_training(cls, training: TrainingSettings) -> Self:
        """Translate the settings of a task, its overrides included."""
        ...

    @property
    def learning_rate(self) -> float:
        """Learning rate at the start. If it is changed when a run is resumed, it replaces the checkpoint's."""
        ...

    @property
    def horizon(self) -> int:
        """Number of steps per env and iteration."""
        ...

    @property
    def minibatches(self) -> int:
        """Number of minibatches per epoch."""
        ...

    def check(self) -> None:
        """Raise UserError for a value that cannot work."""
        ...


S = TypeVar("S", bound=Settings)


def with_overrides(settings: S, training: TrainingSettings, learner: str) -> S:
    """Replace the values that a task overrides for one learner."""
    values = training.overrides.get(learner, {})
    for name in values:
        if name not in settings.__dataclass_fields__:
            raise UserError(
                f"training.overrides[{learner!r}]: {unknown('setting', name, settings.__dataclass_fields__)}"
            )
    return replace(cast("Any", settings), **values)


def flag(settings: Settings, name: str) -> str:
    """Return the command-line flag of a setting."""
    return f"--{settings.flags}.{name.replace('_', '-')}"


def check_samples(settings: Settings, num_envs: int) -> None:
    """Raise UserError if a rank with `num_envs` has fewer samples than minibatches: the loss of an empty minibatch is
    NaN."""
    samples, minibatches = num_envs * settings.horizon, settings.minibatches
    if minibatches > samples:
        more, steps = (flag(settings, name) for name in (settings.minibatches_field, settings.horizon_field))
        raise UserError(
            f"{more} {minibatches} is more than {samples} samples, which the smallest rank collects in an iteration "
            f"(envs x steps: {num_envs} x {settings.horizon}): use at most {samples}, or more envs (--num-envs, "
            f"--total-envs) or steps ({steps})"
        )
