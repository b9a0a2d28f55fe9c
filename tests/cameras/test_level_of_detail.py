"""Meshes are simplified, and the distance of the simplified surface is measured and stated."""

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from paceline.cameras.camera import Camera
from paceline.cameras.level_of_detail import describe, make_triangles
from paceline.cameras.surface_deviation import distances

CAMERA = Camera(width=64, height=64, mesh_detail=4.0)


def make_model(inner_radius: float = 0.0) -> mujoco.MjModel:
    """Return a sphere with a radius of 1 m as a mesh, 3 m in front of a camera, with another sphere inside."""
    spec = mujoco.MjSpec.from_string('<mujoco><asset><mesh name="ball" builtin="sphere" params="4"/></asset></mujoco>')
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname="ball")
    ball = spec.compile()
    vertices, faces = ball.mesh_vert, ball.mesh_face
    if inner_radius:
        faces = np.concatenate((faces, faces + len(vertices)))
        vertices = np.concatenate((vertices, inner_radius * vertices))
    spec = mujoco.MjSpec()
    spec.add_mesh(name="ball", uservert=vertices.flatten().tolist(), userface=faces.flatten().tolist())
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname="ball")
    spec.worldbody.add_camera(name="front", pos=[0, 0, 4])
    return spec.compile()


def test_distance_from_a_triangle() -> None:
    triangle = np.array([[[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    expected = {
        (0.2, 0.2, 0.3): 0.3,  # above
        (0.5, -0.4, 0.3): 0.5,  # beside an edge
        (-3.0, -4.0, 0.0): 5.0,  # beside a corner
        (1.0, 1.0, 0.0): np.sqrt(0.5),
    }
    # The other triangles are farther away; one of them has no area.
    both = np.concatenate((triangle + 20.0, triangle, np.full((1, 3, 3), 30.0)))
    np.testing.assert_allclose(distances(np.array(list(expected)), both), list(expected.values()))


def test_the_deviation_of_a_simplified_sphere_is_stated() -> None:
    triangles = make_triangles(make_model(), np.array([0]), "front", CAMERA)
    assert triangles.full_count == 5120
    assert triangles.mesh_count < 2500
    # Vertices stay near the sphere; between them the surface is inside.
    assert np.abs(np.linalg.norm(triangles.vertices, axis=1) - 1.0).max() < 0.01
    assert 1e-4 < np.median(triangles.deviation) < triangles.deviation.max() < 0.03
    line = describe(triangles, "front", CAMERA)
    half, most = (1e3 * np.quantile(triangles.deviation, part) for part in (0.5, 0.99))
    assert f"from 5,120 to {triangles.mesh_count:,} triangles (mesh_detail 4)" in line
    assert f"deviates by at most {half:.2f} mm, 99 % by at most {most:.2f} mm" in line


def test_surfaces_that_cannot_be_seen_are_removed_and_do_not_count() -> None:
    triangles = make_triangles(make_model(inner_radius=0.5), np.array([0]), "front", CAMERA)
    assert triangles.full_count == 2 * 5120
    assert np.linalg.norm(triangles.vertices, axis=1).min() > 0.9
    assert triangles.deviation.max() < 0.1


def test_whole_meshes_have_no_deviation() -> None:
    camera = replace(CAMERA, mesh_detail=0.0)
    triangles = make_triangles(make_model(), np.array([0]), "front", camera)
    assert triangles.mesh_count == triangles.full_count == len(triangles.triangles)
    assert describe(triangles, "front", camera) == ""


@pytest.mark.parametrize("size", [32, 128])
def test_the_level_of_detail_follows_the_resolution(size: int) -> None:
    camera = replace(CAMERA, width=size, height=size)
    reference = make_triangles(make_model(), np.array([0]), "front", CAMERA)
    found = make_triangles(make_model(), np.array([0]), "front", camera)
    assert (found.mesh_count > reference.mesh_count) == (size > CAMERA.height)
    assert (np.median(found.deviation) < np.median(reference.deviation)) == (size > CAMERA.height)
