"""Compare the measured capacity with the contacts and constraints of falling robots."""

import mujoco
import numpy as np
import pytest

from paceline.robots.legged import G1, GO1
from paceline.sim.calibration import measure_capacity


def count_in_fall(model: mujoco.MjModel, seconds: float, seed: int) -> tuple[int, int]:
    """Return the maximum numbers of contacts and constraint rows while the robot falls with random velocities."""
    random, data = np.random.default_rng(seed), mujoco.MjData(model)
    data.qpos[2] += 0.3
    data.qvel[:] = 2.0 * random.normal(size=model.nv)
    contacts = constraints = 0
    for _ in range(round(seconds / model.opt.timestep)):
        mujoco.mj_step(model, data)
        contacts, constraints = max(contacts, data.ncon), max(constraints, data.nefc)
    return contacts, constraints


@pytest.mark.parametrize("robot", [GO1, G1], ids=["go1", "g1"])
def test_the_capacity_is_sufficient_for_falls(robot):
    model = robot.scene().compile()
    capacity = measure_capacity(model)
    counts = [count_in_fall(model, 2.0, seed) for seed in range(10)]
    assert max(contacts for contacts, _ in counts) <= capacity.contacts
    assert max(constraints for _, constraints in counts) <= capacity.constraints
    assert capacity.contacts < 64


def test_the_capacity_is_deterministic():
    model = GO1.scene().compile()
    assert measure_capacity(model) == measure_capacity(model)
