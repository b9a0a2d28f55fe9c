"""Measure how many contacts and constraint rows an env needs; MuJoCo Warp allocates them before the first step."""

from typing import NamedTuple

import mujoco
import numpy as np

from paceline.sim.simulation import initial_data

_ROLLOUTS = 8
_SECONDS = 2.0
# A policy can reach poses with more contacts than random controls do.
_MARGIN, _MIN_ROWS = 2.0, 8


class Capacity(NamedTuple):
    """Maximum numbers per env."""

    contacts: int
    constraints: int


def measure_capacity(model: mujoco.MjModel) -> Capacity:
    """Run rollouts with random controls in the C engine and return the maxima with a margin.

    Rollouts start in the initial state of the model, with random velocities.
    """
    random = np.random.default_rng(0)
    low, high = model.actuator_ctrlrange.T
    contacts = constraints = 0
    for _ in range(_ROLLOUTS):
        data = initial_data(model)
        center = data.ctrl.copy()
        data.qvel[:] = random.normal(size=model.nv)
        for step in range(round(_SECONDS / model.opt.timestep)):
            if step % 10 == 0:
                # Controls of actuators without a range are within 1 of those of the keyframe.
                spread = random.uniform(size=model.nu)
                unlimited = center + 2.0 * spread - 1.0
                data.ctrl[:] = np.where(model.actuator_ctrllimited, low + spread * (high - low), unlimited)
            mujoco.mj_step(model, data)
            contacts, constraints = max(contacts, data.ncon), max(constraints, data.nefc)
            if data.warning.number.any():
                # The simulation diverged; its later contacts have no meaning.
                break
    return Capacity(*(round(_MARGIN * most) + _MIN_ROWS for most in (contacts, constraints)))
