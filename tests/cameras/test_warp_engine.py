"""Cameras on MuJoCo Warp: poses that differ between envs, and MuJoCo Warp's renderer for scenes with too many geoms."""

from dataclasses import replace

import mujoco
import pytest
import torch
import warp as wp

from paceline.cameras.camera import Camera, add_cameras, look_at
from paceline.cameras.gpu_renderer import GpuRenderer
from paceline.cameras.mujoco_warp_renderer import MujocoWarpRenderer
from paceline.cameras.ray_renderer import RayRenderer
from paceline.cameras.scene import undrawable
from paceline.cameras.tiled_camera import TiledCamera
from paceline.env.randomization import Randomization, Randomizer
from paceline.errors import UserError
from paceline.sim.mujoco_sim import MujocoSim
from paceline.sim.simulation import Sim
from paceline.sim.warp_sim import WarpSim
from tests.cameras.images import fraction, render

MJCF = """
<mujoco>
  <asset>
    <texture type="skybox" builtin="gradient" rgb1=".4 .6 .9" rgb2="1 1 1" width="32" height="192"/>
  </asset>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>
    <light type="directional" dir="-.3 .4 -1"/>
    <geom name="floor" type="plane" size="2 2 1"/>
    <body name="ball" pos="0 0 .5">
      <joint type="slide" axis="1 0 0"/>
      <geom name="ball" size=".3" rgba=".8 .2 .2 1"/>
      <camera name="track" mode="MODE" pos="0 -2 0" xyaxes="1 0 0 0 0 1"/>
    </body>
  </worldbody>
</mujoco>
"""
POS, TARGET = (1.5, -2.0, 1.2), (0.0, 0.0, 0.3)
POSE = Camera(pos=POS, quat=look_at(POS, TARGET), fovy=50.0)
STREAMS = ("rgb", "depth", "distance", "segmentation", "classes")
CAMERA = Camera(width=48, height=32, streams=STREAMS, far=3.5, depth_dtype="float32")
FIELDS = (
    Randomization("cam_pos", -0.3, 0.3, how="add"),
    Randomization("cam_quat", -0.05, 0.05, how="add", column=2),
    Randomization("light_dir", -0.3, 0.3, how="add", column=0),
)


def make_spec(mode: str = "fixed") -> mujoco.MjSpec:
    spec = mujoco.MjSpec.from_string(MJCF.replace("MODE", mode))
    add_cameras(spec, {"front": POSE})
    return spec


def make_sims(model: mujoco.MjModel, fields: tuple[str, ...] = ()) -> tuple[MujocoSim, WarpSim]:
    """Return two envs on each engine, with the ball at another place in the second one."""
    sims = MujocoSim(model, 2, fields), WarpSim(model, 2, torch.device("cpu"), fields)
    for sim in sims:
        sim.reset(torch.tensor([True, True]), torch.tensor([[0.0], [0.4]]), torch.zeros(2, 1))
        sim.sense()
    return sims


def tiled_camera(sim: Sim, camera: Camera) -> TiledCamera:
    return TiledCamera({"front": camera}, {"ball": 3}, sim, 0, torch.arange(2), step_seconds=0.1)


def test_mujoco_warp_renders_scenes_with_too_many_geoms() -> None:
    spec = make_spec()
    for index in range(600):
        spec.worldbody.add_geom(size=[0.01, 0.01, 0.01], pos=[0.1 * (index % 30) - 1.5, 0.1 * (index // 30) - 1, 0.05])
    cpu, warp = make_sims(spec.compile())
    found = tiled_camera(warp, CAMERA)
    (message,) = found.messages
    assert "MuJoCo Warp's renderer draws it, which is much slower, because camera 'front' draws 602 geoms" in message
    found.render(torch.tensor([0, 0]), torch.tensor([0]))
    expected = render(RayRenderer("front", CAMERA, cpu, {"ball": 3}), CAMERA, 2)
    for stream, tolerance in {"rgb": 1, "depth": 1e-3, "distance": 1e-3, "segmentation": 0, "classes": 0}.items():
        difference = (found.images[f"front_{stream}"].float() - expected[stream].float()).abs()
        assert fraction(difference <= tolerance) > 0.99, stream
    due = render(MujocoWarpRenderer("front", CAMERA, warp, {}), CAMERA, 2, torch.tensor([False, True]))
    assert not due["rgb"][0].any()
    assert torch.equal(due["rgb"][1], found.images["front_rgb"][1])
    with pytest.raises(UserError, match=r"no stream 'normals': leave it out .* because camera 'front' draws 602 geoms"):
        tiled_camera(warp, replace(CAMERA, streams=("rgb", "normals")))
    with pytest.raises(UserError, match="camera 'front' draws 602 geoms, more than"):
        tiled_camera(warp, replace(CAMERA, renderer="paceline"))


def test_flexes_are_named_as_not_drawable() -> None:
    assert undrawable(make_spec().compile(), CAMERA) == ""
    cloth = '<flexcomp name="cloth" type="grid" count="3 3 1" spacing=".2 .2 .2" dim="2" mass="1"/></worldbody>'
    model = mujoco.MjModel.from_xml_string(MJCF.replace("MODE", "fixed").replace("</worldbody>", cloth))
    assert undrawable(model, CAMERA) == "the model has flexes"


def test_each_env_has_its_own_poses_of_cameras_and_lights_on_both_engines() -> None:
    for mode in ("fixed", "track", "trackcom"):
        images = []
        for sim in make_sims(make_spec(mode).compile(), ("cam_pos", "cam_quat", "light_dir")):
            Randomizer(FIELDS, sim, seed=3, env_index=torch.arange(2), step_seconds=0.1)
            sim.sense()
            for name in ("front", "track"):
                images.append(render(GpuRenderer(name, CAMERA, sim, {"ball": 3}), CAMERA, 2))
        front, track, other_front, other_track = images
        for one, other in ((front, other_front), (track, other_track)):
            assert fraction((one["rgb"].int() - other["rgb"].int()).abs() <= 1) > 0.99
            assert fraction((one["depth"] - other["depth"]).abs() < 1e-3) > 0.99
            assert not torch.equal(one["depth"][0], one["depth"][1])


def test_constants_are_computed_only_for_cameras_that_track_a_body() -> None:
    for mode, changes in (("fixed", False), ("targetbody", False), ("track", True)):
        spec = make_spec()
        spec.camera("track").mode = getattr(mujoco.mjtCamLight, f"mjCAMLIGHT_{mode.upper()}")
        spec.camera("track").targetbody = "ball"
        sim = WarpSim(spec.compile(), 2, torch.device("cpu"), ("cam_pos",))
        before = wp.to_torch(sim.warp_model.cam_pos0).clone()
        Randomizer(FIELDS[:1], sim, seed=3, env_index=torch.arange(2), step_seconds=0.1)
        assert torch.equal(wp.to_torch(sim.warp_model.cam_pos0), before) != changes
