"""Measure images per second of the GPU renderer against MuJoCo Warp's renderer on the same scene, in one run.

    python bench/cameras.py                                                 on a GPU
    python bench/cameras.py --robot-file go1.xml                            also a robot with visual meshes
    python bench/cameras.py --device cpu --num-envs 2 --resolutions 64      a dry run without a GPU

Both renderers draw rgb, depth and segmentation from the same camera, without shadows and textures, each captured as
one CUDA graph. MuJoCo Warp's time includes the refit of its bounding volumes. The table also shows the
agreement of the images.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import rates
import torch
import warp as wp
from rich.console import Console
from rich.table import Table

from paceline.cameras.camera import Camera, Stream, add_cameras, look_at, stream_spec
from paceline.cameras.gpu_renderer import GpuRenderer
from paceline.cameras.scene import MESH, bake_colors
from paceline.sim.warp_sim import WarpSim, on_torch_stream
from paceline.tasks import registry
from paceline.tensors.graph import capture

STREAMS: tuple[Stream, ...] = ("rgb", "depth", "segmentation")
TASKS = ("go1-velocity", "shadow-hand-repose")
# Position of the camera, and the point that it looks at.
VIEW = (0.9, -0.9, 0.7), (0.0, 0.0, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=TASKS, choices=TASKS)
    parser.add_argument("--robot-file", type=Path, help="MJCF file of a robot with visual meshes")
    parser.add_argument("--mesh-details", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--resolutions", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--name", default="cameras", help="name of the file in bench/results")
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    scenes = {task: (task_model(task), [Camera().mesh_detail]) for task in args.tasks}
    if args.robot_file:
        scenes[args.robot_file.name] = (file_model(args.robot_file), args.mesh_details)
    for scene, (model, details) in scenes.items():
        for num_envs in args.num_envs:
            sim = WarpSim(model, num_envs, device)
            for size in args.resolutions:
                peer_rate, peer_images = measure_mujoco_warp(model, sim, size, args.repeats)
                for detail in details:
                    row = {"scene": scene, "envs": num_envs, "size": size, "mesh_detail": detail}
                    row |= measure(sim, size, detail, args.repeats, peer_images)
                    rows.append(row | {"mujoco_warp": peer_rate, "ratio": row["rgb+depth+segmentation"] / peer_rate})
                    rates.write(args.name, unit="images per second", device=args.device, rows=rows)
                    print(" ".join(f"{name} {rates.show(value)}" for name, value in rows[-1].items()), flush=True)
            del sim
    table = Table(*rows[0], title=f"cameras on {args.device}, images/s")
    for row in rows:
        table.add_row(*(rates.show(value) for value in row.values()))
    Console(width=200).print(table)


def task_model(task: str) -> mujoco.MjModel:
    """Return the model of a task, seen from its first camera. The view of Go1 does not follow the robot."""
    model = registry.find(task).task().model()
    if task == "go1-velocity":
        model.cam_pos[0], model.cam_quat[0], model.cam_fovy[0] = VIEW[0], look_at(*VIEW), 45.0
        model.cam_bodyid[0], model.cam_mode[0] = 0, mujoco.mjtCamLight.mjCAMLIGHT_FIXED
    return plain(model)


def file_model(file: Path) -> mujoco.MjModel:
    """Return a robot of a file on a plane, with its visual meshes only, seen from its first camera."""
    spec = mujoco.MjSpec.from_file(str(file))
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=[5, 5, 0.1])
    spec.worldbody.add_light(pos=[0, 0, 3], dir=[0, 0, -1])
    for camera in spec.cameras:
        spec.delete(camera)
    add_cameras(spec, {"view": Camera(pos=VIEW[0], quat=look_at(*VIEW), fovy=45.0)})
    model = spec.compile()
    shown = {int(model.geom_group[geom]) for geom in range(model.ngeom) if model.geom_type[geom] == MESH}
    model.geom_group[:] = np.where(np.isin(model.geom_group, list(shown)) | (model.geom_type == 0), 0, 5)
    return plain(model)


def plain(model: mujoco.MjModel) -> mujoco.MjModel:
    """Remove textures: the benchmark draws none with either renderer."""
    bake_colors(model)
    model.geom_matid[:] = -1
    return model


def measure(sim: WarpSim, size: int, detail: float, repeats: int, peer: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the rates of rgb alone and of all streams, and the agreement of the images of env 0 with the peer's."""
    rgb_only, _, _ = render(sim, size, detail, repeats, ("rgb",))
    every, triangles, images = render(sim, size, detail, repeats, STREAMS)
    depth, geom = images["depth"][0, 0].cpu().numpy(), images["segmentation"][0, 0].cpu().numpy()
    robot = peer["geom"] > 0
    both = robot & (geom >= 0)
    return {
        "rgb": rgb_only,
        "+".join(STREAMS): every,
        "triangles": triangles,
        "segmentation": float((geom == peer["geom"]).mean()),
        # Pixels that show the robot in one image only, as a fraction of the robot's pixels.
        "silhouette": float(((geom > 0) != robot).sum() / max(1, robot.sum())),
        "depth_mm": 1e3 * float(np.median(np.abs(depth - peer["depth"])[both])) if both.any() else math.nan,
    }


def render(
    sim: WarpSim, size: int, detail: float, repeats: int, streams: tuple[Stream, ...]
) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Return the rate, the number of triangles and the images of the GPU renderer."""
    camera = Camera(width=size, height=size, streams=streams, far=100.0, depth_dtype="float32", mesh_detail=detail)
    renderer, images = GpuRenderer(sim.model.camera(0).name, camera, sim, {}), {}
    for stream in streams:
        spec = stream_spec(camera, stream)
        image = torch.zeros(sim.num_envs, spec.channels, size, size, dtype=spec.dtype, device=sim.device)
        images[stream] = image.contiguous(memory_format=torch.channels_last)
    due = torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device)
    replay = capture(lambda: renderer.render(images, due), sim.device, warp=True)
    rate = sim.num_envs / rates.seconds_per_call(replay, sim.device, repeats)
    return rate, len(renderer.triangles.triangles), images


def measure_mujoco_warp(
    model: mujoco.MjModel, sim: WarpSim, size: int, repeats: int
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the rate of MuJoCo Warp's renderer and its images of env 0."""
    with on_torch_stream(sim.device):
        context = mjw.create_render_context(
            mjm=model,
            nworld=sim.num_envs,
            cam_res=[(size, size)],
            render_rgb=[True],
            render_depth=[True],
            render_seg=[True],
            use_textures=False,
            use_shadows=False,
            cam_active=[index == 0 for index in range(model.ncam)],
            enabled_geom_groups=list(Camera().geom_groups),
        )

    def render() -> None:
        with on_torch_stream(sim.device):
            mjw.refit_bvh(sim.warp_model, sim.warp_data, context)
            mjw.render(sim.warp_model, sim.warp_data, context)

    replay: Callable[[], None] = capture(render, sim.device, warp=True)
    rate = sim.num_envs / rates.seconds_per_call(replay, sim.device, repeats)
    depth = context.depth_data.numpy()[0].reshape(size, size)
    geom = context.seg_data.numpy()[0].reshape(size, size, 2)[..., 0]
    return rate, {"depth": depth, "geom": geom}


if __name__ == "__main__":
    started = time.monotonic()
    wp.config.log_level = wp.LOG_WARNING
    main()
    print(f"{time.monotonic() - started:.0f} s")
