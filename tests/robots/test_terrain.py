"""The ground: as it is computed in tensors, and as MuJoCo has it."""

import dataclasses
import itertools

import mujoco
import numpy as np
import pytest
import torch

from paceline.robots.terrain import KINDS, Terrain

TERRAIN = Terrain(levels=4, border=3.0, seed=1)
PATCHES = [(level, kind) for kind in range(len(KINDS)) for level in range(TERRAIN.levels)]


def scene() -> mujoco.MjSpec:
    spec = mujoco.MjSpec()
    TERRAIN.add_to(spec)
    return spec


def heights(places: np.ndarray) -> np.ndarray:
    """At x and y, [place, 2]."""
    table = torch.tensor([TERRAIN.heights().ravel().tolist()])
    return TERRAIN.height_at(table, *torch.from_numpy(places).float().unbind(1)).numpy()


def patch(level: int, kind: int) -> np.ndarray:
    """Its heights, [y, x], edges included."""
    cells = round(TERRAIN.patch / TERRAIN.cell)
    return TERRAIN.heights()[kind * cells : (kind + 1) * cells + 1, level * cells : (level + 1) * cells + 1]


def test_heights_in_tensors_are_those_that_rays_find():
    model = scene().compile()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    # Some are on the flat ground around.
    places = np.random.default_rng(0).uniform(-1.0, 1.0, size=(1000, 2)) * (np.array(TERRAIN.size) + 2.0)
    hit = np.zeros(1, dtype=np.int32)
    down = np.array([0.0, 0.0, -1.0])
    found = [5.0 - mujoco.mj_ray(model, data, np.array([*place, 5.0]), down, None, 1, -1, hit) for place in places]
    np.testing.assert_allclose(heights(places), found, atol=1e-4)
    assert np.ptp(found) > 1.0


def test_a_ball_comes_to_rest_on_the_ground_wherever_it_is_flat():
    edge_x, edge_y = TERRAIN.size
    places = [TERRAIN.middle(float(level), float(kind)) for level, kind in PATCHES[::5]]
    # On the border, and where it meets the patches.
    places += [(edge_x + 1.0, 0.5), (-edge_x - 1.0, 0.5), (0.5, edge_y + 1.0), (0.5, -edge_y), (edge_x, edge_y)]
    spec = scene()
    ground = heights(np.array(places))
    for (x, y), z in zip(places, ground, strict=True):
        ball = spec.worldbody.add_body(pos=(x, y, float(z) + 0.06))
        ball.add_freejoint()
        ball.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=(0.05, 0.0, 0.0), contype=0, conaffinity=1)
    model = spec.compile()
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data, nstep=500)
    np.testing.assert_allclose(data.qpos.reshape(-1, 7)[:, 2], ground + 0.05, atol=2e-3)


@pytest.mark.parametrize(("level", "kind"), PATCHES)
def test_a_patch_is_flat_where_robots_start_and_meets_its_neighbours(level: int, kind: int):
    ground = patch(level, kind)
    middle = ground.shape[0] // 2
    assert np.ptp(ground[middle - 9 : middle + 10, middle - 9 : middle + 10]) < 1e-6
    assert (np.concatenate((ground[0], ground[-1], ground[:, 0], ground[:, -1])) == 0.0).all()


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_every_level_is_harder_than_the_one_before(kind: int):
    # The mean steepness, whichever way it goes.
    steep = [float(np.abs(np.diff(patch(level, kind), axis=1)).mean()) for level in range(TERRAIN.levels)]
    assert all(easy < 0.8 * hard for easy, hard in itertools.pairwise(steep))


def test_stairs_lead_down_and_up_from_where_robots_start():
    for name, sign in (("stairs down", 1.0), ("stairs up", -1.0)):
        ground = sign * patch(TERRAIN.levels - 1, KINDS.index(name))
        middle = ground.shape[0] // 2
        to_the_edge = ground[middle, middle:]
        assert to_the_edge[0] == pytest.approx(10 * 0.16)
        assert (np.diff(to_the_edge) <= 0.0).all()


def test_the_seed_decides_and_nothing_else():
    again, other = dataclasses.replace(TERRAIN, border=9.0), dataclasses.replace(TERRAIN, seed=2)
    assert np.array_equal(again.heights(), TERRAIN.heights())
    assert not np.array_equal(other.heights(), TERRAIN.heights())


def test_a_place_that_is_not_a_number_has_no_height_but_does_no_harm():
    places = np.array([[np.nan, 0.0], [np.inf, 0.0], [-1e30, 1e30], [0.0, 0.0]])
    assert np.isnan(heights(places)[0])
    assert heights(places)[3] == 0.0
