"""Measure images per second and core of the CPU renderer against MuJoCo's OpenGL renderer, in one run.

    python bench/cameras_cpu.py                                     writes bench/results/cameras_cpu.json
    python bench/cameras_cpu.py --num-envs 4 --rounds 1 --name dry_run

The process runs on one core, and a rate is the number of images per second of its CPU time, so that other processes
change it little. OpenGL is Mesa's software driver, unless the machine has a GPU with EGL. Both renderers draw the same
scenes at 64x64 pixels, without shadows, textures and multisampling. OpenGL needs one pass per stream. The CPU renderer
renders geoms that cannot move once. The two renderers are measured in turns; the table has the medians.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mujoco
import numpy as np
import rates
import torch
from OpenGL import GL
from rich.console import Console
from rich.table import Table

from cameras import STREAMS, make_images, task_model
from paceline.cameras.camera import Camera, Stream
from paceline.cameras.ray_renderer import RayRenderer
from paceline.device.cpu import tune_torch
from paceline.sim.mujoco_sim import MujocoSim
from paceline.view.opengl import choose_opengl_library

TASKS = ("cartpole-camera", "go1-velocity")
STREAM_SETS: tuple[tuple[Stream, ...], ...] = (("rgb",), STREAMS)
SIZE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64, help="images per call of the CPU renderer")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each renderer")
    parser.add_argument("--name", default="cameras_cpu", help="name of the file in bench/results")
    args = parser.parse_args()
    choose_opengl_library()
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    tune_torch(torch.device("cpu"))
    rows, driver = [], ""
    for task in TASKS:
        model = task_model(task)
        model.vis.quality.offsamples = 0
        for streams in STREAM_SETS:
            row, driver = measure(model, streams, args.num_envs, args.rounds)
            rows.append({"scene": task, "streams": "+".join(streams), **row})
    rates.write(args.name, unit="images per second of CPU time", size=SIZE, opengl=driver, rows=rows)
    table = Table(*rows[-1], title=f"{SIZE}x{SIZE} images per second on one core; OpenGL is {driver}")
    for row in rows:
        table.add_row(*map(rates.show, row.values()))
    Console(width=140).print(table)


def measure(
    model: mujoco.MjModel, streams: tuple[Stream, ...], num_envs: int, rounds: int
) -> tuple[dict[str, Any], str]:
    """Return the rates of both renderers, and the name of OpenGL's driver."""
    camera = Camera(width=SIZE, height=SIZE, streams=streams, far=100.0, depth_dtype="float32")
    renderer = RayRenderer(model.camera(0).name, camera, MujocoSim(model, num_envs, threads=1), {})
    images, due = make_images(camera, num_envs, torch.device("cpu")), torch.ones(num_envs, dtype=torch.bool)
    data, option = mujoco.MjData(model), mujoco.MjvOption()
    mujoco.mj_forward(model, data)
    option.geomgroup[:] = np.isin(np.arange(len(option.geomgroup)), camera.geom_groups)
    for hidden in ("sitegroup", "jointgroup", "tendongroup", "actuatorgroup"):
        getattr(option, hidden)[:] = 0
    with mujoco.Renderer(model, SIZE, SIZE) as opengl:

        def render_env() -> np.ndarray:
            opengl.update_scene(data, 0, option)
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                opengl.scene.flags[flag] = 0
            image = opengl.render()
            if "depth" in streams:
                opengl.enable_depth_rendering()
                image = opengl.render()
                opengl.disable_depth_rendering()
            if "segmentation" in streams:
                opengl.enable_segmentation_rendering()
                image = opengl.render()
                opengl.disable_segmentation_rendering()
            return image

        works: dict[str, Callable[[], object]] = {
            "paceline": lambda: renderer.render(images, due),
            "opengl": lambda: [render_env() for _ in range(num_envs)],
        }
        seconds = {name: [] for name in works}
        # The first round warms up.
        for _ in range(1 + rounds):
            for name, work in works.items():
                seconds[name].append(cpu_seconds(work))
        driver = bytes(GL.glGetString(GL.GL_RENDERER) or b"").decode()
        row = {name: num_envs / median(measured[1:]) for name, measured in seconds.items()}
        row["paceline/opengl"] = row["paceline"] / row["opengl"]
        if "segmentation" in streams:
            # Fraction of the pixels.
            row["same geoms"] = float((render_env()[..., 0] == images["segmentation"][0, 0].numpy()).mean())
    return row, driver


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of a call, of all threads of the process."""
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
