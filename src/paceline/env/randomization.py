"""Worlds that differ in their model: masses, friction, gains, and whatever else MuJoCo has a field for."""

import re
from dataclasses import dataclass
from typing import Literal

import mujoco
import torch
from torch import Tensor

from paceline.env import draw
from paceline.errors import UserError
from paceline.sim.simulation import Sim

# From these nothing else is derived; from any other field there may be, which takes a pass over the model to find out.
_WITHOUT_CONSEQUENCES = (
    *("geom_friction", "geom_solref", "geom_solimp", "geom_rgba"),
    *("dof_damping", "dof_frictionloss", "jnt_range", "jnt_stiffness"),
    *("actuator_gainprm", "actuator_biasprm", "actuator_forcerange", "actuator_ctrlrange"),
)
_KINDS = {
    "body": mujoco.mjtObj.mjOBJ_BODY,
    "geom": mujoco.mjtObj.mjOBJ_GEOM,
    "jnt": mujoco.mjtObj.mjOBJ_JOINT,
    "dof": mujoco.mjtObj.mjOBJ_JOINT,
    "actuator": mujoco.mjtObj.mjOBJ_ACTUATOR,
    "site": mujoco.mjtObj.mjOBJ_SITE,
    "tendon": mujoco.mjtObj.mjOBJ_TENDON,
}


@dataclass(frozen=True)
class Randomization:
    """A model field that is drawn for each world, uniformly from `low` to `high`."""

    field: str
    """As MuJoCo calls it: body_mass, geom_friction, actuator_gainprm, dof_armature, ..."""
    low: float
    high: float
    names: str = ".*"
    """Which bodies, geoms, joints or actuators: a regular expression for the whole name."""
    how: Literal["scale", "add", "set"] = "scale"
    """What is done to the model's own value."""
    column: int | None = None
    """Of a field that has several numbers for each, the one that is meant; by default all of them, alike."""
    together: bool = False
    """Whether all that are meant have the same draw."""
    when: Literal["once", "reset"] = "reset"
    """Once for each world, or anew in every episode. Where other constants follow from it (masses, inertias,
    armatures), every change costs a pass over all worlds."""
    every_seconds: float = 0.0
    """If above zero, also within an episode, at this interval."""


class Randomizer:
    """Draws the fields of a `Sim` anew; the same draw for the same world and step, on any number of ranks."""

    def __init__(self, items: tuple[Randomization, ...], sim: Sim, seed: int, world: Tensor, control_seconds: float):
        self._items, self._sim, self._seed, self._world = items, sim, seed, world
        self._places = [_places(item, sim.model).to(sim.device) for item in items]
        self._own = {item.field: sim.field(item.field).clone() for item in items}
        self._intervals = [max(1, round(item.every_seconds / control_seconds)) for item in items]

    def begin(self, step: Tensor) -> None:
        """All fields of all worlds."""
        everyone = torch.ones_like(self._world, dtype=torch.bool)
        self._draw(dict.fromkeys(range(len(self._items)), everyone), step)

    def again(self, done: Tensor, episode_step: Tensor, step: Tensor) -> None:
        """In worlds that begin an episode, and where an interval is over."""
        masks = {index: done for index, item in enumerate(self._items) if item.when == "reset"}
        for index, item in enumerate(self._items):
            if item.every_seconds > 0.0:
                due = (episode_step > 0) & (episode_step % self._intervals[index] == 0)
                masks[index] = masks[index] | due if index in masks else due
        # On a CPU it is known when nobody is meant, which is most of the time.
        if masks and (self._sim.device.type != "cpu" or any(mask.numpy().any() for mask in masks.values())):
            self._draw(masks, step)

    def _draw(self, masks: dict[int, Tensor], step: Tensor) -> None:
        """Items, by their index, in the worlds of their masks."""
        for index, mask in masks.items():
            item, places = self._items[index], self._places[index]
            count = 1 if item.together else len(places)
            # One stream for all: each item has its own step in it.
            numbers = draw.uniform(
                self._seed, self._world, step * len(self._items) + index, draw.Stream.RANDOMIZE, count
            )
            value = item.low + (item.high - item.low) * numbers
            self._write(item, places, mask, value)
        derived = any(self._items[index].field not in _WITHOUT_CONSEQUENCES for index in masks)
        self._sim.refresh_constants(derived)

    def _write(self, item: Randomization, places: Tensor, mask: Tensor, value: Tensor) -> None:
        field, own = self._sim.field(item.field), self._own[item.field]
        now, before = field.index_select(1, places), own.index_select(1, places)
        value = value.view(*value.shape, *[1] * (now.dim() - 2))
        new = {"scale": before * value, "add": before + value, "set": value.expand_as(before)}[item.how]
        if item.column is not None:
            column = torch.arange(now.shape[2], device=now.device) == item.column
            new = torch.where(column, new, now)
        field.index_copy_(1, places, torch.where(mask.view(-1, *[1] * (now.dim() - 1)), new, now))


def fields(items: tuple[Randomization, ...], model: mujoco.MjModel) -> tuple[str, ...]:
    """Of the model, that are per world; what is not in it is refused."""
    for item in items:
        _places(item, model)
    return tuple(dict.fromkeys(item.field for item in items))


def _places(item: Randomization, model: mujoco.MjModel) -> Tensor:
    """Rows of the field that are meant."""
    prefix = item.field.split("_")[0]
    if prefix not in _KINDS or not hasattr(model, item.field):
        raise UserError(f"randomization: no field {item.field!r} that can be drawn; fields of {', '.join(_KINDS)} can")
    count = len(getattr(model, item.field))
    kind, pattern = _KINDS[prefix].value, re.compile(item.names)
    owners = model.dof_jntid.tolist() if prefix == "dof" else range(count)
    names = [mujoco.mj_id2name(model, kind, owner) or "" for owner in owners]
    found = [index for index, name in enumerate(names) if pattern.fullmatch(name)]
    if not found:
        raise UserError(
            f"randomization of {item.field}: no name matches {item.names!r}; there are {sorted(set(names))}"
        )
    return torch.tensor(found)
