"""Table of tasks: the built-in ones, and those that other installed packages register."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from paceline.env.training_settings import TrainingSettings
from paceline.env.vec_env import VecEnv
from paceline.errors import UserError, unknown
from paceline.tasks.aliases import ALIASES, Alias
from paceline.validation import is_required

# Imported on demand, so that a task's dependencies are needed only by that task.
_BUILT_IN = {
    "ant": "paceline.tasks.locomotion:ANT",
    "cartpole": "paceline.tasks.cartpole:ENTRY",
    "cartpole-camera": "paceline.tasks.cartpole_camera:ENTRY",
    "g1-velocity": "paceline.tasks.velocity.g1_velocity:ENTRY",
    "go1-velocity": "paceline.tasks.velocity.go1_velocity:ENTRY",
    "go1-velocity-rough": "paceline.tasks.velocity.go1_velocity_rough:ENTRY",
    "go1-velocity-rough-camera": "paceline.tasks.velocity.go1_velocity_rough_camera:ENTRY",
    "humanoid": "paceline.tasks.locomotion:HUMANOID",
    "reach": "paceline.tasks.reach:ENTRY",
    "reach-camera": "paceline.tasks.reach_camera:ENTRY",
    "shadow-hand-repose": "paceline.tasks.shadow_hand_repose:ENTRY",
    "shadow-hand-repose-camera": "paceline.tasks.shadow_hand_repose_camera:ENTRY",
}
# Modules with a function entry(name) for tasks PREFIX:NAME.
_FAMILIES = {
    "gymnasium": "paceline.tasks.gymnasium",
    "playground": "paceline.tasks.playground",
    "mjlab": "paceline.tasks.mjlab",
    "dm_control": "paceline.tasks.dm_control",
}


@dataclass(frozen=True)
class TaskEntry:
    """A registered task, which runs in `RobotEnv`."""

    task: type[Any]
    """Frozen dataclass whose fields are the options `--env.NAME`. It is a `Task` unless this is an `EnvEntry`."""
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


@dataclass(frozen=True, kw_only=True)
class EnvEntry(TaskEntry):
    """A complete env of another simulator, with its own dynamics, rewards and resets."""

    make: Callable[..., VecEnv]
    """Makes an env from an instance of `task` and the keyword arguments num_envs, device, seed and first_env."""
    engine: str
    """Name of the engine in result.json."""
    make_renderable: Callable[..., VecEnv] | None = None
    """Makes a `RenderableEnv` for `paceline play`, with the arguments of `make`."""


def names() -> list[str]:
    return sorted({*_BUILT_IN, *_installed()})


def is_name(name: str) -> bool:
    """Return whether an argument names a task. Environments of other packages are not looked up."""
    return bool(_member_of_family(name)) or name in ALIASES or name in names()


def alias(name: str) -> Alias | None:
    """Return the task that has this name in another library. A task that is registered by this name takes
    precedence."""
    return ALIASES.get(name) if name not in names() else None


def _member_of_family(name: str) -> tuple[str, str] | None:
    """Return the module of a family of tasks, such as gymnasium:ID, and the name in it; None for other tasks."""
    prefix, _, known = name.partition(":")
    return (_FAMILIES[prefix], known) if known and prefix in _FAMILIES else None


def is_renderable(name: str) -> bool:
    """Return whether `paceline play` can render the env of a task."""
    entry = find(name)
    return not isinstance(entry, EnvEntry) or entry.make_renderable is not None


def find(name: str) -> TaskEntry:
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name].split(":")
        try:
            return getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name != "mujoco":
                raise
            raise UserError(f"task {name!r} needs MuJoCo, which is not installed: pip install 'mujoco>=4'") from None
    if member := _member_of_family(name):
        module, known = member
        return import_module(module).entry(known)
    installed = _installed()
    if name not in installed:
        if name in ALIASES:
            raise UserError(f"the task {name!r} is called {ALIASES[name].task!r} here: use that name")
        families = ("gymnasium:ID", "playground:NAME", "mjlab:NAME")
        raise unknown("task", name, [*names(), *families], similar=ALIASES)
    source = f"task {name!r} ({installed[name].value})"
    try:
        found = installed[name].load()
    except Exception as error:
        raise UserError(f"{source} cannot be imported: {type(error).__name__}: {error}") from error
    _check_entry(found, source)
    return found


def _check_entry(entry: Any, source: str) -> None:
    """Raise UserError if the class has fields that cannot be options, or if the training settings are invalid."""
    if not isinstance(entry, TaskEntry):
        kind = type(entry).__name__
        raise UserError(f"{source} is not a TaskEntry but {kind}: register a TaskEntry or an EnvEntry")
    task = entry.task
    if not isinstance(task, type):
        raise UserError(f"{source}: its task is {task!r}, but must be a class: give TaskEntry the class itself")
    undeclared = "__dataclass_fields__" not in vars(task) and vars(task).get("__annotations__")
    if not dataclasses.is_dataclass(task) or not task.__dataclass_params__.frozen or undeclared:
        raise UserError(f"{source}: class {task.__name__} is not a frozen dataclass: use @dataclass(frozen=True)")
    without = [field.name for field in dataclasses.fields(task) if is_required(field)]
    if without:
        raise UserError(f"{source}: class {task.__name__} has no default for {', '.join(without)}: give it one")
    if not isinstance(entry.training, TrainingSettings):
        raise UserError(f"{source}: training is {entry.training!r}, but must be a TrainingSettings")


def _installed() -> dict[str, EntryPoint]:
    """Return the tasks of other packages. Raise UserError if two packages register the same name, or one the name of a
    built-in task."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group="paceline.tasks"):
        if point.name in _BUILT_IN:
            raise UserError(
                f"a package has a task {point.name!r} ({point.value}), which is the name of a task of Paceline: rename "
                "its entry point, or uninstall the package"
            )
        other = found.setdefault(point.name, point)
        if other != point:
            raise UserError(f"two packages have a task {point.name!r}: {other.value} and {point.value}; uninstall one")
    return found
