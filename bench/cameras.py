"""Measure images per second of the GPU renderer against those of MuJoCo Warp and Newton on the same scenes, in one run.

    python bench/cameras.py                                                 on a GPU
    python bench/cameras.py --tasks --robot-file go1.xml                    only a robot with visual meshes
    python bench/cameras.py --device cpu --tasks go1-velocity --num-envs 2 --resolutions 64 --repeats 1 --name dry_run

All renderers draw rgb, depth and segmentation of the same geoms from the same camera, without shadows and textures,
each captured as one CUDA graph. The times of MuJoCo Warp and of Newton's SensorTiledCamera include the refit of their
bounding volumes. They draw all triangles of meshes; `mesh_detail` is that of the GPU renderer. Newton is measured if
it is installed (`pip install --no-deps newton==1.7.0`).

The table has the rates of rgb alone and of all streams with the ratio of their costs, and for each peer its rate, the
ratio, and the agreement of the images of env 0: the fraction of pixels with the same geom, the pixels that show the
robot in one image only as a fraction of the robot's pixels, and the median difference of the depth in mm.
"""

import argparse
import math
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
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
from paceline.cameras.scene import MESH, bake_colors, make_scene
from paceline.sim.warp_sim import WarpSim, on_torch_stream
from paceline.tasks import registry
from paceline.tensors.graph import capture

STREAMS: tuple[Stream, ...] = ("rgb", "depth", "segmentation")
TASKS = ("go1-velocity", "shadow-hand-repose")
Peer = tuple[float, dict[str, np.ndarray]]
"""Rate of a peer, and depth and geom indices of env 0, [row, column]."""
# Position of the camera, and the point that it looks at.
VIEW = (0.9, -0.9, 0.7), (0.0, 0.0, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=TASKS, choices=TASKS, help="tasks whose scenes are rendered")
    parser.add_argument("--robot-file", type=Path, help="MJCF file of a robot with visual meshes")
    parser.add_argument("--mesh-details", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="for the robot file")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--resolutions", type=int, nargs="+", default=[64, 128], help="width and height in pixels")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=20, help="measured calls of each renderer")
    parser.add_argument("--name", default="cameras", help="name of the file in bench/results")
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    scenes = {task: (task_model(task), [Camera().mesh_detail]) for task in args.tasks}
    if args.robot_file:
        scenes[args.robot_file.name] = (file_model(args.robot_file), args.mesh_details)
    if not scenes:
        parser.error("no scene: name --tasks or a --robot-file")
    peers = {"newton": version("newton")} if find_spec("newton") else {}
    for scene, (model, details) in scenes.items():
        for num_envs in args.num_envs:
            sim = WarpSim(model, num_envs, device)
            newton_scene = make_newton_scene(sim) if peers else None
            for size in args.resolutions:
                found = {"mujoco_warp": measure_mujoco_warp(sim, size, args.repeats)}
                if newton_scene:
                    found["newton"] = measure_newton(newton_scene, sim, size, args.repeats)
                for detail in details:
                    row = {"scene": scene, "envs": num_envs, "size": size, "mesh_detail": detail}
                    rows.append(row | measure(sim, size, detail, args.repeats, found))
                    rates.write(args.name, unit="images per second", device=args.device, peers=peers, rows=rows)
                    print(" ".join(f"{name} {rates.show(value)}" for name, value in rows[-1].items()), flush=True)
            del sim, newton_scene
    table = Table(*rows[0], title=f"cameras on {args.device}, images/s")
    for row in rows:
        table.add_row(*(rates.show(value) for value in row.values()))
    Console(width=240).print(table)


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
    """Remove textures: the benchmark draws none."""
    bake_colors(model)
    model.geom_matid[:] = -1
    return model


def measure(sim: WarpSim, size: int, detail: float, repeats: int, peers: dict[str, Peer]) -> dict[str, Any]:
    """Return the rates of rgb alone and of all streams, and the ratio and agreement with each peer."""
    rgb_only, _, _ = render(sim, size, detail, repeats, ("rgb",))
    rate, triangles, images = render(sim, size, detail, repeats, STREAMS)
    own = {"depth": images["depth"][0, 0].cpu().numpy(), "geom": images["segmentation"][0, 0].cpu().numpy()}
    row = {"rgb": rgb_only, "rate": rate, "cost/rgb": rgb_only / rate, "triangles": triangles}
    for name in ("mujoco_warp", "newton"):
        if name in peers:
            peer_rate, peer_images = peers[name]
            row |= {name: peer_rate, f"rate/{name}": rate / peer_rate, **agreement(own, peer_images, name)}
        else:
            row |= {name: "-", f"rate/{name}": "-"}
    return row


