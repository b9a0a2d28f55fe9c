"""Randomization of the model: masses, friction, gains and other fields of MuJoCo's model differ between envs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mujoco
import numpy as np
import torch
from torch import Tensor

from paceline.errors import UserError
from paceline.sim.simulation import Sim
from paceline.tensors import graph, random
from paceline.validation import Bounded, NonNegative, check

INDEPENDENT_FIELDS = (
    *("geom_friction", "geom_solref", "geom_solimp", "geom_rgba"),
    *("dof_damping", "dof_frictionloss", "jnt_range", "jnt_stiffness"),
    *("actuator_gainprm", "actuator_biasprm", "actuator_forcerange", "actuator_ctrlrange", "opt.gravity"),
    *("cam_fovy", "light_ambient", "light_diffuse", "light_specular"),
)
"""Fields from which MuJoCo derives no constants. After a change of another field, they are computed again."""
_POSE_FIELDS = {"cam_mode": ("cam_pos", "cam_quat"), "light_mode": ("light_pos", "light_dir")}
"""Poses of cameras and lights. MuJoCo uses constants derived from them only in the modes track and trackcom."""
_TRACKING = (mujoco.mjtCamLight.mjCAMLIGHT_TRACK.value, mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM.value)
_OBJECTS = ("body", "geom", "jnt", "dof", "actuator", "site", "tendon", "cam", "light")
"""Prefixes of the fields that have a row per object."""
_GRAVITY = "opt.gravity"


@dataclass(frozen=True)
class Randomization:
    """A field of the model that is sampled for each env, uniformly from `low` to `high`."""

    field: str
    """Name of the field in MuJoCo: body_mass, geom_friction, actuator_gainprm, cam_pos, light_dir, ..., or
    opt.gravity."""
    low: Bounded
    high: Bounded
    names: str = ".*"
    """Regular expression for the whole names of the bodies, geoms, joints, cameras or other objects. Gravity has no
    names."""
    how: Literal["scale", "add", "set"] = "scale"
    """Operation on the value of the model. If two randomizations change the same number, the later one counts."""
    column: int | None = None
    """Column of a field that has several numbers per object; by default all columns get the same sample."""
    also: str = ""
    """Another field of the same kind and shape that gets the same samples. For example, actuator_gainprm and
    actuator_biasprm scaled by the same factor are a motor of different strength."""
    together: bool = False
    """Use the same sample for all objects."""
    when: Literal["once", "reset"] = "reset"
    """Time of sampling: once per env, or in every episode. For fields from which MuJoCo derives constants (masses,
    inertias, armatures), every change costs a pass over all envs."""
    every_seconds: NonNegative = 0.0
    """Interval at which the field is sampled again within an episode, s; 0 for never."""

    def __post_init__(self) -> None:
        check(self, f"randomization of {self.field}: ")
        if self.low > self.high:
            raise UserError(f"randomization of {self.field}: from {self.low:g} to {self.high:g} is no range: swap them")
        try:
            re.compile(self.names)
        except re.error as error:
            text = f"names {self.names!r} is not a regular expression: {error}"
            raise UserError(f"randomization of {self.field}: {text}") from None

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field, self.also) if self.also else (self.field,)


class Randomizer:
    """Samples the fields of a `Sim`. The samples depend on seed, env and step only, for any number of ranks."""

    def __init__(self, items: tuple[Randomization, ...], sim: Sim, seed: int, env_index: Tensor, step_seconds: float):
        self._items, self._sim, self._seed, self._env_index = items, sim, seed, env_index
        self._independent = _independent_fields(sim.model)
        self._rows = [_rows(item, sim.model).to(sim.device) for item in items]
        self._fields = {name: sim.field(name) for item in items for name in item.fields}
        if _GRAVITY in self._fields:
            # One row, so that all fields are [env, row, ...].
            self._fields[_GRAVITY] = self._fields[_GRAVITY].unsqueeze(1)
        self._defaults = {name: field.clone() for name, field in self._fields.items()}
        self._intervals = [max(1, round(item.every_seconds / step_seconds)) for item in items]
        self._repeated = [i for i, item in enumerate(items) if item.when == "reset" or item.every_seconds > 0.0]
        self._fused_write = graph.fuse(self._write, sim.device)
        # Sample all fields in all envs, at step 0.
        everywhere, indices = torch.ones_like(env_index, dtype=torch.bool), range(len(items))
        samples = [self._sample(index, torch.zeros_like(env_index)) for index in indices]
        self._write([everywhere] * len(items), samples, indices)
        self._refresh(indices)

    def samples(self, step: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the samples that `randomize` takes at each of the steps [step, 1]: [env, n] for each field that is
        sampled more than once."""
        if not self._repeated:
            return [()] * len(step)
        # The constructor has used step 0.
        step = step + 1
        return list(zip(*(self._sample(index, step) for index in self._repeated), strict=True))

    def randomize(self, done: Tensor, episode_step: Tensor, samples: tuple[Tensor, ...]) -> None:
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
            sampled = item.low + (item.high - item.low) * uniform
            for name in item.fields:
                field = self._fields[name]
                current, default = field.index_select(1, rows), self._defaults[name].index_select(1, rows)
                value = sampled.view(*sampled.shape, *[1] * (current.dim() - 2))
                new = {"scale": default * value, "add": default + value, "set": value.expand_as(default)}[item.how]
                if item.column is not None:
                    column = torch.arange(current.shape[2], device=current.device) == item.column
                    new = torch.where(column, new, current)
                field.index_copy_(1, rows, torch.where(mask.view(-1, *[1] * (current.dim() - 1)), new, current))

    def _refresh(self, indices: Sequence[int]) -> None:
        names = (name for index in indices for name in self._items[index].fields)
        self._sim.refresh_constants(derived=any(name not in self._independent for name in names))


