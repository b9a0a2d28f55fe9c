"""Compare training rates on cartpole on one GPU with the bare physics and with mjlab, in one run.

    python bench/gpu.py --peer PYTHON        PYTHON has mjlab
    python bench/gpu.py --device cpu --num-envs 16 --iterations 2        a dry run without a GPU

Measures two settings: the task's defaults, and mjlab's physics, horizon, network, epochs and minibatches.
"""

import argparse
from dataclasses import asdict

import rates
import torch
from rich.console import Console
from rich.table import Table

from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole import ENTRY, Cartpole

SETTINGS = {
    "default": (Cartpole(), PpoSettings.from_training(ENTRY.training)),
    "mjlab's": (
        Cartpole(decimation=5, physics_hz=100.0),
        PpoSettings(horizon=32, epochs=5, minibatches=4, hidden=(64, 64)),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peer", help="Python interpreter with mjlab; omit to skip the peer")
    parser.add_argument("--name", default="gpu", help="name of the file in bench/results")
    args = parser.parse_args()
    rows = []
    for num_envs in args.num_envs:
        for name, (task, ppo) in SETTINGS.items():
            row = measure(task, ppo, num_envs, torch.device(args.device), args.iterations)
            if args.peer and name == "mjlab's":
                peer = rates.mjlab(args.peer, num_envs, ppo, args.device, 4 + min(args.iterations, 20)).rates(
                    rates.WARM
                )
                row |= {
                    "mjlab": peer["train"],
                    "train/mjlab": row["train"] / peer["train"],
                }
            rows.append({"num_envs": num_envs, "settings": name} | row)
    settings = {name: {"task": asdict(task), "ppo": asdict(ppo)} for name, (task, ppo) in SETTINGS.items()}
    rates.write(args.name, task="cartpole", unit="env steps per second", settings=settings, rows=rows)
    columns = max(rows, key=len)
    table = Table(*columns, title=f"cartpole on {args.device}, env steps/s")
    for row in rows:
        table.add_row(*(rates.show(row.get(column, "")) for column in columns))
    Console(width=120).print(table)


def measure(task: Cartpole, ppo: PpoSettings, num_envs: int, device: torch.device, iterations: int) -> dict[str, float]:
    physics = rates.physics(task, num_envs, device, ppo.horizon, max(2, iterations // 5))
    rate = rates.paceline(task, num_envs, ppo, device, 4 + iterations).rates(rates.WARM)
    collect, train = rate["collect"], rate["train"]
    return {
        "physics": physics,
        "collect": collect,
        "train": train,
        "collect/physics": collect / physics,
        "train/physics": train / physics,
    }


if __name__ == "__main__":
    main()
