"""Compare the training rate of two checkouts on the same machine, with alternating runs.

    python bench/compare.py OLD NEW --rounds 5
    python bench/compare.py OLD NEW --rounds 2 --device cpu --num-envs 64 --iterations 2        a dry run without a GPU

OLD and NEW are directories of two checkouts. Every round runs bench/robots.py (go1-velocity and g1-velocity) and
bench/learners.py of each checkout in new processes. The table shows medians over the rounds, their ratio, and the
spread of each checkout: the largest deviation of a round from its median.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import rates
from rich.console import Console
from rich.table import Table

SIDES = ("old", "new")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--robots", nargs="*", default=["go1-velocity", "g1-velocity"])
    parser.add_argument("--learners", nargs="*", default=["ppo", "rsl_rl", "rl_games", "skrl", "skrl_jax"])
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=20, help="measured iterations per run")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--name", default="compare", help="name of the file in bench/results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: {side: [] for side in SIDES})
    for round_ in range(1, args.rounds + 1):
        # Reverse the order in every second round, so that a drift of the machine affects both sides.
        for side in SIDES[:: 1 if round_ % 2 else -1]:
            for name, rate in run(args.checkouts[SIDES.index(side)].resolve(), args).items():
                measured[name][side].append(rate)
            print(f"round {round_} of {args.rounds}, {side} done", flush=True)
        # Write after each round, so that an interrupted run keeps its measurements.
        rows = [{"measurement": name} | summarize(sides) for name, sides in measured.items()]
        sizes = {"num_envs": args.num_envs, "iterations": args.iterations, "rounds": round_, "device": args.device}
        rates.write(args.name, unit="env steps per second", **sizes, rows=rows)
    table = Table("training rate, env steps/s", "old", "new", "new/old", "spread old", "spread new")
    for row in rows:
        ratio, spreads = f"{row['new/old']:.3f}", [f"{row[f'{side} spread']:.1%}" for side in SIDES]
        table.add_row(row["measurement"], *(f"{row[side]:,.0f}" for side in SIDES), ratio, *spreads)
    Console(width=100).print(table)


def run(checkout: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run both benchmarks of a checkout and return the training rates."""
    sizes = ["--num-envs", str(args.num_envs), "--iterations", str(args.iterations), "--device", args.device]
    found: dict[str, float] = {}
    for script, key, chosen in (("robots", "robot", args.robots), ("learners", "learner", args.learners)):
        if not chosen:
            continue
        command = [sys.executable, f"bench/{script}.py", f"--{script}", *chosen, *sizes, "--name", "compared"]
        path = os.pathsep.join([str(checkout / "src"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, cwd=checkout, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} in {checkout}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        output = checkout / "bench" / "results" / "compared.json"
        rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
        output.unlink()
        found |= {row[key]: row["train"] for row in rows if row[key] in chosen}
    return found


def summarize(sides: dict[str, list[float]]) -> dict[str, Any]:
    medians = {side: median(values) for side, values in sides.items()}
    spreads = {
        f"{side} spread": max(abs(value / medians[side] - 1.0) for value in values) for side, values in sides.items()
    }
    return medians | {"new/old": medians["new"] / medians["old"]} | spreads | {"rounds": sides}


if __name__ == "__main__":
    main()
