"""Compare the terrain heights that are computed from tensors with the geoms in MuJoCo."""

import dataclasses
import itertools

import mujoco
import numpy as np
import pytest
import torch

from paceline.robots.scene import load
from paceline.robots.terrain import CELL, KINDS, PATCH, Terrain

TERRAIN = Terrain(levels=4, border=3.0, seed=1)
PATCHES = [(level, kind) for kind in range(len(KINDS)) for level in range(TERRAIN.levels)]


def scene() -> mujoco.MjSpec:
    spec = load("scene")
    TERRAIN.replace_floor(spec)
    return spec


def heights(positions: np.ndarray) -> np.ndarray:
    """Return the heights at the positions x and y, [position, 2]."""
    table = torch.tensor([TERRAIN.heights().ravel().tolist()])
    return TERRAIN.height_at(table, *torch.from_numpy(positions).float().unbind(1)).numpy()


def patch(level: int, kind: int) -> np.ndarray:
    """Return the heights of a patch with its edges, [y, x]."""
    cells = round(PATCH / CELL)
    return TERRAIN.heights()[kind * cells : (kind + 1) * cells + 1, level * cells : (level + 1) * cells + 1]


def test_tensor_heights_equal_ray_casts():
    model = scene().compile()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    # Some positions are on the flat border.
    positions = np.random.default_rng(0).uniform(-1.0, 1.0, size=(1000, 2)) * (np.array(TERRAIN.size) + 2.0)
    hit = np.zeros(1, dtype=np.int32)
    down = np.array([0.0, 0.0, -1.0])
    found = [
        5.0 - mujoco.mj_ray(model, data, np.array([*position, 5.0]), down, None, 1, -1, hit) for position in positions
    ]
    np.testing.assert_allclose(heights(positions), found, atol=1e-4)
    assert np.ptp(found) > 1.0


def test_a_ball_rests_on_flat_ground():
    edge_x, edge_y = TERRAIN.size
    positions = [TERRAIN.middle(float(level), float(kind)) for level, kind in PATCHES[::5]]
    # These positions are on the border and where it joins the patches.
    positions += [(edge_x + 1.0, 0.5), (-edge_x - 1.0, 0.5), (0.5, edge_y + 1.0), (0.5, -edge_y), (edge_x, edge_y)]
    spec = scene()
    ground = heights(np.array(positions))
    for (x, y), z in zip(positions, ground, strict=True):
        ball = spec.worldbody.add_body(pos=(x, y, float(z) + 0.06))
        ball.add_freejoint()
        ball.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=(0.05, 0.0, 0.0), contype=0, conaffinity=1)
    model = spec.compile()
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data, nstep=500)
    np.testing.assert_allclose(data.qpos.reshape(-1, 7)[:, 2], ground + 0.05, atol=2e-3)


@pytest.mark.parametrize(("level", "kind"), PATCHES)
def test_a_patch_has_a_flat_start_area_and_joins_its_neighbors(level: int, kind: int):
    ground = patch(level, kind)
    middle = ground.shape[0] // 2
    assert np.ptp(ground[middle - 9 : middle + 10, middle - 9 : middle + 10]) < 1e-6
    assert (np.concatenate((ground[0], ground[-1], ground[:, 0], ground[:, -1])) == 0.0).all()


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_every_level_is_steeper_than_the_previous_one(kind: int):
    steep = [float(np.abs(np.diff(patch(level, kind), axis=1)).mean()) for level in range(TERRAIN.levels)]
    assert all(easy < 0.8 * hard for easy, hard in itertools.pairwise(steep))


def test_stairs_lead_down_and_up_from_the_start_area():
    for name, sign in (("stairs down", 1.0), ("stairs up", -1.0)):
        ground = sign * patch(TERRAIN.levels - 1, KINDS.index(name))
        middle = ground.shape[0] // 2
        to_the_edge = ground[middle, middle:]
        assert to_the_edge[0] == pytest.approx(10 * 0.16)
        assert (np.diff(to_the_edge) <= 0.0).all()


def test_heights_depend_on_the_seed_and_not_on_the_border():
    again, other = dataclasses.replace(TERRAIN, border=9.0), dataclasses.replace(TERRAIN, seed=2)
    assert np.array_equal(again.heights(), TERRAIN.heights())
    assert not np.array_equal(other.heights(), TERRAIN.heights())


def test_a_nan_position_has_height_nan_and_does_not_affect_others():
    positions = np.array([[np.nan, 0.0], [np.inf, 0.0], [-1e30, 1e30], [0.0, 0.0]])
    assert np.isnan(heights(positions)[0])
    assert heights(positions)[3] == 0.0
