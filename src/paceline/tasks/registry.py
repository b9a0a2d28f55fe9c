"""Tasks by name: our own, and those that other installed packages register."""

from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from paceline.env.task import Task
from paceline.errors import UserError, unknown
from paceline.settings import LEARNERS, Settings
from paceline.settings.ppo import PpoConfig
from paceline.settings.rl_games import RlGamesConfig
from paceline.settings.rsl_rl import RslRlConfig
from paceline.settings.skrl import SkrlConfig

ENTRY_POINTS = "paceline.tasks"

# Imported when asked for, so that one task's needs are not everyone's.
_OWN = {"cartpole": "paceline.tasks.cartpole:ENTRY"}


@dataclass(frozen=True)
class TaskEntry:
    """A task and the settings it trains well with."""

    task: type[Task]
    """A frozen dataclass; its fields are the options `--env.NAME`."""
    summary: str
    """One line for `paceline tasks`."""
    ppo: PpoConfig = field(default_factory=PpoConfig)
    rsl_rl: RslRlConfig = field(default_factory=RslRlConfig)
    rl_games: RlGamesConfig = field(default_factory=RlGamesConfig)
    skrl: SkrlConfig = field(default_factory=SkrlConfig)
    max_iterations: int = 300
    cpu_envs: int = 256
    """Worlds per rank by default, on a CPU."""
    gpu_envs: int = 4096
    """Worlds per rank by default, on a GPU."""

    def settings(self, learner: str) -> Settings:
        """The task's, for a learner."""
        if learner not in LEARNERS:
            raise unknown("learner", learner, LEARNERS)
        return getattr(self, LEARNERS[learner].settings.flags.replace("-", "_"))


def names() -> list[str]:
    return sorted({*_OWN, *_others()})


def find(name: str) -> TaskEntry:
    if name in _OWN:
        module, attribute = _OWN[name].split(":")
        return getattr(import_module(module), attribute)
    others = _others()
    if name not in others:
        raise unknown("task", name, names())
    point = others[name]
    try:
        entry = point.load()
    except Exception as error:
        raise UserError(f"task {name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(entry, TaskEntry):
        raise UserError(f"task {name!r} ({point.value}) is not a TaskEntry but {type(entry).__name__}")
    return entry


def _others() -> dict[str, EntryPoint]:
    """Other packages' tasks; a name that two of them claim would be a matter of luck, so it is refused."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        rival = found.setdefault(point.name, point)
        if rival != point:
            raise UserError(f"two packages have a task {point.name!r}: {rival.value} and {point.value}; uninstall one")
    return found
