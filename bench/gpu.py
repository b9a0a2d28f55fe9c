"""Cartpole on one GPU: training beside the bare physics and beside mjlab, in one run, as ratios.

python bench/gpu.py --peer PYTHON        (PYTHON has mjlab; PACELINE_PEER_PATH sets its PYTHONPATH)
python bench/gpu.py --device cpu --num-envs 16 --iterations 2        a dry run without a GPU
"""

import argparse

import rates
import torch
from rich.console import Console
from rich.table import Table

from paceline.config import PpoConfig
from paceline.tasks.cartpole import Cartpole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peer", help="a Python with mjlab; without it the peer is left out")
    args = parser.parse_args()
    device, rows, task = torch.device(args.device), [], Cartpole(decimation=5, physics_hz=100.0)
    ppo = PpoConfig(horizon=32, epochs=5, minibatches=4, hidden=(64, 64))
    for num_envs in args.num_envs:
        ceiling = rates.physics(task, num_envs, device, ppo.horizon, max(2, args.iterations // 5))
        ours = rates.paceline(task, num_envs, ppo, device, args.iterations, warmup=4)
        row = {
            "num_envs": num_envs,
            "physics": ceiling,
            "collect": ours["collect_steps_per_second"],
            "train": ours["train_steps_per_second"],
            "collect_over_physics": ours["collect_steps_per_second"] / ceiling,
            "train_over_physics": ours["train_steps_per_second"] / ceiling,
        }
        if args.peer:
            peer = rates.mjlab(args.peer, num_envs, ppo, args.device, min(args.iterations, 20), warmup=4)
            assert (peer["decimation"], 1.0 / peer["timestep"]) == (task.decimation, task.physics_hz)
            row |= {
                "mjlab_train": peer["train_steps_per_second"],
                "train_over_mjlab": row["train"] / peer["train_steps_per_second"],
            }
        rows.append(row)
    rates.write("gpu", task="cartpole", unit="env steps per second", decimation=task.decimation, rows=rows)
    table = Table(*rows[0], title=f"cartpole on {args.device}, env steps/s")
    for row in rows:
        table.add_row(*(f"{v:,.0f}" if v > 100 else f"{v:.2f}" for v in row.values()))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
