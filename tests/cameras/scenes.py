"""A scene with every kind of geom, light and texture that the renderers draw, and a scene of meshes."""

import mujoco
import numpy as np

from paceline.cameras.camera import Camera, add_cameras, look_at
from paceline.cameras.scene import bake_colors

POS, TARGET = (2.2, -2.6, 1.9), (0.0, 0.0, 0.3)

_MESH_VERTICES = "0 0 .5  .35 0 0  0 .35 0  -.35 0 0  0 -.35 0  0 0 -.5"

MJCF = f"""
<mujoco>
  <visual><headlight ambient=".2 .2 .2" diffuse=".3 .3 .3" specular=".2 .2 .2"/></visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".4 .6 .9" rgb2="1 1 1" width="32" height="192"/>
    <texture name="checker" type="2d" builtin="checker" rgb1=".9 .9 .9" rgb2=".3 .4 .5" width="64" height="64"/>
    <texture name="faces" type="cube" builtin="gradient" rgb1="1 .2 .1" rgb2=".1 .2 1" width="32" height="192"/>
    <material name="checker" texture="checker" texrepeat="2 3"/>
    <material name="uniform" texture="checker" texuniform="true" texrepeat="2 2"/>
    <material name="faces" texture="faces"/>
    <material name="shiny" specular=".9" shininess=".8" emission=".1" rgba=".2 .7 .3 1"/>
    <mesh name="octahedron" vertex="{_MESH_VERTICES}"/>
    <hfield name="hills" nrow="9" ncol="9" size=".7 .5 .3 .1"/>
  </asset>
  <worldbody>
    <light type="directional" dir="-.3 .4 -1" diffuse=".5 .5 .5" specular=".2 .2 .2"/>
    <light type="spot" pos="-1 -1 3" dir=".3 .3 -1" cutoff="30" exponent="5" diffuse=".6 .5 .4"/>
    <light type="point" pos="2 1 2" diffuse=".3 .3 .5" attenuation=".5 .2 .1"/>
    <geom name="floor" type="plane" size="0 0 1" material="uniform"/>
    <geom name="plate" type="plane" pos="-1 1.2 .2" size=".5 .6 1" euler="0 20 0" material="checker"/>
    <geom name="hills" type="hfield" hfield="hills" pos="1.1 1.1 .1" material="checker"/>
    <body name="ball" pos="-.6 -.4 .5"><freejoint/><geom name="ball" size=".3" material="shiny"/></body>
    <body name="others">
      <geom name="egg" type="ellipsoid" pos=".5 -.6 .4" size=".3 .15 .2" euler="20 30 10" rgba=".8 .3 .6 1"/>
      <geom name="pill" type="capsule" pos="-.1 .7 .5" size=".12 .3" euler="40 0 20" rgba=".9 .6 .2 1"/>
      <geom name="can" type="cylinder" pos=".9 .3 .5" size=".2 .25" euler="30 10 0" rgba=".3 .8 .8 1"/>
      <geom name="cube" type="box" pos="0 0 .35" size=".2 .25 .15" euler="0 0 30" material="faces"/>
      <geom name="gem" type="mesh" mesh="octahedron" pos="-1 .3 .7" euler="15 0 25" rgba=".6 .2 .8 1"/>
      <geom name="ghost" type="sphere" pos=".3 -1 1" size=".3" group="3"/>
    </body>
  </worldbody>
</mujoco>
"""

MESH_MJCF = """
<mujoco>
  <asset>
    <mesh name="ball" builtin="sphere" params="3"/>
    <mesh name="cube" vertex="0 0 0  .4 0 0  0 .4 0  .4 .4 0  0 0 .4  .4 0 .4  0 .4 .4  .4 .4 .4"/>
  </asset>
  <worldbody>
    <light type="directional" dir="-.3 .4 -1" diffuse=".5 .5 .5" specular=".2 .2 .2"/>
    <body pos="0 0 .6" euler="10 20 30">
      <freejoint/>
      <geom name="ball" type="mesh" mesh="ball" rgba=".8 .3 .3 1"/>
      <geom name="cube" type="mesh" mesh="cube" pos="1.3 0 0" euler="10 20 30"/>
    </body>
  </worldbody>
</mujoco>
"""


def make_model(camera: Camera | None = None) -> mujoco.MjModel:
    """Return the model with a camera "front"."""
    spec = mujoco.MjSpec.from_string(MJCF)
    hills = spec.hfield("hills")
    hills.userdata = np.abs(np.sin(np.arange(81) * 0.7)).tolist()
    pose = Camera(pos=POS, quat=look_at(POS, TARGET), fovy=40.0)
    add_cameras(spec, {"front": camera or pose})
    model = spec.compile()
    bake_colors(model)
    return model


def make_mesh_model() -> mujoco.MjModel:
    """Return a round and a sharp mesh, seen by a camera "front"."""
    spec, pos = mujoco.MjSpec.from_string(MESH_MJCF), (2.0, -3.2, 1.2)
    add_cameras(spec, {"front": Camera(pos=pos, quat=look_at(pos, (0.4, 0.0, 0.6)), fovy=40.0)})
    model = spec.compile()
    bake_colors(model)
    return model
