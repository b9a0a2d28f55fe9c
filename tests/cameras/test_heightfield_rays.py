"""Rays against a heightfield agree with MuJoCo's."""

import mujoco
import numpy as np
import pytest

from paceline.cameras.heightfield_rays import HeightfieldRays

MJCF = """
<mujoco>
  <asset><hfield name="hills" nrow="17" ncol="23" size="2.2 1.6 .7 .1"/></asset>
  <worldbody><geom name="hills" type="hfield" hfield="hills" pos=".3 -.2 .1" euler="4 -7 30"/></worldbody>
</mujoco>
"""


@pytest.fixture(scope="module")
def scene() -> tuple[mujoco.MjModel, mujoco.MjData]:
    spec = mujoco.MjSpec.from_string(MJCF)
    spec.hfield("hills").userdata = np.random.default_rng(0).uniform(size=17 * 23).tolist()
    model = spec.compile()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def test_hits_are_those_of_mujoco(scene: tuple[mujoco.MjModel, mujoco.MjData]):
    model, data = scene
    random = np.random.default_rng(1)
    origins = random.uniform((-0.8, -0.8, 1.2), (1.0, 0.6, 2.0), (6, 3))[:, None]
    rays = random.normal(size=(6, 300, 3))
    found, normals = HeightfieldRays(model, data, 0).cast(origins, rays, np.inf)
    expected, expected_normals = np.zeros((6, 300)), np.zeros((6, 300, 3))
    for env, ray in np.ndindex(6, 300):
        expected[env, ray] = mujoco.mj_rayHfield(
            model, data, 0, origins[env, 0], rays[env, ray], expected_normals[env, ray]
        )
    hit = expected >= 0.0
    assert 0.2 < hit.mean() < 0.8
    assert (np.isfinite(found) == hit).all()
    np.testing.assert_allclose(found[hit], expected[hit], atol=1e-9)
    np.testing.assert_allclose(normals[hit], expected_normals[hit], atol=1e-9)


def test_hits_beyond_the_limit_are_misses(scene: tuple[mujoco.MjModel, mujoco.MjData]):
    rays, origins = HeightfieldRays(*scene, 0), np.array([[[0.3, -0.2, 2.0]]])
    down = np.array([[[0.0, 0.0, -1.0]]])
    distance = rays.cast(origins, down, np.inf)[0].item()
    assert rays.cast(origins, down, distance + 0.01)[0].item() == distance
    assert rays.cast(origins, down, distance - 0.01)[0].item() == np.inf


def test_points_outside_and_below_are_not_above(scene: tuple[mujoco.MjModel, mujoco.MjData]):
    rays = HeightfieldRays(*scene, 0)
    assert rays.are_above(np.array([[0.3, -0.2, 2.0], [0.0, 0.0, 2.0]]))
    assert not rays.are_above(np.array([[0.3, -0.2, 2.0], [5.0, 0.0, 2.0]]))
    assert not rays.are_above(np.array([[0.3, -0.2, 0.0]]))
