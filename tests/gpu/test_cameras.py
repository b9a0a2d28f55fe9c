"""Renderers on a GPU, as part of a CUDA graph, agree with the CPU renderer. Run with pytest -m gpu."""

from dataclasses import replace

import pytest
import torch

from paceline.cameras.camera import Camera, stream_spec
from paceline.cameras.gpu_renderer import GpuRenderer
from paceline.cameras.mujoco_warp_renderer import MujocoWarpRenderer
from paceline.cameras.ray_renderer import RayRenderer
from paceline.sim.mujoco_sim import MujocoSim
from paceline.sim.warp_sim import WarpSim
from paceline.tensors.graph import capture
from tests.cameras.images import fraction, render
from tests.cameras.scenes import make_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
STREAMS = ("rgb", "depth", "distance", "segmentation", "classes")
CAMERA = Camera(width=96, height=72, streams=STREAMS, far=8.0, depth_dtype="float32", mesh_detail=0.0)


@pytest.mark.parametrize(
    ("kind", "smooth"), [(GpuRenderer, False), (GpuRenderer, True), (MujocoWarpRenderer, False)], ids=str
)
def test_captured_images_agree_with_the_cpu_renderer(
    kind: type[GpuRenderer] | type[MujocoWarpRenderer], smooth: bool
) -> None:
    camera, classes = replace(CAMERA, smooth_normals=smooth), {"ball": 1, "others": 7}
    cpu, gpu = MujocoSim(make_model(), 2), WarpSim(make_model(), 2, CUDA)
    renderer, images = kind("front", camera, gpu, classes), {}
    for stream in STREAMS:
        spec = stream_spec(camera, stream)
        image = torch.zeros(2, spec.channels, camera.height, camera.width, dtype=spec.dtype, device=CUDA)
        images[stream] = image.contiguous(memory_format=torch.channels_last)
    due = torch.ones(2, dtype=torch.bool, device=CUDA)
    replay = capture(lambda: renderer.render(images, due), CUDA, warp=True)
    for _ in range(2):
        replay()
    # The replay draws where the ball of the second env is now.
    for sim in (cpu, gpu):
        offset = torch.tensor([0.4, 0.2, 0.3, 0, 0, 0, 0], device=sim.device)
        sim.reset(torch.tensor([False, True], device=sim.device), sim.qpos + offset, sim.qvel)
        sim.sense()
    replay()
    expected = render(RayRenderer("front", camera, cpu, classes), camera, 2)
    # MuJoCo Warp's renderer does not draw the sides of heightfields.
    agreement = 0.99 if kind is GpuRenderer else 0.97
    for stream, tolerance in {"depth": 0.005, "distance": 0.005, "segmentation": 0, "classes": 0}.items():
        difference = (images[stream].cpu().float() - expected[stream].float()).abs()
        assert fraction(difference <= tolerance) > agreement, stream
    if kind is GpuRenderer:
        assert fraction((images["rgb"].cpu().int() - expected["rgb"].int()).abs() <= 1) > 0.99