def per_env_fields(items: tuple[Randomization, ...], model: mujoco.MjModel) -> tuple[str, ...]:
    """Return the fields of the model that differ between envs. Raise UserError for a field or name that the model does
    not have."""
    for item in items:
        rows, shapes = _rows(item, model), [getattr(getattr(model, name, None), "shape", None) for name in item.fields]
        if item.also and (shapes[0] != shapes[1] or item.field.split("_")[0] != item.also.split("_")[0]):
            raise UserError(f"randomization of {item.field}: {item.also!r} is not a field of the same kind and shape")
        if "body_mass" in item.fields:
            mass = model.body_mass[rows.numpy()].min()
            if {"scale": mass * item.low, "add": mass + item.low, "set": item.low}[item.how] < 0.0:
                raise UserError(
                    f"randomization of body_mass: from {item.low:g} to {item.high:g} the mass of a body of {mass:g} kg "
                    "would become negative"
                )
    return tuple(dict.fromkeys(field for item in items for field in item.fields))


def _independent_fields(model: mujoco.MjModel) -> set[str]:
    """Return the fields whose change does not require new constants of this model."""
    fixed = {mode: not np.isin(getattr(model, mode), _TRACKING).any() for mode in _POSE_FIELDS}
    return {*INDEPENDENT_FIELDS, *(name for mode, names in _POSE_FIELDS.items() if fixed[mode] for name in names)}


def _rows(item: Randomization, model: mujoco.MjModel) -> Tensor:
    """Return the rows of the field that the names match."""
    prefix = item.field.split("_")[0]
    if item.field == _GRAVITY:
        values, names = model.opt.gravity[None], ["gravity"]
    elif prefix in _OBJECTS and hasattr(model, item.field):
        values = getattr(model, item.field)
        full_name = {"jnt": "joint", "dof": "joint", "cam": "camera"}.get(prefix, prefix)
        kind = getattr(mujoco.mjtObj, f"mjOBJ_{full_name.upper()}").value
        objects = model.dof_jntid.tolist() if prefix == "dof" else range(len(values))
        names = [mujoco.mj_id2name(model, kind, index) or "" for index in objects]
    else:
        allowed = f"choose a field of {', '.join(_OBJECTS)} or {_GRAVITY}"
        raise UserError(f"randomization: no field {item.field!r} that can be sampled; {allowed}")
    columns = values.shape[1] if values.ndim > 1 else 0
    if item.column is not None and not 0 <= item.column < columns:
        allowed = f"choose from 0 to {columns - 1}" if columns else "it has one number per object, so leave it out"
        raise UserError(f"randomization of {item.field}: no column {item.column}; {allowed}")
    found = [row for row, name in enumerate(names) if re.fullmatch(item.names, name)]
    if not found:
        there = sorted(set(names))
        raise UserError(f"randomization of {item.field}: no name matches {item.names!r}; there are {there}")
    return torch.tensor(found)
