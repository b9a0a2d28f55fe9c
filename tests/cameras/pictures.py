"""Write the pictures of docs/cameras.md: the same scenes by both renderers and by MuJoCo's OpenGL renderer.

python -m tests.cameras.pictures docs/images
"""

import sys
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import torch
from PIL import Image

from paceline.cameras.camera import STREAMS, Camera
from paceline.cameras.gpu_renderer import GpuRenderer
from paceline.cameras.mosaic import mosaic, to_rgb
from paceline.cameras.ray_renderer import RayRenderer
from paceline.cameras.scene import bake_colors
from paceline.sim.mujoco_sim import MujocoSim
from paceline.tasks import registry
from tests.cameras.images import opengl, render
from tests.cameras.scenes import make_mesh_model, make_model

CAMERA = Camera(width=160, height=120, streams=STREAMS, far=8.0, antialias=True, mesh_detail=0.5)


def main(folder: Path) -> None:
    models = {"go1-velocity": None, "shadow-hand-repose": None, "humanoid": None, "geoms": make_model()}
    rows = []
    for name, model in models.items():
        model = model or task_model(name)
        sim = MujocoSim(model, 1)
        camera = replace(CAMERA, streams=("rgb",))
        view = model.camera(0).name
        ours = [render(kind(view, camera, sim, {}), camera, 1)["rgb"][0] for kind in (RayRenderer, GpuRenderer)]
        rows += [*ours, torch.from_numpy(opengl(model, sim, view, camera)["rgb"]).permute(2, 0, 1)]
    write(folder / "renderers.png", mosaic(torch.stack(rows), columns=3))
    sim, camera = MujocoSim(make_mesh_model(), 1), replace(CAMERA, streams=("rgb",), mesh_detail=0.0)
    smooth = replace(camera, smooth_normals=True)
    ours = [render(GpuRenderer("front", each, sim, {}), each, 1)["rgb"][0] for each in (camera, smooth)]
    theirs = torch.from_numpy(opengl(sim.model, sim, "front", camera)["rgb"]).permute(2, 0, 1)
    write(folder / "smooth_normals.png", mosaic(torch.stack((*ours, theirs)), columns=3))
    sim = MujocoSim(models["geoms"], 1)
    camera = replace(CAMERA, antialias=False)
    images = render(RayRenderer("front", camera, sim, {"ball": 1, "others": 2, "hills": 3}), camera, 1)
    write(folder / "streams.png", mosaic(torch.stack([to_rgb(images[s][0], camera.far) for s in STREAMS]), columns=3))


def task_model(task: str) -> mujoco.MjModel:
    model = registry.find(task).task().model()
    bake_colors(model)
    return model


def write(file: Path, picture: torch.Tensor) -> None:
    Image.fromarray(np.ascontiguousarray(picture.permute(1, 2, 0).numpy())).save(file)
    print(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
