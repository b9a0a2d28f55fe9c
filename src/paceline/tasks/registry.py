"""Table of tasks: the built-in ones, and those that other installed packages register."""

import dataclasses
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import torch

from paceline.env.task import Task
from paceline.env.training_settings import TrainingSettings
from paceline.env.vec_env import VecEnv
from paceline.errors import UserError, unknown
from paceline.validation import is_required

ENTRY_POINTS = "paceline.tasks"

# Imported on demand, so that a task's dependencies are needed only by that task.
_BUILT_IN = {
    "ant": "paceline.tasks.locomotion:ANT",
    "cartpole": "paceline.tasks.cartpole:ENTRY",
    "g1-velocity": "paceline.tasks.velocity.g1_velocity:ENTRY",
    "go1-velocity": "paceline.tasks.velocity.go1_velocity:ENTRY",
    "go1-velocity-rough": "paceline.tasks.velocity.go1_velocity_rough:ENTRY",
    "humanoid": "paceline.tasks.locomotion:HUMANOID",
    "shadow-hand-repose": "paceline.tasks.shadow_hand_repose:ENTRY",
}
# FAMILY:NAME is made by a function of NAME.
_FAMILIES = {"gymnasium": "paceline.tasks.gymnasium:entry"}


@dataclass(frozen=True)
class Entry:
    """A registered task."""

    task: type[Any]
    """Frozen dataclass whose fields are the options `--env.NAME`."""
    summary: str
    """One line for `paceline tasks`."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Training settings for all learners."""
    max_iterations: int = 300
    """Default number of iterations."""
    cpu_envs: int = 256
    """Default number of envs per rank on a CPU."""
    gpu_envs: int = 4096
    """Default number of envs per rank on a GPU."""


@dataclass(frozen=True)
class TaskEntry(Entry):
    """A task that runs in `RobotEnv`."""

    task: type[Task]


class MakeEnv(Protocol):
    """Function, or class of an env, that makes an env from an instance of `Entry.task`."""

    def __call__(self, options: Any, /, num_envs: int, device: torch.device, seed: int, first_env: int) -> VecEnv: ...


@dataclass(frozen=True)
class EnvEntry(Entry):
    """A complete env of another simulator, with its own dynamics, rewards and resets."""

    make: MakeEnv = field(kw_only=True)
    engine: str = field(kw_only=True)
    """Name of the engine in result.json."""
    drawn: MakeEnv | None = field(default=None, kw_only=True)
    """Makes a `RenderableEnv` for `paceline play`."""


def names() -> list[str]:
    return sorted({*_BUILT_IN, *_others()})


def is_name(word: str) -> bool:
    """Return whether an argument names a task. Members of a family are not looked up."""
    family, _, member = word.partition(":")
    return bool(family in _FAMILIES and member) or word in names()


def find(name: str) -> TaskEntry | EnvEntry:
    if name in _BUILT_IN:
        return _load(_BUILT_IN[name])
    family, _, member = name.partition(":")
    if family in _FAMILIES and member:
        return _load(_FAMILIES[family])(member)
    others = _others()
    if name not in others:
        raise unknown("task", name, [*names(), *(f"{family}:ID" for family in _FAMILIES)])
    point = others[name]
    try:
        entry = point.load()
    except Exception as error:
        raise UserError(f"task {name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(entry, (TaskEntry, EnvEntry)):
        raise UserError(
            f"task {name!r} ({point.value}) is not a TaskEntry but {type(entry).__name__}: "
            "register a TaskEntry or an EnvEntry"
        )
    _check_entry(entry, f"task {name!r} ({point.value})")
    return entry


def _check_entry(entry: Entry, source: str) -> None:
    """Raise UserError if the class has fields that cannot be options, or if the training settings are invalid."""
    task = entry.task
    if not isinstance(task, type):
        raise UserError(f"{source}: its task is {task!r}, but must be a class: give TaskEntry the class itself")
    undeclared = "__dataclass_fields__" not in vars(task) and vars(task).get("__annotations__")
    if not dataclasses.is_dataclass(task) or not task.__dataclass_params__.frozen or undeclared:
        raise UserError(f"{source}: class {task.__name__} is no frozen dataclass: decorate it @dataclass(frozen=True)")
    without = [field.name for field in dataclasses.fields(task) if is_required(field)]
    if without:
        raise UserError(f"{source}: class {task.__name__} has no default for {', '.join(without)}: give it one")
    if not isinstance(entry.training, TrainingSettings):
        raise UserError(f"{source}: training is {entry.training!r}, but must be a TrainingSettings")


def _load(place: str) -> Any:
    """Return the object at module:attribute."""
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


def _others() -> dict[str, EntryPoint]:
    """Return the tasks of other packages. Raise UserError if two packages register the same name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        rival = found.setdefault(point.name, point)
        if rival != point:
            raise UserError(f"two packages have a task {point.name!r}: {rival.value} and {point.value}; uninstall one")
    return found
