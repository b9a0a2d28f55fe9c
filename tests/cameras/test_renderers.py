"""The CPU renderer agrees with MuJoCo's OpenGL renderer, and the kernel of the GPU renderer, run on the CPU, with the
CPU renderer."""

from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch

from paceline.cameras.camera import Camera, add_cameras, look_at
from paceline.cameras.gpu_renderer import GpuRenderer
from paceline.cameras.ray_renderer import RayRenderer
from paceline.cameras.scene import bake_colors
from paceline.errors import UserError
from paceline.sim.mujoco_sim import MujocoSim
from paceline.tasks import registry
from tests.cameras.images import fraction, opengl, render, similarity
from tests.cameras.scenes import MJCF, POS, TARGET, make_model

STREAMS = ("rgb", "depth", "distance", "segmentation", "classes", "normals")
CAMERA = Camera(width=96, height=72, streams=STREAMS, far=30.0, depth_dtype="float32", mesh_detail=0.0)


SCENES = ("cartpole", "reach", "ant", "humanoid", "go1-velocity", "g1-velocity", "shadow-hand-repose")


# Rays take long in a heightfield.
@pytest.mark.parametrize(("task", "size"), [*((task, 128) for task in SCENES), ("go1-velocity-rough", 48)])
def test_cpu_images_agree_with_opengl(task: str, size: int) -> None:
    model = registry.find(task).task().model()
    bake_colors(model)
    sim, name = MujocoSim(model, 1), model.camera(0).name
    camera = replace(CAMERA, width=size, height=size, streams=("rgb", "depth", "segmentation"))
    ours, theirs = render(RayRenderer(name, camera, sim, {}), camera, 1), opengl(model, sim, name, camera)
    geom, depth = ours["segmentation"][0, 0].numpy(), ours["depth"][0, 0].numpy()
    # OpenGL draws infinite planes up to some distance only.
    both = (geom >= 0) & (theirs["geom"] >= 0) & (theirs["depth"] < camera.far)
    assert fraction(np.abs(depth - theirs["depth"])[both] < 0.005) > 0.99
    assert fraction(geom[both] == theirs["geom"][both]) > 0.99
    assert similarity(ours["rgb"][0].permute(1, 2, 0).numpy(), theirs["rgb"]) > 0.9


@pytest.mark.parametrize(
    ("task", "mesh_detail"), [*((task, 0.0) for task in (*SCENES, "go1-velocity-rough")), ("shadow-hand-repose", 0.5)]
)
def test_kernel_draws_the_scenes_of_tasks_as_the_cpu_renderer(task: str, mesh_detail: float) -> None:
    model = registry.find(task).task().model()
    sim, name = MujocoSim(model, 1), model.camera(0).name
    camera = replace(CAMERA, streams=("rgb", "depth", "segmentation"), mesh_detail=mesh_detail)
    one, other = (render(kind(name, camera, sim, {}), camera, 1) for kind in (RayRenderer, GpuRenderer))
    assert fraction((one["depth"] - other["depth"]).abs() < 0.005) > 0.99
    assert fraction(one["segmentation"] == other["segmentation"]) > (0.98 if mesh_detail else 0.99)
    assert similarity(*(each["rgb"][0].permute(1, 2, 0).numpy() for each in (one, other))) > 0.9


@pytest.mark.parametrize("antialias", [False, True])
def test_kernel_draws_all_geoms_lights_and_textures_as_the_cpu_renderer(antialias: bool) -> None:
    camera = replace(CAMERA, antialias=antialias)
    sim, classes = MujocoSim(make_model(), 2), {"ball": 1, "others": 7}
    # The ball of the second env is elsewhere.
    sim.reset(torch.tensor([False, True]), sim.qpos + torch.tensor([0.4, 0.2, 0.3, 0, 0, 0, 0]), sim.qvel)
    sim.sense()
    one, other = (render(kind("front", camera, sim, classes), camera, 2) for kind in (RayRenderer, GpuRenderer))
    assert fraction(one["segmentation"] == other["segmentation"]) > 0.999
    assert fraction(one["classes"] == other["classes"]) > 0.999
    for stream in ("depth", "distance"):
        assert fraction((one[stream] - other[stream]).abs() < 0.005) > 0.999
    assert fraction((one["normals"] - other["normals"]).abs() < 0.01) > 0.998
    assert fraction((one["rgb"].int() - other["rgb"].int()).abs() <= 1) > 0.999
    drawn = set(one["segmentation"].unique().tolist())
    names = {sim.model.geom(geom).name for geom in drawn if geom >= 0}
    assert names == {"floor", "plate", "hills", "ball", "egg", "pill", "can", "cube", "gem"}
    assert set(one["classes"].unique().tolist()) == {0, 1, 7}
    assert not torch.equal(one["rgb"][0], one["rgb"][1])


