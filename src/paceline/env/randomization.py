"""Randomization of the model: masses, friction, gains and other fields of MuJoCo's model differ between envs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mujoco
import torch
from torch import Tensor

from paceline.errors import UserError
from paceline.sim.simulation import Sim
from paceline.tensors import random
from paceline.tensors.graph import fuse

INDEPENDENT_FIELDS = (
    *("geom_friction", "geom_solref", "geom_solimp", "geom_rgba"),
    *("dof_damping", "dof_frictionloss", "jnt_range", "jnt_stiffness"),
    *("actuator_gainprm", "actuator_biasprm", "actuator_forcerange", "actuator_ctrlrange", "opt.gravity"),
)
"""Fields from which MuJoCo derives no constants. A change of any other field costs a pass over the model."""
_OBJECTS = {
    "body": mujoco.mjtObj.mjOBJ_BODY,
    "geom": mujoco.mjtObj.mjOBJ_GEOM,
    "jnt": mujoco.mjtObj.mjOBJ_JOINT,
    "dof": mujoco.mjtObj.mjOBJ_JOINT,
    "actuator": mujoco.mjtObj.mjOBJ_ACTUATOR,
    "site": mujoco.mjtObj.mjOBJ_SITE,
    "tendon": mujoco.mjtObj.mjOBJ_TENDON,
}
# Fields of which a model has one, without names.
_GLOBAL_FIELDS = ("opt.gravity",)


@dataclass(frozen=True)
class Randomization:
    """A field of the model that is sampled for each env, uniformly from `low` to `high`."""

    field: str
    """Name of the field in MuJoCo: body_mass, geom_friction, actuator_gainprm, dof_armature, ..., or opt.gravity."""
    low: float
    high: float
    names: str = ".*"
    """Regular expression for the whole names of the bodies, geoms, joints or actuators. Gravity has no names."""
    how: Literal["scale", "add", "set"] = "scale"
    """Operation on the value of the model. Of two randomizations of the same number the later one counts."""
    column: int | None = None
    """Column of a field that has several numbers per object; by default all columns get the same sample."""
    also: str = ""
    """Another field of the same kind and shape that gets the same samples. For example, actuator_gainprm and
    actuator_biasprm scaled by the same factor are a motor of different strength."""
    together: bool = False
    """Whether all objects get the same sample."""
    when: Literal["once", "reset"] = "reset"
    """Time of sampling: once per env, or in every episode. For fields from which MuJoCo derives constants (masses,
    inertias, armatures), every change costs a pass over all envs."""
    every_seconds: float = 0.0
    """Interval at which the field is sampled again within an episode, s; 0 for never."""


class Randomizer:
    """Samples the fields of a `Sim`. The samples depend on seed, env and step only, for any number of ranks."""

    def __init__(self, items: tuple[Randomization, ...], sim: Sim, seed: int, env_index: Tensor, step_seconds: float):
        self._items, self._sim, self._seed, self._env_index = items, sim, seed, env_index
        self._rows = [_rows(item, sim.model).to(sim.device) for item in items]
        self._fields = {name: _per_env(sim, name) for item in items for name in _field_names(item)}
        self._defaults = {name: field.clone() for name, field in self._fields.items()}
        self._intervals = [max(1, round(item.every_seconds / step_seconds)) for item in items]
        self._repeated = [i for i, item in enumerate(items) if item.when == "reset" or item.every_seconds > 0.0]
        self._fused_write = fuse(self._write, sim.device)

    def randomize_all(self, step: Tensor) -> None:
        """Sample all fields in all envs."""
        everywhere = [torch.ones_like(self._env_index, dtype=torch.bool)] * len(self._items)
        indices = range(len(self._items))
        self._write(everywhere, [self._sample(index, step) for index in indices], indices)
        self._refresh(indices)

    def samples(self, step: Tensor) -> list[Tensor]:
        """Return the samples that `randomize` takes at the steps [step, 1]: for each field that is sampled more than
        once, [step, env, n]."""
        return [self._sample(index, step) for index in self._repeated]

    def randomize(self, done: Tensor, episode_step: Tensor, samples: Sequence[Tensor]) -> None:
        """Sample fields in the envs that start an episode, and where an interval is over."""
        masks = [self._due(index, done, episode_step) for index in self._repeated]
        # On a CPU the masks can be read, and most of the time all are empty.
        if masks and (self._sim.device.type != "cpu" or any(mask.numpy().any() for mask in masks)):
            self._fused_write(masks, samples, self._repeated)
            self._refresh(self._repeated)

    def _sample(self, index: int, step: Tensor) -> Tensor:
        count = 1 if self._items[index].together else len(self._rows[index])
        # All items share one stream, each with its own steps.
        step = step * len(self._items) + index
        return random.uniform(self._seed, self._env_index, step, random.Stream.RANDOMIZE, count)

    def _due(self, index: int, done: Tensor, episode_step: Tensor) -> Tensor:
        item = self._items[index]
        if not item.every_seconds > 0.0:
            return done
        over = (episode_step > 0) & (episode_step % self._intervals[index] == 0)
        return done | over if item.when == "reset" else over

    def _write(self, masks: Sequence[Tensor], samples: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Write the samples of some items to the envs of their masks."""
        for mask, uniform, index in zip(masks, samples, indices, strict=True):
            item, rows = self._items[index], self._rows[index]
            value = item.low + (item.high - item.low) * uniform
            for name in _field_names(item):
                self._write_field(name, item, rows, mask, value)

    def _write_field(self, name: str, item: Randomization, rows: Tensor, mask: Tensor, value: Tensor) -> None:
        field = self._fields[name]
        current, default = field.index_select(1, rows), self._defaults[name].index_select(1, rows)
        value = value.view(*value.shape, *[1] * (current.dim() - 2))
        new = {"scale": default * value, "add": default + value, "set": value.expand_as(default)}[item.how]
        if item.column is not None:
            column = torch.arange(current.shape[2], device=current.device) == item.column
            new = torch.where(column, new, current)
        field.index_copy_(1, rows, torch.where(mask.view(-1, *[1] * (current.dim() - 1)), new, current))

    def _refresh(self, indices: Sequence[int]) -> None:
        names = (name for index in indices for name in _field_names(self._items[index]))
        self._sim.refresh_constants(derived=any(name not in INDEPENDENT_FIELDS for name in names))


