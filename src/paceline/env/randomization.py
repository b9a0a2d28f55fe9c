"""Worlds that differ in their model: masses, friction, gains, and whatever else MuJoCo has a field for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mujoco
import torch
from torch import Tensor

from paceline.errors import UserError
from paceline.sim.simulation import Sim
from paceline.tensors import random as draw
from paceline.tensors.graph import fuse

# From these nothing else is derived; from any other field there may be, which takes a pass over the model to find out.
_WITHOUT_CONSEQUENCES = (
    *("geom_friction", "geom_solref", "geom_solimp", "geom_rgba"),
    *("dof_damping", "dof_frictionloss", "jnt_range", "jnt_stiffness"),
    *("actuator_gainprm", "actuator_biasprm", "actuator_forcerange", "actuator_ctrlrange", "opt.gravity"),
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
# Of these a world has one, so that there are no names to choose from.
_OF_THE_WORLD = ("opt.gravity",)


@dataclass(frozen=True)
class Randomization:
    """A model field that is drawn for each world, uniformly from `low` to `high`."""

    field: str
    """As MuJoCo calls it: body_mass, geom_friction, actuator_gainprm, dof_armature, ..., or opt.gravity."""
    low: float
    high: float
    names: str = ".*"
    """Which bodies, geoms, joints or actuators: a regular expression for the whole name. Gravity has none."""
    how: Literal["scale", "add", "set"] = "scale"
    """What is done to the model's own value; so of two draws for the same number the later one counts."""
    column: int | None = None
    """Of a field that has several numbers for each, the one that is meant; by default all of them, alike."""
    also: str = ""
    """Another field of the same kind, whose same places have the same draw. So a motor's actuator_gainprm and
    actuator_biasprm, both scaled alike, are a motor of other strength."""
    together: bool = False
    """Whether all that are meant have the same draw."""
    when: Literal["once", "reset"] = "reset"
    """Once for each world, or anew in every episode. Where other constants follow from it (masses, inertias,
    armatures), every change costs a pass over all worlds."""
    every_seconds: float = 0.0
    """If above zero, also within an episode, at this interval."""