def test_geoms_without_textures_have_the_color_of_their_material() -> None:
    sim = MujocoSim(make_model(), 1)
    camera = replace(CAMERA, streams=("rgb", "segmentation"), textures=False)
    textured = render(RayRenderer("front", replace(camera, textures=True), sim, {}), camera, 1)["rgb"]
    one, other = (render(kind("front", camera, sim, {}), camera, 1) for kind in (RayRenderer, GpuRenderer))
    assert fraction((one["rgb"].int() - other["rgb"].int()).abs() <= 1) > 0.999
    names = [sim.model.geom(geom).name if geom >= 0 else "" for geom in one["segmentation"].flatten().tolist()]
    has_texture = torch.tensor([name in ("floor", "plate", "hills", "cube") for name in names]).view(72, 96)
    changed = (one["rgb"] != textured)[0].any(0)
    assert fraction(changed[has_texture]) > 0.9
    assert not changed[~has_texture].any()


def test_shadows_darken_only_what_the_lights_do_not_reach() -> None:
    sim = MujocoSim(make_model(), 1)
    plain, shadows = replace(CAMERA, streams=("rgb",)), replace(CAMERA, streams=("rgb",), shadows=True)
    lit = render(RayRenderer("front", plain, sim, {}), plain, 1)["rgb"].int()
    dark = {
        kind: render(kind("front", shadows, sim, {}), shadows, 1)["rgb"].int() for kind in (RayRenderer, GpuRenderer)
    }
    for image in dark.values():
        assert (image <= lit + 1).all()
        assert 0.02 < fraction(image < lit - 1) < 0.6
    # Only primitives cast shadows in the kernel.
    assert fraction((dark[RayRenderer] - dark[GpuRenderer]).abs() <= 1) > 0.95


def test_a_miss_has_the_largest_depth_and_no_geom() -> None:
    up = Camera(pos=(0.0, 0.0, 5.0), quat=(0.0, 1.0, 0.0, 0.0), fovy=40.0)
    camera = replace(CAMERA, far=7.0, depth_dtype="float16")
    sim = MujocoSim(make_model(up), 1)
    for kind in (RayRenderer, GpuRenderer):
        images = render(kind("front", camera, sim, {"ball": 3}), camera, 1)
        expected = {"depth": 7.0, "distance": 7.0, "segmentation": -1, "classes": 0, "normals": 0}
        assert all((images[stream] == value).all() for stream, value in expected.items())
        # The sky, a gradient.
        assert images["rgb"].float().std() > 0.0
        types = torch.uint8, torch.float16, torch.float16, torch.int32, torch.uint8, torch.float16
        assert tuple(image.dtype for image in images.values()) == types


def test_only_due_envs_are_rendered() -> None:
    sim, due = MujocoSim(make_model(), 3), torch.tensor([True, False, True])
    for kind in (RayRenderer, GpuRenderer):
        rgb = render(kind("front", CAMERA, sim, {}), CAMERA, 3, due)["rgb"]
        assert (rgb[1] == 0).all()
        assert torch.equal(rgb[0], rgb[2])
        assert rgb[0].any()


def test_geoms_nearer_than_the_near_plane_are_not_drawn() -> None:
    inside = Camera(pos=(-0.6, -0.4, 0.5), quat=(1.0, 0.0, 0.0, 0.0), fovy=90.0)
    sim = MujocoSim(make_model(inside), 1)
    for kind in (RayRenderer, GpuRenderer):
        images = render(kind("front", CAMERA, sim, {}), CAMERA, 1)
        # The camera is inside the ball and looks down at the floor.
        assert sim.model.geom("ball").id not in images["segmentation"]
        assert fraction(images["segmentation"] == sim.model.geom("floor").id) > 0.5


