"""Forecast training on several H200 from the rates of one, which bench/robots.py measured.

    python bench/forecast_gpus.py

Runs on a CPU. The parts of an iteration with 4,096 and 16,384 envs follow from bench/results/robots.json, the number
and the size of the sums over ranks from a short training on the CPU, and the time of a sum from a network of
`paceline scale forecast`. The wait for slower GPUs is not included, because one GPU does not show it.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import rates
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.train_arguments import parse
from paceline.experiments.forecast import IterationModel, Scaling
from paceline.experiments.iteration_parts import Parts, Sums, count_sums
from paceline.experiments.network import find_network
from paceline.experiments.run_data import read_run
from paceline.run.directory import RunDir
from paceline.train import train

ROBOTS = Path(__file__).parent / "results" / "robots.json"
MOST_RANKS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["go1-velocity", "shadow-hand-repose"])
    parser.add_argument("--network", default="dgx-h100", help="network of `paceline scale forecast`")
    parser.add_argument("--name", default="forecast_gpus", help="name of the file in bench/results")
    args = parser.parse_args()
    network = find_network(args.network)
    rows = []
    for task in args.tasks:
        parts, steps_per_env = parts_of_gpu(task)
        model = IterationModel(parts, sums_of_task(task), steps_per_env)
        # Every number of envs lies between the measured ones, or is one of them.
        weak = model.scaling("weak", network, MOST_RANKS, parts[0].num_envs, 0.25)
        most = parts[-1].num_envs // parts[0].num_envs
        strong = model.scaling("strong", network, most, parts[-1].num_envs, 0.25)
        rows += [*rows_of(task, weak), *rows_of(task, strong)]
    measured = json.loads(ROBOTS.read_text())
    rates.write(args.name, network=args.network, source=str(ROBOTS.name), measured=measured["date"], rows=rows)
    table = Table("task", "scaling", "ranks", "envs", "ms", "M steps/s", "efficiency", "sync", box=box.SIMPLE)
    for row in rows:
        cells = row["task"], row["scaling"], f"{row['ranks']:,}", f"{row['total_envs']:,}"
        table.add_row(
            *cells,
            f"{1e3 * row['seconds']:.1f}",
            f"{row['steps_per_second'] / 1e6:,.2f}",
            f"{row['efficiency']:.2f}",
            f"{100 * row['sync']:.1f} %",
        )
    Console().print(table)


def parts_of_gpu(task: str) -> tuple[list[Parts], int]:
    """Return the parts of an iteration for each measured number of envs, and the steps of an env in an iteration."""
    content = json.loads(ROBOTS.read_text())
    steps = content["ppo"][task]["horizon"]
    parts = []
    for row in content["rows"]:
        if row["robot"] == task:
            collect, whole = (row["num_envs"] * steps / row[rate] for rate in ("collect", "train"))
            parts.append(Parts(row["num_envs"], collect, whole - collect, 0.0, 0.0))
    return sorted(parts, key=lambda part: part.num_envs), steps


def sums_of_task(task: str) -> Sums:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        argv = [task, "--gpu-ids", "none", "--num-envs", "4", "--max-iterations", "1", "--logger", "none"]
        train(parse(argv).config, RunDir(run), Console(quiet=True))
        return count_sums(read_run(run, needs_returns=False))


def rows_of(task: str, scaling: Scaling) -> list[dict[str, Any]]:
    return [
        {
            "task": task,
            "scaling": scaling.kind,
            "ranks": each.ranks,
            "total_envs": each.total_envs,
            "seconds": each.seconds,
            "steps_per_second": each.steps_per_second,
            "efficiency": scaling.efficiency(each),
            "sync": each.synchronization / each.seconds,
        }
        for each in scaling.predictions
    ]


if __name__ == "__main__":
    main()
