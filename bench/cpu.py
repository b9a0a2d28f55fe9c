"""Compare training rates of Paceline and mjlab on cartpole on this CPU.

    make bench

Horizon, network, epochs and minibatches are equal on both sides. Paceline runs twice: with the task's defaults (2
physics steps of 1/120 s per control step) and with mjlab's physics (5 of 1/100 s). The sides alternate, and the ratio
is that of the medians, so that load from other processes affects both. mjlab has no CPU mode: it runs MuJoCo Warp on
the CPU, without graphs.
"""

import argparse
import os
from itertools import product
from pathlib import Path
from statistics import median

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does; must be set before torch is imported

import rates
import torch
from rich.console import Console
from rich.table import Table

from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole import Cartpole

PEER = Path(__file__).parent.parent / ".venv-mjlab" / "bin" / "python"
PPO = PpoSettings(horizon=32, epochs=5, minibatches=4, hidden=(64, 64))
TASKS = {"default": Cartpole(), "mjlab's physics": Cartpole(decimation=5, physics_hz=100.0)}
KINDS = ("collect", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    console = Console()
    rows = [row for num_envs in args.num_envs for row in compare(num_envs, args.rounds, console)]
    rates.write("cpu", task="cartpole", unit="env steps per second", settings=vars(PPO), rows=rows)
    table = Table("envs", "task", "", "Paceline", "mjlab", "ratio", title="cartpole on this CPU, env steps/s")
    for row in rows:
        figures = (f"{row['paceline']:,.0f}", f"{row['mjlab']:,.0f}", f"{row['ratio']:.1f}")
        table.add_row(str(row["num_envs"]), row["physics"], row["kind"], *figures)
    console.print(table)


def compare(num_envs: int, rounds: int, console: Console) -> list[dict]:
    paceline: dict[str, list[rates.Iterations]] = {name: [] for name in TASKS}
    mjlab: list[rates.Iterations] = []
    for round_ in range(1, rounds + 1):
        console.print(f"{num_envs} envs, round {round_} of {rounds}")
        mjlab.append(rates.mjlab(PEER, num_envs, PPO, "cpu", iterations=10))
        for name, task in TASKS.items():
            paceline[name].append(rates.paceline(task, num_envs, PPO, torch.device("cpu"), iterations=35))
    rows = []
    for (name, runs), kind in product(paceline.items(), KINDS):
        own, peer = ([run.rates(rates.WARM)[kind] for run in side] for side in (runs, mjlab))
        figures = {"paceline": median(own), "mjlab": median(peer), "ratio": median(own) / median(peer)}
        rows.append({"num_envs": num_envs, "physics": name, "kind": kind} | figures)
    return rows


if __name__ == "__main__":
    main()
