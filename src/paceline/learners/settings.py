"""Settings of a learner, and their translation from the training settings of a task."""

import dataclasses
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Self

from docstring_parser import parse_from_object

from paceline import validation
from paceline.env.training_settings import TrainingSettings
from paceline.env.vec_env import ActionSpec
from paceline.errors import UserError, counted, unknown

LEARNING_RATES = (1e-5, 1e-2)
"""Range of a learning rate that is adapted to the KL divergence, the same as in RSL-RL."""

IMAGE_SETTINGS = tuple(
    f"image_{name}" for name in ("channels", "kernels", "strides", "features", "pooling", "training")
)
"""Settings of the image encoder that all learners have."""

_TRAINING_DOCS = {
    field.arg_name: " ".join((field.description or "").split()) for field in parse_from_object(TrainingSettings).params
}


def translated(source: str | Callable[[TrainingSettings], Any], default: Any = None) -> Any:
    """Declare a setting that is translated from the training settings of a task.

    `source` is the field of `TrainingSettings` with the same value and, unless the setting has its own docstring, the
    same documentation; or a function that computes the value. The default is the translation of the default training
    settings, unless `default` is given.
    """
    translate = attrgetter(source) if isinstance(source, str) else source
    default = translate(TrainingSettings()) if default is None else default
    return dataclasses.field(default=default, metadata={"translate": translate, "source": source})


def derived(compute: Callable[[Any], int]) -> Any:
    """Declare an attribute of the settings that `compute` returns from the others."""
    return property(compute)


class Settings:
    """Base of a learner's settings: frozen dataclasses whose fields have the library's names."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    flags: ClassVar[str]
    """Prefix of the flags: a field is --FLAGS.FIELD on the command line."""
    library: ClassVar[str] = ""
    """Name of the library, if it has configuration files."""
    library_defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of the settings that a configuration file of the library omits. A file must have the others."""
    horizon_field: ClassVar[str] = "horizon"
    """Name of the field that sets `horizon`."""
    minibatches_field: ClassVar[str] = "minibatches"
    """Name of the field that sets `minibatches`."""
    fixed: ClassVar[tuple[str, ...]]
    """Names of the settings that cannot change when a run is resumed, because the checkpoint's networks, normalizers or
    action noise depend on them. All others take effect at once."""

    horizon: int
    """Number of steps per env and iteration."""
    minibatches: int
    """Number of minibatches per epoch."""
    learning_rate: float
    """Learning rate at the start. If it is changed when a run is resumed, it replaces that of the checkpoint."""

    def __init_subclass__(cls) -> None:
        """Add the documentation of translated fields to the docstring of the class, where tyro finds it."""
        own = {field.arg_name for field in parse_from_object(cls).params}
        fields = {name: field for name, field in vars(cls).items() if isinstance(field, dataclasses.Field)}
        sources = {name: field.metadata["source"] for name, field in fields.items() if name not in own}
        docs = [f"    {name}: {_TRAINING_DOCS[source]}" for name, source in sources.items()]
        cls.__doc__ = "\n".join((cls.__doc__ or "", "", "Attributes:", *docs))

    @classmethod
    def from_training(cls, training: TrainingSettings) -> Self:
        """Translate the training settings of a task, including its overrides."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values = {name: field.metadata["translate"](training) for name, field in fields.items() if field.metadata}
        learner = cls.flags.replace("-", "_")
        for name, value in training.overrides.get(learner, {}).items():
            if name not in fields:
                raise UserError(f"training.overrides[{learner!r}]: {unknown('setting', name, fields)}")
            values[name] = value
        return cls(**values)

    def check(self) -> None:
        """Raise UserError for an invalid value."""
        validation.check(self, f"--{self.flags}.")

    def check_samples(self, num_envs: int) -> None:
        """Raise UserError if a rank cannot train with `num_envs` envs. A policy can be played with any number."""
        # The loss of an empty minibatch is NaN.
        samples, minibatches = num_envs * self.horizon, self.minibatches
        if minibatches > samples:
            more, steps = (flag(self, name) for name in (self.minibatches_field, self.horizon_field))
            raise UserError(
                f"{more} {minibatches} is more than {counted(samples, 'sample')}, which the smallest rank collects in "
                f"an iteration (envs x steps: {num_envs} x {self.horizon}): use at most {samples}, or more envs "
                f"(--num-envs, --total-envs) or steps ({steps})"
            )


def flag(settings: Settings, name: str) -> str:
    """Return the command-line flag of a setting."""
    return f"--{settings.flags}.{name.replace('_', '-')}"


def check_action_space(settings: Settings, actions: ActionSpec) -> None:
    """Raise UserError if the setting `action_space`, which a configuration file of a library states, is not that of the
    env."""
    wanted, found = getattr(settings, "action_space", "any"), "discrete" if actions.choices else "continuous"
    if wanted not in ("any", found):
        given = flag(settings, "action_space")
        raise UserError(
            f"{given} {wanted}, which a configuration file may have set: the actions of the task are {found}; choose "
            f"another file or task, or give {given} any"
        )


def refuse(settings: Settings, name: str, value: str, supported: str, learners: str) -> None:
    """Raise UserError if a setting has a value that only other learners support."""
    if getattr(settings, name) == value:
        given = flag(settings, name)
        raise UserError(f"{given} {value} is not supported: use {given} {supported}, or --learner {learners}")


def refuse_recurrent(settings: Settings, name: str) -> None:
    """Raise UserError if the setting `name` is a recurrent network, for a task with cameras."""
    if (value := getattr(settings, name)) != "none":
        given = flag(settings, name)
        raise UserError(
            f"{given} {value} is not supported for a task with cameras: use {given} none, or --learner ppo or skrl"
        )
