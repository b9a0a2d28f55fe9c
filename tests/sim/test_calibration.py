"""Room for contacts and constraints, beside what rollouts of real tasks come to."""

import mujoco
import numpy as np
import pytest

from paceline.robots.legged import G1, GO1
from paceline.sim.calibration import measured


def dropped(model: mujoco.MjModel, seconds: float, seed: int) -> tuple[int, int]:
    """The most contacts and constraint rows while the model falls from a random pose, limp."""
    random, data = np.random.default_rng(seed), mujoco.MjData(model)
    data.qpos[2] += 0.3
    data.qvel[:] = 2.0 * random.normal(size=model.nv)
    contacts = constraints = 0
    for _ in range(round(seconds / model.opt.timestep)):
        mujoco.mj_step(model, data)
        contacts, constraints = max(contacts, data.ncon), max(constraints, data.nefc)
    return contacts, constraints


@pytest.mark.parametrize("robot", [GO1, G1], ids=["go1", "g1"])
def test_a_robot_that_falls_has_room(robot):
    model = robot.scene().compile()
    room = measured(model)
    seen = [dropped(model, 2.0, seed) for seed in range(10)]
    assert max(contacts for contacts, _ in seen) <= room.contacts
    assert max(constraints for _, constraints in seen) <= room.constraints
    assert room.contacts < 64


def test_it_is_the_same_every_time():
    model = GO1.scene().compile()
    assert measured(model) == measured(model)
