"""What a task is: a model, and pure functions over [world, ...]."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, runtime_checkable

import mujoco
from torch import Tensor

from paceline.env.randomization import Randomization
from paceline.errors import UserError
from paceline.sim.simulation import Sim
from paceline.validation import at_least_one

MOST_REMEMBERED_STEPS = 1000


@dataclass(frozen=True)
class Worlds:
    """What a task may look at, one row per world. Nothing here is to be written to."""

    sim: Sim
    sensors: dict[str, slice]
    """Where each sensor's values stand in `sim.sensordata`."""
    action: Tensor
    """The policy's latest action, [world, actions]; zero after a reset."""
    last_action: Tensor
    """The one before it, [world, actions]."""
    episode_step: Tensor
    """Control steps since the reset, int64 [world]."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """The task's own, each part [world, n]."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    """Those of a task that `HasConstants`, each [1, n]."""

    @property
    def qpos(self) -> Tensor:
        return self.sim.qpos

    @property
    def qvel(self) -> Tensor:
        return self.sim.qvel

    def sensor(self, name: str) -> Tensor:
        """A sensor's values, [world, dim]."""
        if name not in self.sensors:
            raise KeyError(f"no sensor {name!r} in the model; choose from {list(self.sensors)}")
        return self.sim.sensordata[:, self.sensors[name]]


class Start(NamedTuple):
    """Where an episode would start, for all worlds; those that begin one take it."""

    qpos: Tensor
    """[world, nq]"""
    qvel: Tensor
    """[world, nv]"""
    memory: dict[str, Tensor]
    """The parts of the task's memory that begin anew, each [world, n]; others stay as they are."""


@dataclass(frozen=True)
class Senses:
    """How the policy sees its group of observations: several at once, and late. Other groups are of the present."""

    history: int = 1
    """How many it sees, of successive control steps, side by side with the newest last. Before an episode's first
    observation there is none: that one stands in for those that are missing."""
    delay: tuple[int, int] = (0, 0)
    """By how many control steps it sees them late: the fewest and the most. Drawn anew for every episode."""

    def __post_init__(self) -> None:
        at_least_one("senses: history", self.history, MOST_REMEMBERED_STEPS)
        whole = len(self.delay) == 2 and all(isinstance(steps, int) for steps in self.delay)
        if not whole or not 0 <= self.delay[0] <= self.delay[1] <= MOST_REMEMBERED_STEPS:
            raise UserError(
                f"senses: delay {self.delay} must be the fewest and the most control steps, for example (0, 2), "
                f"at most {MOST_REMEMBERED_STEPS}"
            )


class AnyTask(Protocol):
    """What all tasks have in common.

    All functions are pure and keep to fixed shapes: no branch on a tensor's value, no `.item()`, no `nonzero`, no
    boolean index. So a whole rollout can be captured as one CUDA graph; a test holds every task to it.
    """

    @property
    def decimation(self) -> int:
        """Physics steps per control step."""
        ...

    @property
    def episode_seconds(self) -> float: ...

    @property
    def num_actions(self) -> int:
        """Width of an action."""
        ...

    @property
    def reset_numbers(self) -> int:
        """How many uniform numbers `reset`, or `start`, takes per world."""
        ...

    def model(self) -> mujoco.MjModel: ...

    def control(self, worlds: Worlds) -> Tensor:
        """The action as actuator controls, [world, nu]."""
        ...

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        """Groups of observations, each [world, n]; "policy" always, "critic" if the critic sees more."""
        ...

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        """Named terms, each [world]; the reward is their sum."""
        ...

    def terminated(self, worlds: Worlds) -> Tensor:
        """Worlds whose episode has ended for good, bool [world]. Time limits are not the task's business."""
        ...


class Task(AnyTask, Protocol):
    """A robot's job, as a frozen dataclass whose fields are its options."""

    def reset(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Fresh `qpos` and `qvel` for all worlds, from numbers in [0, 1) of shape [world, reset_numbers]."""
        ...


@runtime_checkable
class TaskWithMemory(AnyTask, Protocol):
    """A task that keeps something of its own for each world, beside the physics: commands, curricula, how long a foot
    has been in the air. It is saved and resumed with the worlds, however these are spread over ranks."""

    @property
    def step_numbers(self) -> int:
        """How many uniform numbers `advance` takes per world."""
        ...

    def memory(self) -> dict[str, int]:
        """The parts, and how many numbers each has per world; all are zero before the first episode."""
        ...

    def advance(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        """Return the new values of some parts, each [env, n], from numbers in [0, 1) of shape [env, step_numbers].
        It is called after every control step, before the step is judged: what the reward depends on is sampled in
        `Resamples.resample`, not here."""
        ...

    def start(self, worlds: Worlds, uniform: Tensor) -> Start:
        """In place of `reset`. It sees what the worlds have come to, so that a curriculum can go by it."""
        ...


@runtime_checkable
class Resamples(Protocol):
    """A task with memory that samples commands or goals during an episode."""

    def resample(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        """Return new values of some parts of the memory, each [env, n]. It is called after a control step was judged:
        reward, termination, metrics and `final_obs` use the old values, the next observation shows the new ones.
        `uniform` [env, step_numbers] are the numbers that `advance` got. An env whose episode ended takes what `start`
        returns instead."""
        ...


@runtime_checkable
class HasConstants(Protocol):
    """A task with rows of numbers that its functions use: they are made once, on the worlds' device."""

    def constants(self) -> dict[str, tuple[float, ...]]: ...


@runtime_checkable
class HasSenses(Protocol):
    """A task whose policy sees late, or more than the present."""

    @property
    def senses(self) -> Senses: ...


@runtime_checkable
class Pushes(Protocol):
    """A task that knocks its robot about."""

    def push(self, worlds: Worlds) -> Tensor:
        """What is added to the velocities after a control step, [world, nv]; zero for most worlds at most times."""
        ...


@runtime_checkable
class Measures(Protocol):
    """A task with numbers to tell that are not rewards: a tracking error, a success."""

    def measure(self, worlds: Worlds) -> dict[str, Tensor]:
        """Of the latest control step, each [world]; what is logged is the mean over an episode's steps."""
        ...


@runtime_checkable
class Randomizes(Protocol):
    """A task whose worlds differ in their model."""

    @property
    def randomization(self) -> tuple[Randomization, ...]: ...


@runtime_checkable
class HasCurriculum(Protocol):
    """A task that asks for more as its robot gets better."""

    def at_its_end(self) -> Self:
        """The same, asking for everything at once: how a trained policy is watched."""
        ...


class Command(NamedTuple):
    """What is asked of a robot, beside what it does."""

    numbers: dict[str, tuple[Tensor, ...]]
    """By name and unit, such as "forward m/s": what is asked for and, if there is such a number, what is done, each
    [world]."""
    velocity: tuple[Tensor, Tensor] | None = None
    """Asked for and done, each [world, 2]: forward and to the left of the robot, m/s; drawn as arrows above it."""
    rotation: Tensor | None = None
    """Asked for, [world, 4]: the model's mocap body, which is in nobody's way, is drawn so."""


@runtime_checkable
class ShowsCommand(Protocol):
    """A task whose robot follows something that `paceline play` can show."""

    def shown(self, worlds: Worlds) -> Command:
        """Of this moment; looked at on a CPU alone, so it need not be capturable."""
        ...
