"""Robots: collecting and training beside the bare physics and beside mjlab's task for the same robot, in one run.

    python bench/robots.py --peer PYTHON --num-envs 4096 16384        on a GPU; PYTHON has mjlab
    python bench/robots.py --peer PYTHON --device cpu --num-envs 512 --iterations 4 --name robots_cpu

Timestep, decimation, solver iterations, horizon, network, epochs and minibatches are the same on both sides. The models
are not quite: ours has primitive geoms that collide with the ground alone.
"""

import argparse
from dataclasses import asdict

import rates
import torch
from rich.console import Console
from rich.table import Table

from paceline.settings.ppo import PpoConfig
from paceline.tasks.go1_velocity import Go1Velocity

ROBOTS = {"go1-velocity": (Go1Velocity(), "Mjlab-Velocity-Flat-Unitree-Go1")}
PPO = PpoConfig(horizon=24, epochs=5, minibatches=4, hidden=(512, 256, 128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", nargs="+", default=list(ROBOTS), choices=list(ROBOTS))
    parser.add_argument("--num-envs", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peer", help="a Python with mjlab; without it the peer is left out")
    parser.add_argument("--name", default="robots", help="of the file in bench/results")
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    for name in args.robots:
        task, theirs = ROBOTS[name]
        for num_envs in args.num_envs:
            physics = rates.physics(task, num_envs, device, PPO.horizon, max(2, args.iterations // 5))
            ours = rates.paceline(task, num_envs, PPO, device, 4 + args.iterations).rates(rates.WARM)
            row = {"robot": name, "num_envs": num_envs, "physics": physics, **ours}
            row["train/physics"] = ours["train"] / physics
            if args.peer:
                peer = rates.mjlab(args.peer, num_envs, PPO, args.device, 4 + args.iterations, theirs)
                for part, rate in peer.rates(rates.WARM).items():
                    row |= {f"mjlab {part}": rate, f"{part}/mjlab": ours[part] / rate}
            rows.append(row)
    settings = {name: asdict(ROBOTS[name][0]) for name in args.robots} | {"ppo": asdict(PPO)}
    rates.write(args.name, device=args.device, unit="env steps per second", settings=settings, rows=rows)
    table = Table(*rows[0], title=f"robots on {args.device}, env steps/s")
    for row in rows:
        table.add_row(*(rates.show(value) for value in row.values()))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