def test_field_of_view_and_colors_may_differ_between_envs() -> None:
    sim = MujocoSim(make_model(), 2, per_env_fields=("cam_fovy", "geom_rgba", "light_diffuse", "cam_pos"))
    ball = sim.model.geom("ball").id
    sim.field("cam_fovy")[1] = 60.0
    sim.field("geom_rgba")[1, ball, :3] = torch.tensor([1.0, 0.0, 0.0])
    sim.field("light_diffuse")[1] *= 0.5
    sim.field("cam_pos")[1, :, 2] += 0.5
    sim.refresh_constants()
    sim.sense()
    one, other = (render(kind("front", CAMERA, sim, {}), CAMERA, 2) for kind in (RayRenderer, GpuRenderer))
    for stream in ("segmentation", "depth", "rgb"):
        assert not torch.equal(one[stream][0], one[stream][1])
        assert fraction((one[stream].float() - other[stream].float()).abs() <= 1) > 0.998
    red = one["rgb"][1].permute(1, 2, 0)[one["segmentation"][1, 0] == ball].float().mean(0)
    assert red[0] > 4.0 * red[1]


def test_unknown_class_pattern_is_refused() -> None:
    sim = MujocoSim(make_model(), 1)
    with pytest.raises(UserError, match="no geom or body matches 'bal' of class 1"):
        RayRenderer("front", CAMERA, sim, {"bal": 1})


def test_a_background_that_is_rendered_once_gives_the_same_images() -> None:
    sim = MujocoSim(make_model(), 2)
    sim.reset(torch.tensor([False, True]), sim.qpos + torch.tensor([0.8, 0.6, 0.0, 0, 0, 0, 0]), sim.qvel)
    sim.sense()
    once, again = (render(RayRenderer("front", CAMERA, sim, {}, background=each), CAMERA, 2) for each in (True, False))
    assert all(torch.equal(once[stream], again[stream]) for stream in STREAMS)


def test_many_geoms_beside_meshes_are_drawn_in_smaller_tiles() -> None:
    spec = mujoco.MjSpec.from_string(MJCF)
    spec.hfield("hills").userdata = np.abs(np.sin(np.arange(81) * 0.7)).tolist()
    add_cameras(spec, {"front": Camera(pos=POS, quat=look_at(POS, TARGET), fovy=40.0)})
    for index in range(300):
        spec.worldbody.add_geom(size=[0.03, 0, 0], pos=[0.2 * (index % 20) - 2, 0.2 * (index // 20) - 1.5, 0.05])
    sim, camera = MujocoSim(spec.compile(), 1), replace(CAMERA, streams=("segmentation", "depth"))
    one, other = (render(kind("front", camera, sim, {}), camera, 1) for kind in (RayRenderer, GpuRenderer))
    assert fraction(one["segmentation"] == other["segmentation"]) > 0.999
    assert fraction((one["depth"] - other["depth"]).abs() < 0.005) > 0.999
    assert len(one["segmentation"].unique()) > 100


def test_more_geoms_than_fit_into_shared_memory_are_refused() -> None:
    spec = mujoco.MjSpec()
    spec.worldbody.add_camera(name="front")
    for index in range(600):
        spec.worldbody.add_geom(size=[0.01, 0.01, 0.01], pos=[index, 0, 0])
    body = spec.worldbody.add_body()
    body.add_joint()
    body.add_geom(size=[0.1, 0.1, 0.1])
    sim = MujocoSim(spec.compile(), 1)
    with pytest.raises(UserError, match="camera 'front' draws 601 geoms, more than 533: choose fewer geom_groups"):
        GpuRenderer("front", CAMERA, sim, {})


def test_a_mocap_body_is_drawn_where_it_is() -> None:
    spec = mujoco.MjSpec()
    spec.worldbody.add_camera(name="front", pos=[0, 0, 3])
    spec.worldbody.add_body(name="goal", mocap=True).add_geom(size=[0.3, 0.3, 0.3])
    body = spec.worldbody.add_body(pos=[5, 5, 0])
    body.add_joint()
    body.add_geom(size=[0.1, 0.1, 0.1])
    sim = MujocoSim(spec.compile(), 1)
    camera = replace(CAMERA, streams=("segmentation",))
    renderers = [kind("front", camera, sim, {}) for kind in (RayRenderer, GpuRenderer)]
    for offset in (0.0, 0.6):
        sim.mocap_pos[:, 0, 0] = offset
        sim.sense()
        one, other = (render(renderer, camera, 1)["segmentation"][0, 0] == 0 for renderer in renderers)
        assert torch.equal(one, other)
        columns = one.any(0).nonzero().float()
        assert abs(float(columns.mean()) - (47.5 + offset / 3.0 * 36 / np.tan(np.radians(22.5)))) < 3.0
