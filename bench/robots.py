"""Measure rollout and training rate of every robot task against the bare physics and against mjlab's task.

    python bench/robots.py --peer PYTHON                on a GPU; PYTHON has mjlab
    python bench/robots.py --peer PYTHON --device cpu --robots go1-velocity --num-envs 512 --iterations 3 \
        --name robots_cpu

The physics rate replays the simulation calls of one rollout and nothing else. Against mjlab, timestep, decimation,
solver iterations, horizon, network, epochs and minibatches are equal; the models differ: Paceline's have primitive
geoms that collide with the ground only. Tasks without an mjlab counterpart use their own settings.
"""

import argparse
from dataclasses import asdict
from typing import Any

import rates
import torch
from rich.console import Console
from rich.table import Table

from paceline.device.cpu import tune_torch
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks import registry

PEERS = {"go1-velocity": "Mjlab-Velocity-Flat-Unitree-Go1", "g1-velocity": "Mjlab-Velocity-Flat-Unitree-G1"}
ROBOTS = (*PEERS, "go1-velocity-rough", "shadow-hand-repose", "ant", "humanoid")
PEER_PPO = PpoSettings(horizon=24, epochs=5, minibatches=4, hidden=(512, 256, 128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", nargs="+", default=list(ROBOTS), choices=ROBOTS)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peer", help="Python interpreter with mjlab; omit to skip the peer")
    parser.add_argument("--name", default="robots", help="name of the file in bench/results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for robot in args.robots:
        for num_envs in args.num_envs:
            row = measure(robot, num_envs, torch.device(args.device), args.iterations)
            if args.peer and robot in PEERS:
                peer = rates.mjlab(args.peer, num_envs, PEER_PPO, args.device, 4 + args.iterations, PEERS[robot])
                for part, rate in peer.rates(rates.WARM).items():
                    row |= {f"mjlab {part}": rate, f"{part}/mjlab": row[part] / rate}
            rows.append(row)
            # Write after each row, so that an interrupted run keeps its measurements.
            settings = {name: asdict(settings_of(name)) for name in args.robots}
            rates.write(args.name, device=args.device, unit="env steps per second", ppo=settings, rows=rows)
            print(" ".join(f"{name} {rates.show(value)}" for name, value in row.items()), flush=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*names, title=f"robots on {args.device}, env steps/s")
    for row in rows:
        table.add_row(*(rates.show(row.get(name, "")) for name in names))
    Console(width=170).print(table)


def settings_of(robot: str) -> PpoSettings:
    return PEER_PPO if robot in PEERS else PpoSettings.from_training(registry.find(robot).training)


def measure(robot: str, num_envs: int, device: torch.device, iterations: int) -> dict[str, Any]:
    tune_torch(device)
    task, ppo = registry.find(robot).task(), settings_of(robot)
    env = RobotEnv(task, num_envs, "auto", device)
    learner = Ppo(env, ppo, seed=0)
    found = rates.learning(learner, num_envs * ppo.horizon, 4 + iterations).rates(rates.WARM)
    physics = rates.physics_of(learner, env, max(2, iterations // 4))
    row = {"robot": robot, "num_envs": num_envs, "physics": physics, **found}
    return row | {f"{part}/physics": found[part] / physics for part in ("collect", "train")}


if __name__ == "__main__":
    main()
