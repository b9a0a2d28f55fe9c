"""What a task is: a model, and pure functions over [world, ...]."""

from dataclasses import dataclass
from typing import Protocol

import mujoco
from torch import Tensor

from paceline.sim.simulation import Sim


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


class Task(Protocol):
    """A robot's job, as a frozen dataclass whose fields are its options.

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
    def actions(self) -> int:
        """Width of an action."""
        ...

    @property
    def reset_numbers(self) -> int:
        """How many uniform numbers `reset` takes per world."""
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

    def reset(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Fresh `qpos` and `qvel` for all worlds, from numbers in [0, 1) of shape [world, reset_numbers]."""
        ...