def _per_env(sim: Sim, name: str) -> Tensor:
    """Return a writable field as [env, row, ...]."""
    field = sim.field(name)
    return field.unsqueeze(1) if name in _GLOBAL_FIELDS else field


def per_env_fields(items: tuple[Randomization, ...], model: mujoco.MjModel) -> tuple[str, ...]:
    """Return the fields of the model that differ between envs. Raise UserError for a field or name that the model does
    not have."""
    for item in items:
        rows = _rows(item, model)
        if item.also:
            _check_pair(item, model)
        if "body_mass" in _field_names(item):
            _check_mass(item, model.body_mass[rows.numpy()].min())
    return tuple(dict.fromkeys(field for item in items for field in _field_names(item)))


def _field_names(item: Randomization) -> tuple[str, ...]:
    return (item.field, item.also) if item.also else (item.field,)


def _check_pair(item: Randomization, model: mujoco.MjModel) -> None:
    one, other = (getattr(model, field, None) for field in _field_names(item))
    if one is None or other is None or one.shape != other.shape or _prefix(item.field) != _prefix(item.also):
        raise UserError(f"randomization of {item.field}: {item.also!r} is no field of the same kind and shape")


def _check_mass(item: Randomization, mass: float) -> None:
    lowest = {"scale": mass * item.low, "add": mass + item.low, "set": item.low}[item.how]
    if lowest < 0.0:
        raise UserError(
            f"randomization of body_mass: from {item.low:g} to {item.high:g} the mass of a body of {mass:g} kg would "
            "become negative"
        )


def _rows(item: Randomization, model: mujoco.MjModel) -> Tensor:
    """Return the rows of the field that the names match."""
    if item.field in _GLOBAL_FIELDS:
        if item.names != ".*":
            raise UserError(f"randomization of {item.field}: it has no names, so names {item.names!r} must be left out")
        _check_column(item, 3)
        return torch.tensor([0])
    prefix = _prefix(item.field)
    if prefix not in _OBJECTS or not hasattr(model, item.field):
        raise UserError(
            f"randomization: no field {item.field!r} that can be sampled; choose a field of {', '.join(_OBJECTS)} or "
            f"{', '.join(_GLOBAL_FIELDS)}"
        )
    values = getattr(model, item.field)
    _check_column(item, values.shape[1] if values.ndim > 1 else 0)
    kind, pattern = _OBJECTS[prefix].value, re.compile(item.names)
    objects = model.dof_jntid.tolist() if prefix == "dof" else range(len(values))
    names = [mujoco.mj_id2name(model, kind, index) or "" for index in objects]
    found = [row for row, name in enumerate(names) if pattern.fullmatch(name)]
    if not found:
        raise UserError(
            f"randomization of {item.field}: no name matches {item.names!r}; there are {sorted(set(names))}"
        )
    return torch.tensor(found)


def _prefix(field: str) -> str:
    return field.split("_")[0]


def _check_column(item: Randomization, columns: int) -> None:
    if item.column is not None and not 0 <= item.column < columns:
        allowed = f"choose from 0 to {columns - 1}" if columns else "it has one number per object, so leave it out"
        raise UserError(f"randomization of {item.field}: no column {item.column}; {allowed}")