class Randomizer:
    """Draws the fields of a `Sim` anew; the same draw for the same world and step, on any number of ranks."""

    def __init__(self, items: tuple[Randomization, ...], sim: Sim, seed: int, world: Tensor, step_seconds: float):
        self._items, self._sim, self._seed, self._world = items, sim, seed, world
        self._places = [_places(item, sim.model).to(sim.device) for item in items]
        self._fields = {name: _rows(sim, name) for item in items for name in _meant(item)}
        self._own = {name: field.clone() for name, field in self._fields.items()}
        self._intervals = [max(1, round(item.every_seconds / step_seconds)) for item in items]
        self._again = [i for i, item in enumerate(items) if item.when == "reset" or item.every_seconds > 0.0]
        self._rewrite = fuse(self._write, sim.device)

    def begin(self, step: Tensor) -> None:
        """All fields of all worlds."""
        everyone = [torch.ones_like(self._world, dtype=torch.bool)] * len(self._items)
        self._write(everyone, [self._draw(index, step) for index in range(len(self._items))], range(len(self._items)))
        self._refresh(range(len(self._items)))

    def numbers(self, step: Tensor) -> list[Tensor]:
        """What `again` takes, for steps [step, 1]: for each field that is drawn again, [step, world, places]."""
        return [self._draw(index, step) for index in self._again]

    def again(self, done: Tensor, episode_step: Tensor, numbers: Sequence[Tensor]) -> None:
        """In worlds that begin an episode, and where an interval is over; with the numbers of this step."""
        masks = [self._due(index, done, episode_step) for index in self._again]
        # On a CPU it is known when nobody is meant, which is most of the time.
        if masks and (self._sim.device.type != "cpu" or any(mask.numpy().any() for mask in masks)):
            self._rewrite(masks, numbers, self._again)
            self._refresh(self._again)

    def _draw(self, index: int, step: Tensor) -> Tensor:
        count = 1 if self._items[index].together else len(self._places[index])
        # One stream for all: each item has its own step in it.
        step = step * len(self._items) + index
        return draw.uniform(self._seed, self._world, step, draw.Stream.RANDOMIZE, count)

    def _due(self, index: int, done: Tensor, episode_step: Tensor) -> Tensor:
        item = self._items[index]
        if not item.every_seconds > 0.0:
            return done
        over = (episode_step > 0) & (episode_step % self._intervals[index] == 0)
        return done | over if item.when == "reset" else over

    def _write(self, masks: Sequence[Tensor], numbers: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Items, by their indices, in the worlds of their masks."""
        for mask, uniform, index in zip(masks, numbers, indices, strict=True):
            item, places = self._items[index], self._places[index]
            value = item.low + (item.high - item.low) * uniform
            for name in _meant(item):
                self._write_field(name, item, places, mask, value)

    def _write_field(self, name: str, item: Randomization, places: Tensor, mask: Tensor, value: Tensor) -> None:
        field = self._fields[name]
        now, before = field.index_select(1, places), self._own[name].index_select(1, places)
        value = value.view(*value.shape, *[1] * (now.dim() - 2))
        new = {"scale": before * value, "add": before + value, "set": value.expand_as(before)}[item.how]
        if item.column is not None:
            column = torch.arange(now.shape[2], device=now.device) == item.column
            new = torch.where(column, new, now)
        field.index_copy_(1, places, torch.where(mask.view(-1, *[1] * (now.dim() - 1)), new, now))

    def _refresh(self, indices: Sequence[int]) -> None:
        names = (name for index in indices for name in _meant(self._items[index]))
        self._sim.refresh_constants(derived=any(name not in _WITHOUT_CONSEQUENCES for name in names))


def _rows(sim: Sim, name: str) -> Tensor:
    """A field as [world, row, ...], to be written to."""
    field = sim.field(name)
    return field.unsqueeze(1) if name in _OF_THE_WORLD else field


def fields(items: tuple[Randomization, ...], model: mujoco.MjModel) -> tuple[str, ...]:
    """Of the model, that are per world; what is not in it is refused."""
    for item in items:
        _places(item, model)
        if item.also:
            _check_pair(item, model)
    return tuple(dict.fromkeys(field for item in items for field in _meant(item)))


def _meant(item: Randomization) -> tuple[str, ...]:
    return (item.field, item.also) if item.also else (item.field,)


def _check_pair(item: Randomization, model: mujoco.MjModel) -> None:
    one, other = (getattr(model, field, None) for field in _meant(item))
    if one is None or other is None or one.shape != other.shape or _kind(item.field) != _kind(item.also):
        raise UserError(f"randomization of {item.field}: {item.also!r} is no field of the same kind and shape")


def _places(item: Randomization, model: mujoco.MjModel) -> Tensor:
    """Rows of the field that are meant."""
    if item.field in _OF_THE_WORLD:
        if item.names != ".*":
            raise UserError(f"randomization of {item.field}: a world has one, so names {item.names!r} must be left out")
        _check_column(item, 3)
        return torch.tensor([0])
    prefix = _kind(item.field)
    if prefix not in _KINDS or not hasattr(model, item.field):
        raise UserError(
            f"randomization: no field {item.field!r} that can be drawn; fields of {', '.join(_KINDS)} can, and "
            f"{', '.join(_OF_THE_WORLD)}"
        )
    values = getattr(model, item.field)
    _check_column(item, values.shape[1] if values.ndim > 1 else 0)
    count = len(values)
    kind, pattern = _KINDS[prefix].value, re.compile(item.names)
    owners = model.dof_jntid.tolist() if prefix == "dof" else range(count)
    names = [mujoco.mj_id2name(model, kind, owner) or "" for owner in owners]
    found = [index for index, name in enumerate(names) if pattern.fullmatch(name)]
    if not found:
        raise UserError(
            f"randomization of {item.field}: no name matches {item.names!r}; there are {sorted(set(names))}"
        )
    return torch.tensor(found)


def _kind(field: str) -> str:
    return field.split("_")[0]


def _check_column(item: Randomization, columns: int) -> None:
    if item.column is not None and not 0 <= item.column < columns:
        allowed = f"choose from 0 to {columns - 1}" if columns else "it has one number for each, so leave it out"
        raise UserError(f"randomization of {item.field}: no column {item.column}; {allowed}")