def agreement(own: dict[str, np.ndarray], peer: dict[str, np.ndarray], name: str) -> dict[str, float]:
    """Compare depth and geom indices of two renderers. Geom 0 is the ground, the others are the robot."""
    robot = peer["geom"] > 0
    both = robot & (own["geom"] >= 0)
    errors = np.abs(own["depth"] - peer["depth"])[both]
    return {
        f"{name} geoms": float((own["geom"] == peer["geom"]).mean()),
        f"{name} silhouette": float(((own["geom"] > 0) != robot).sum() / max(1, robot.sum())),
        f"{name} depth_mm": 1e3 * float(np.median(errors)) if both.any() else math.nan,
    }


def render(
    sim: WarpSim, size: int, detail: float, repeats: int, streams: tuple[Stream, ...]
) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Return the rate, the number of triangles and the images of the GPU renderer."""
    camera = Camera(width=size, height=size, streams=streams, far=100.0, depth_dtype="float32", mesh_detail=detail)
    renderer = GpuRenderer(sim.model.camera(0).name, camera, sim, {})
    images = make_images(camera, sim.num_envs, sim.device)
    due = torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device)
    replay = capture(lambda: renderer.render(images, due), sim.device, warp=True)
    rate = sim.num_envs / rates.seconds_per_call(replay, sim.device, repeats)
    return rate, len(renderer.triangles.triangles), images


def make_images(camera: Camera, num_envs: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return memory for the images of a camera by stream, [env, channel, height, width] in channels-last memory."""
    images = {}
    for stream in camera.streams:
        spec = stream_spec(camera, stream)
        image = torch.zeros(num_envs, spec.channels, camera.height, camera.width, dtype=spec.dtype, device=device)
        images[stream] = image.contiguous(memory_format=torch.channels_last)
    return images


def measure_mujoco_warp(sim: WarpSim, size: int, repeats: int) -> Peer:
    """Return the rate of MuJoCo Warp's renderer and its images of env 0."""
    with on_torch_stream(sim.device):
        context = mjw.create_render_context(
            mjm=sim.model,
            nworld=sim.num_envs,
            cam_res=[(size, size)],
            render_rgb=[True],
            render_depth=[True],
            render_seg=[True],
            use_textures=False,
            use_shadows=False,
            cam_active=[index == 0 for index in range(sim.model.ncam)],
            enabled_geom_groups=list(Camera().geom_groups),
        )

    def render() -> None:
        mjw.refit_bvh(sim.warp_model, sim.warp_data, context)
        mjw.render(sim.warp_model, sim.warp_data, context)

    rate = peer_rate(render, sim, repeats)
    depth = context.depth_data.numpy()[0].reshape(size, size)
    geom = context.seg_data.numpy()[0].reshape(size, size, 2)[..., 0]
    return rate, {"depth": depth, "geom": geom}


def make_newton_scene(sim: WarpSim) -> Any:
    """Return the model of a simulation, with the poses of its bodies, for Newton."""
    from peers.newton_camera import NewtonScene

    with on_torch_stream(sim.device):
        drawn = make_scene(sim.model, Camera(), {}).drawn
        return NewtonScene(sim.model, drawn, sim.kinematics("xpos"), sim.kinematics("xquat"))


def measure_newton(scene: Any, sim: WarpSim, size: int, repeats: int) -> Peer:
    """Return the rate of Newton's renderer and its images of env 0."""
    from peers.newton_camera import NewtonCamera

    with on_torch_stream(sim.device):
        camera = NewtonCamera(scene, size)
    return peer_rate(camera.render, sim, repeats), camera.images()


def peer_rate(render: Callable[[], None], sim: WarpSim, repeats: int) -> float:
    """Return the images per second of a renderer in Warp, captured as one graph."""

    def on_stream() -> None:
        with on_torch_stream(sim.device):
            render()

    replay = capture(on_stream, sim.device, warp=True)
    return sim.num_envs / rates.seconds_per_call(replay, sim.device, repeats)


if __name__ == "__main__":
    started = time.monotonic()
    wp.config.log_level = wp.LOG_WARNING
    main()
    print(f"{time.monotonic() - started:.0f} s")
