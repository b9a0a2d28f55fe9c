"""Cartpole on this CPU: Paceline beside mjlab, in turns, as ratios.

    make bench

Same physics rate, horizon, network, epochs and minibatches on both sides. Each side runs several times in turns, and
the ratio is that of the medians, so that a busy moment of the machine hurts neither side alone.
"""

import argparse
from pathlib import Path
from statistics import median

import rates
import torch
from rich.console import Console
from rich.table import Table

from paceline.config import PpoConfig
from paceline.tasks.cartpole import Cartpole

PEER = Path(__file__).parent.parent / ".venv-mjlab" / "bin" / "python"
KINDS = ("collect_steps_per_second", "train_steps_per_second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    console, rows = Console(), []
    ppo = PpoConfig(horizon=32, epochs=5, minibatches=4, hidden=(64, 64))
    for num_envs in args.num_envs:
        ours: dict[str, list[float]] = {kind: [] for kind in KINDS}
        theirs: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for round_ in range(1, args.rounds + 1):
            console.print(f"{num_envs} worlds, round {round_} of {args.rounds}")
            peer = rates.mjlab(PEER, num_envs, ppo, "cpu", iterations=3, warmup=1)
            task = Cartpole(decimation=peer["decimation"], physics_hz=1.0 / peer["timestep"])
            own = rates.paceline(task, num_envs, ppo, torch.device("cpu"), iterations=40, warmup=5)
            for kind in KINDS:
                ours[kind].append(own[kind])
                theirs[kind].append(peer[kind])
        for kind in KINDS:
            rows.append(
                {
                    "num_envs": num_envs,
                    "kind": kind.split("_")[0],
                    "paceline": median(ours[kind]),
                    "mjlab": median(theirs[kind]),
                    "ratio": median(ours[kind]) / median(theirs[kind]),
                    "paceline_rounds": ours[kind],
                    "mjlab_rounds": theirs[kind],
                }
            )
    rates.write("cpu", task="cartpole", unit="env steps per second", decimation=task.decimation, rows=rows)
    table = Table("worlds", "", "Paceline", "mjlab", "ratio", title="cartpole on this CPU, env steps/s")
    for row in rows:
        figures = (f"{row['paceline']:,.0f}", f"{row['mjlab']:,.0f}", f"{row['ratio']:.1f}")
        table.add_row(str(row["num_envs"]), row["kind"], *figures)
    console.print(table)


if __name__ == "__main__":
    main()
