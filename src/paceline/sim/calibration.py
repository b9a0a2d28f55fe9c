"""How many contacts and constraint rows a world of a model needs: MuJoCo Warp has to know before it starts."""

from dataclasses import dataclass

import mujoco
import numpy as np

_WORLDS = 8
_SECONDS = 2.0
# A policy may fold its robot up further than chance does.
_MARGIN, _LEAST = 2.0, 8


@dataclass(frozen=True)
class Room:
    """For each world."""

    contacts: int
    constraints: int


def measured(model: mujoco.MjModel) -> Room:
    """From falls and flailing about: random controls from the pose of the first keyframe, or else the model's own; the
    most that was ever seen, and room to spare."""
    random, data = np.random.default_rng(0), mujoco.MjData(model)
    contacts = constraints = 0
    for _ in range(_WORLDS):
        if model.nkey:
            mujoco.mj_resetDataKeyframe(model, data, 0)
        else:
            mujoco.mj_resetData(model, data)
        centre = data.ctrl.copy()
        data.qvel[:] = random.normal(size=model.nv)
        for step in range(round(_SECONDS / model.opt.timestep)):
            if step % 10 == 0:
                data.ctrl[:] = _controls(model, centre, random)
            mujoco.mj_step(model, data)
            contacts, constraints = max(contacts, data.ncon), max(constraints, data.nefc)
            if data.warning.number.any():
                # It blew up: what comes is no longer the model's doing.
                break
    return Room(*(round(_MARGIN * most) + _LEAST for most in (contacts, constraints)))


def _controls(model: mujoco.MjModel, centre: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Over the whole range of each actuator; about where it was for one without."""
    low, high = model.actuator_ctrlrange.T
    spread = random.uniform(size=model.nu)
    return np.where(model.actuator_ctrllimited, low + spread * (high - low), centre + 2.0 * spread - 1.0)
