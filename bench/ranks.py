"""Compare training on one rank with several ranks on the same machine: returns and rate.

    python bench/ranks.py                on a GPU: one process, one rank over nccl, two ranks on one GPU over gloo
    python bench/ranks.py --device cpu   the same on a CPU, over gloo

All use the same total number of envs, seed and settings. Each measurement is one `paceline train` command.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import rates
from rich.console import Console
from rich.table import Table

PACELINE = [sys.executable, "-m", "paceline"]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m", "paceline"]
AVERAGES = ["--sync", "every-iteration"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--total-envs", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--name", default="ranks", help="name of the file in bench/results")
    args = parser.parse_args()
    one, two = (["0"], ["0", "0"]) if args.device == "cuda" else (["none"], ["none", "--ranks", "2"])
    ways = {
        "one process": [*PACELINE, "train", "cartpole", "--gpu-ids", *one],
        "one rank with collectives": [*LAUNCHER, "train", "cartpole", "--distributed", "--gpu-ids", *one],
        "two ranks on one device": [*PACELINE, "train", "cartpole", "--gpu-ids", *two],
        "two ranks, --sync every-iteration": [*PACELINE, "train", "cartpole", "--gpu-ids", *two, *AVERAGES],
    }
    sizes = ["--total-envs", str(args.total_envs), "--max-iterations", str(args.iterations), "--logger", "none"]
    rows: list[dict[str, Any]] = [{"way": way} | train([*command, *sizes]) for way, command in ways.items()]
    for row in rows:
        row["rate/alone"] = row["steps_per_second"] / rows[0]["steps_per_second"]
        row["return/alone"] = row["mean_return"] / rows[0]["mean_return"]
    rates.write(args.name, task="cartpole", total_envs=args.total_envs, iterations=args.iterations, rows=rows)
    table = Table("", "ranks", "steps/s", "of alone", "return", "of alone")
    for row in rows:
        figures = f"{row['steps_per_second']:,.0f}", f"{row['rate/alone']:.2f}", f"{row['mean_return']:.1f}"
        table.add_row(row["way"], str(row["world_size"]), *figures, f"{row['return/alone']:.3f}")
    Console().print(table)


def train(command: list[str]) -> dict[str, Any]:
    """Run a training command and return the compared fields of result.json."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        done = subprocess.run([*command, "--run-dir", str(run)], env=os.environ, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        result = json.loads((run / "result.json").read_text())
        (over,) = {line.split("over ")[1].strip() for line in done.stdout.splitlines() if ", over " in line} or {"none"}
    names = ("world_size", "total_envs", "device", "steps_per_second", "mean_return", "mean_length", "max_length")
    return {name: result[name] for name in names} | {"sums over": over}


if __name__ == "__main__":
    main()
