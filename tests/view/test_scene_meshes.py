"""Meshes for the browser, read back and compared with the geoms of the model."""

import io

import mujoco
import numpy as np
import pytest
import trimesh

from paceline.view.scene_meshes import scene_meshes

# Attributes of a geom, and its smallest and largest coordinates after a rotation by 90 degrees around z.
GEOMS = {
    "box": ('size=".1 .2 .3"', (-0.2, -0.1, -0.3), (0.2, 0.1, 0.3)),
    "sphere": ('size=".2"', (-0.2, -0.2, -0.2), (0.2, 0.2, 0.2)),
    "capsule": ('size=".1 .3"', (-0.1, -0.1, -0.4), (0.1, 0.1, 0.4)),
    "cylinder": ('size=".1 .3"', (-0.1, -0.1, -0.3), (0.1, 0.1, 0.3)),
    "ellipsoid": ('size=".1 .2 .3"', (-0.2, -0.1, -0.3), (0.2, 0.1, 0.3)),
    "mesh": ('mesh="tetrahedron"', (-0.2, 0.0, 0.0), (0.0, 0.3, 0.1)),
}
MODEL = """
<mujoco>
  <asset>
    <mesh name="tetrahedron" vertex="0 0 0  .3 0 0  0 .2 0  0 0 .1"/>
    <hfield name="hills" nrow="2" ncol="3" size="3 2 1 .1" elevation="0 0 0 0 1 0"/>
    <texture name="checker" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 0 1" width="8" height="8"/>
    <material name="floor" texture="checker"/>
    <material name="paint" rgba="0 1 0 1"/>
  </asset>
  <worldbody>
    <geom type="plane" size="0 0 1" material="floor"/>
    <geom type="hfield" hfield="hills"/>
    <body pos="1 0 1"><freejoint/><geom type="TYPE" ATTRIBUTES material="paint" pos=".5 0 0" euler="0 0 90"/></body>
    <body><geom type="sphere" size=".1" group="3"/></body>
  </worldbody>
</mujoco>"""


@pytest.mark.parametrize("kind", GEOMS)
def test_a_geom_has_its_place_size_and_color_in_the_frame_of_its_body(kind: str):
    attributes, low, high = GEOMS[kind]
    model = mujoco.MjModel.from_xml_string(MODEL.replace("TYPE", kind).replace("ATTRIBUTES", attributes))
    floor, hills, body = scene_meshes(model)
    assert [(mesh.body, mesh.is_floor) for mesh in (floor, hills, body)] == [(0, True), (0, False), (1, False)]
    scene = trimesh.load_scene(io.BytesIO(body.glb), file_type="glb")
    np.testing.assert_allclose(scene.bounds - np.array((0.5, 0.0, 0.0)), (low, high), atol=0.01)
    (mesh,) = scene.geometry.values()
    assert mesh.visual.material.baseColorFactor.tolist() == [0, 255, 0, 255]
    terrain = trimesh.load_scene(io.BytesIO(hills.glb), file_type="glb")
    np.testing.assert_allclose(terrain.bounds, [[-3.0, -2.0, 0.0], [3.0, 2.0, 1.0]])


def test_the_floor_is_large_and_has_the_texture_of_the_model():
    model = mujoco.MjModel.from_xml_string(MODEL.replace("TYPE", "sphere").replace("ATTRIBUTES", 'size=".2"'))
    scene = trimesh.load_scene(io.BytesIO(scene_meshes(model)[0].glb), file_type="glb")
    assert scene.bounds[1, 0] > 100.0
    (mesh,) = scene.geometry.values()
    colors = np.asarray(mesh.visual.material.baseColorTexture.convert("RGB")).reshape(-1, 3)
    assert {tuple(color) for color in colors.tolist()} == {(255, 0, 0), (0, 0, 255)}
