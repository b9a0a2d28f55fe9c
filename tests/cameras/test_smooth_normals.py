"""Normals of meshes are interpolated between vertices as OpenGL does, but not across sharp edges."""

from dataclasses import replace

import numpy as np

from paceline.cameras.camera import Camera
from paceline.cameras.gpu_renderer import GpuRenderer
from paceline.cameras.ray_renderer import RayRenderer
from paceline.sim.mujoco_sim import MujocoSim
from tests.cameras.images import fraction, opengl, render, similarity
from tests.cameras.scenes import make_mesh_model

STREAMS = ("rgb", "normals", "segmentation")
CAMERA = Camera(width=96, height=72, streams=STREAMS, depth_dtype="float32", mesh_detail=0.0, smooth_normals=True)
BALL, CUBE = 0, 1


def test_both_renderers_interpolate_normals_as_opengl() -> None:
    sim = MujocoSim(make_mesh_model(), 1)
    reference = opengl(sim.model, sim, "front", CAMERA)["rgb"]
    images = {}
    for kind in (RayRenderer, GpuRenderer):
        images[kind] = render(kind("front", CAMERA, sim, {}), CAMERA, 1)
        flat = render(kind("front", replace(CAMERA, smooth_normals=False), sim, {}), CAMERA, 1)["rgb"]
        errors = [
            np.abs(rgb[0].permute(1, 2, 0).numpy() - reference.astype(float)).mean()
            for rgb in (flat, images[kind]["rgb"])
        ]
        assert errors[1] < 0.75 * errors[0]
        assert similarity(images[kind]["rgb"][0].permute(1, 2, 0).numpy(), reference) > 0.95
    one, other = images.values()
    assert fraction((one["normals"] - other["normals"]).abs() < 0.01) > 0.998
    assert fraction((one["rgb"].int() - other["rgb"].int()).abs() <= 1) > 0.998


def test_sharp_edges_stay_sharp() -> None:
    sim = MujocoSim(make_mesh_model(), 1)
    for kind in (RayRenderer, GpuRenderer):
        images = render(kind("front", CAMERA, sim, {}), CAMERA, 1)
        normals = images["normals"][0].permute(1, 2, 0)[images["segmentation"][0, 0] == CUBE]
        cosines = normals @ sim.kinematics("geom_xmat")[0, CUBE].float()
        assert len(normals) > 100
        # Each side of the cube has the normal of one axis.
        assert (cosines.abs().amax(1) > 0.999).all()


def test_simplified_meshes_have_the_normals_of_the_whole_mesh() -> None:
    sim = MujocoSim(make_mesh_model(), 1)
    camera = replace(CAMERA, mesh_detail=9.0)
    renderer = GpuRenderer("front", camera, sim, {})
    assert len(renderer.triangles.triangles) < 0.7 * renderer.triangles.full_count
    whole, simple = (render(each, camera, 1) for each in (RayRenderer("front", camera, sim, {}), renderer))
    ball = (whole["segmentation"] == BALL) & (simple["segmentation"] == BALL)
    cosine = (whole["normals"] * simple["normals"]).sum(1, keepdim=True)[ball].clamp(max=1.0)
    assert cosine.acos().rad2deg().median() < 5.0
