"""Compare forecast iterations with measured ones over links with latency. It needs root.

    python bench/forecast.py

Trains cartpole on two CPU ranks in two network namespaces. The parts of an iteration are measured without a slow link.
Then, for each latency that `slow_link` adds, `paceline scale forecast` measures the all-reduce over the link and
predicts the time of an iteration, and a training measures it. The table shows medians over rounds.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import rates
from rich.console import Console
from rich.table import Table
from slow_link import slow_link, start_ranks

from paceline.experiments.run_data import read_run
from tests.distributed.namespaces import Node, network

LONGEST_SECONDS = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 5.0, 20.0], help="one-way latencies, ms")
    parser.add_argument("--total-envs", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="forecast", help="name of the file in bench/results")
    args = parser.parse_args()
    # The networks are removed also if the benchmark is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            reference = Path(folder) / f"reference_{number}"
            with plain_link() as nodes:
                train(nodes, reference, args.total_envs, args.iterations)
            for latency_ms in args.latencies:
                with slow_link(latency_ms) as nodes:
                    predicted = forecast(nodes, reference)
                with slow_link(latency_ms) as nodes:
                    run = Path(folder) / f"run_{number}_{latency_ms:g}"
                    train(nodes, run, args.total_envs, args.iterations)
                rows.append({"latency_ms": latency_ms, "predicted": predicted, "measured": iteration_seconds(run)})
                rows[-1]["load_average"] = os.getloadavg()[0]
                print(rows[-1], flush=True)
    summary = [summarize(rows, latency_ms) for latency_ms in args.latencies]
    sizes = {"total_envs": args.total_envs, "ranks": 2, "iterations": args.iterations}
    rates.write(args.name, task="cartpole", **sizes, rows=summary, rounds=rows)
    table = Table("latency, ms", "measured, ms", "forecast, ms", "forecast / measured")
    for row in summary:
        cells = f"{1e3 * row['measured']:.0f}", f"{1e3 * row['predicted']:.0f}", f"{row['ratio']:.2f}"
        table.add_row(f"{row['latency_ms']:g}", *cells)
    Console().print(table)


@contextmanager
def plain_link() -> Iterator[tuple[Node, Node]]:
    with network(2) as (first, second):
        yield first, second


def train(nodes: tuple[Node, Node], run: Path, total_envs: int, iterations: int) -> None:
    argv = ["train", "cartpole", "--distributed", "--gpu-ids", "none", "--run-dir", str(run), "--logger", "none"]
    argv += ["--total-envs", str(total_envs), "--max-iterations", str(iterations), "--checkpoint-every", "1000"]
    on_nodes(nodes, argv, run.with_suffix(".log"))


def forecast(nodes: tuple[Node, Node], run: Path) -> float:
    """Return the predicted time of an iteration with two ranks over the link between the nodes."""
    on_nodes(nodes, ["scale", "forecast", str(run), "--to", "2", "--no-measure"], run.with_suffix(".log"))
    weak = json.loads((run / "forecast" / "forecast.json").read_text())["scalings"][0]
    return next(each["seconds"] for each in weak["predictions"] if each["ranks"] == 2)


def on_nodes(nodes: tuple[Node, Node], argv: list[str], log: Path) -> None:
    """Run a command as two ranks, one on each node."""
    processes = start_ranks(nodes, argv, log)
    deadline = time.monotonic() + LONGEST_SECONDS
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            sys.exit(f"{' '.join(argv)} failed\n{log.read_text()[-3000:]}")
        time.sleep(0.1)
    if any(process.returncode for process in processes):
        sys.exit(f"{' '.join(argv)} failed\n{log.read_text()[-3000:]}")


def iteration_seconds(run: Path) -> float:
    """Return the mean time of an iteration without the first two."""
    seconds = read_run(run, needs_returns=False).metrics["progress/train_seconds"]
    return float(seconds[-1] - seconds[1]) / (len(seconds) - 2)


def summarize(rows: list[dict[str, Any]], latency_ms: float) -> dict[str, Any]:
    own = [row for row in rows if row["latency_ms"] == latency_ms]
    return {
        "latency_ms": latency_ms,
        "measured": median(row["measured"] for row in own),
        "predicted": median(row["predicted"] for row in own),
        "ratio": median(row["predicted"] / row["measured"] for row in own),
    }


if __name__ == "__main__":
    main()
