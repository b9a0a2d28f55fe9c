"""Measure frames per second of training from images: env steps alone, with inference, and with training, in one run.

    python bench/camera_training.py --peer PYTHON                   on a GPU; PYTHON has mjlab
    python bench/camera_training.py --device cpu --num-envs 8 --iterations 1 --name dry_run

A frame is one env step, which renders one image. The task is cartpole-camera (100x100 rgb, two stacked frames) with its
own settings and native PPO. Stepping takes random actions, with the steps of a rollout as one CUDA graph, as in
training. The fraction of rendering is the time of the renderer alone, captured as a graph, for all steps of a rollout
over the time of an iteration.

mjlab has no such task. Its camera task is an arm that lifts a cube, seen by a wrist camera with 32x32 rgb; it runs with
its own settings. Isaac Lab's rates are those of its documentation for the camera cartpole, on another GPU.
"""

import argparse
from dataclasses import asdict
from typing import Any

import rates
import torch
from rich.console import Console
from rich.table import Table

from paceline.cameras.tiled_camera import TiledCamera
from paceline.device.cpu import tune_torch
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole_camera import ENTRY
from paceline.tensors.graph import capture

MJLAB_TASK = "Mjlab-Lift-Cube-Yam-Rgb"
PUBLISHED = {
    "name": "Isaac Lab, camera cartpole, as published",
    "device": "RTX 4090",
    "image": "100x100 rgb",
    "num_envs": 1024,
    "stepping": 50e3,
    "inference": 45e3,
    "training": 32e3,
}
KINDS = ("stepping", "inference", "training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=ENTRY.gpu_envs)
    parser.add_argument("--iterations", type=int, default=20, help="measured iterations, after four to warm up")
    parser.add_argument("--peer-iterations", type=int, default=5, help="measured iterations of mjlab")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peer", help="Python interpreter with mjlab; omit to skip the peer")
    parser.add_argument("--name", default="camera_training", help="name of the file in bench/results")
    args = parser.parse_args()
    ppo = PpoSettings.from_training(ENTRY.training)
    own, rendering = measure(args.num_envs, ppo, torch.device(args.device), args.iterations)
    figures = {"unit": "frames per second", "ppo": asdict(ppo), "rendering": rendering, "peers": {}}
    figures["rows"] = rows = [own]
    if args.peer:
        # An interrupted run keeps its measurements.
        rates.write(args.name, **figures)
        peer, figures["peers"] = measure_mjlab(args.peer, args.num_envs, args.device, args.peer_iterations)
        own |= {f"{kind}/mjlab": own[kind] / peer[kind] for kind in KINDS}
        rows.append(peer)
    rows.append(PUBLISHED)
    rates.write(args.name, **figures)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title="frames/s")
    for row in rows:
        table.add_row(*(rates.show(row.get(name, "-")) for name in columns))
    Console(width=180).print(table)
    print(f"rendering: {rendering['milliseconds']:.3f} ms per step, {rendering['fraction']:.1%} of an iteration")


def measure(
    num_envs: int, ppo: PpoSettings, device: torch.device, iterations: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the rates of cartpole-camera, and the time of rendering."""
    tune_torch(device)
    task = ENTRY.task()
    env = RobotEnv(task, num_envs, "auto", device)
    found = rates.learning(Ppo(env, ppo, seed=0), num_envs * ppo.horizon, 4 + iterations).rates(rates.WARM)
    repeats = max(2, iterations)
    camera = task.camera
    row = {
        "name": "Paceline, cartpole-camera",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "image": f"{camera.width}x{camera.height} {' '.join(camera.streams)}",
        "num_envs": num_envs,
        "stepping": stepping_rate(env, ppo.horizon, repeats),
        "inference": found["collect"],
        "training": found["train"],
    }
    seconds = seconds_of_rendering(env, repeats)
    iteration = num_envs * ppo.horizon / found["train"]
    return row, {"milliseconds": 1e3 * seconds, "fraction": seconds * ppo.horizon / iteration}


def stepping_rate(env: RobotEnv, horizon: int, repeats: int) -> float:
    """Return env steps per second with random actions."""
    actions = torch.empty(horizon, env.num_envs, env.num_actions, device=env.device)

    def rollout() -> None:
        env.prefetch_random(horizon)
        for row in actions.unbind(0):
            env.step(row)

    replay = capture(rollout, env.device, warp=env.capturable)

    def call() -> None:
        actions.uniform_(-1.0, 1.0)
        replay()

    return env.num_envs * horizon / rates.seconds_per_call(torch.no_grad()(call), env.device, repeats)


def seconds_of_rendering(env: RobotEnv, repeats: int) -> float:
    """Return the time in which the images of all envs are rendered once."""
    env_index = torch.arange(env.num_envs, device=env.device)
    cameras = TiledCamera(env.task.cameras(), env.task.geom_classes(), env.sim, 0, env_index, env.step_seconds)
    step = torch.zeros((), dtype=torch.int64, device=env.device)
    # An episode that has just begun gets an image from every camera.
    episode_step = torch.zeros_like(env_index)
    replay = capture(lambda: cameras.render(episode_step, step), env.device, warp=env.capturable)
    return rates.seconds_per_call(replay, env.device, 10 * repeats)


def measure_mjlab(python: str, num_envs: int, device: str, iterations: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the rates of mjlab's camera task, and the versions of its packages."""
    found = rates.run_mjlab(
        python, task=MJLAB_TASK, num_envs=num_envs, iterations=iterations, warmup=2, stepping=50, device=device
    )
    row = {
        "name": f"mjlab {found['version']}, {MJLAB_TASK}",
        "device": found["device"],
        "image": "32x32 rgb",
        "num_envs": num_envs,
        "stepping": found["stepping_steps_per_second"],
        "inference": found["collect_steps_per_second"],
        "training": found["train_steps_per_second"],
    }
    return row, {"mjlab": found["version"], **found["versions"]}


if __name__ == "__main__":
    main()
