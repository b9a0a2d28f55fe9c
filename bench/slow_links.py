"""Measure the time to a return over links with latency, with each mode of `--sync`. It needs root.

    python bench/slow_links.py

Trains cartpole on two CPU ranks in two network namespaces, between which `slow_link` adds a latency. A run ends when
the mean return of the latest episodes reaches the target. Times are those of iterations: start-up is not included. All
combinations run one after the other, once per seed, and the table shows medians over seeds.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import rates
from rich.console import Console
from rich.table import Table
from slow_link import slow_link, start_ranks

from paceline.run.metrics_file import read_metrics

MODES = {
    "every-minibatch": ["--sync", "every-minibatch"],
    "every-iteration": ["--sync", "every-iteration"],
    "periodic, K = 4": ["--sync", "periodic", "--sync-every", "4"],
    "periodic, K = 8": ["--sync", "periodic", "--sync-every", "8"],
}
MAX_ITERATIONS, LONGEST_SECONDS = 200, 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 5.0, 20.0], help="one-way latencies, ms")
    parser.add_argument("--target", type=float, default=150.0, help="mean return to reach; 300 is the maximum")
    parser.add_argument("--total-envs", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", default="slow_links", help="name of the file in bench/results")
    args = parser.parse_args()
    # The networks are removed also if the benchmark is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    runs = []
    for seed in args.seeds:
        for latency_ms in args.latencies:
            for mode, options in MODES.items():
                sizes = ["--total-envs", str(args.total_envs), "--seed", str(seed)]
                measured = time_to_return(latency_ms, args.target, [*options, *sizes])
                load = {"load_average": os.getloadavg()[0]}
                runs.append({"latency_ms": latency_ms, "mode": mode, "seed": seed} | measured | load)
                print(runs[-1], flush=True)
    rows = [summarize(runs, latency_ms, mode) for latency_ms in args.latencies for mode in MODES]
    sizes = {"total_envs": args.total_envs, "ranks": 2, "target_return": args.target}
    rates.write(args.name, task="cartpole", **sizes, rows=rows, runs=runs)
    table = Table("latency, ms", "--sync", "seconds", "ratio", "iterations", "iteration, ms")
    for row in rows:
        cells = f"{row['latency_ms']:g}", row["mode"], f"{row['seconds']:.1f}", f"{row['ratio']:.2f}"
        table.add_row(*cells, f"{row['iterations']:.0f}", f"{row['iteration_ms']:.0f}")
    Console().print(table)


def time_to_return(latency_ms: float, target: float, options: list[str]) -> dict[str, Any]:
    """Train until the mean return reaches the target. Return the iterations and seconds up to there."""
    with tempfile.TemporaryDirectory() as folder, slow_link(latency_ms) as nodes:
        run, log = Path(folder) / "run", Path(folder) / "log"
        argv = ["train", "cartpole", "--distributed", "--gpu-ids", "none", "--run-dir", str(run)]
        argv += ["--max-iterations", str(MAX_ITERATIONS), "--checkpoint-every", str(MAX_ITERATIONS), *options]
        processes = start_ranks(nodes, argv, log)
        deadline, ended = time.monotonic() + LONGEST_SECONDS, False
        while time.monotonic() < deadline and not ended:
            ended = any(process.poll() is not None for process in processes)
            iterations = read_metrics(run / "metrics.jsonl")[0] if (run / "metrics.jsonl").exists() else []
            for count, metrics in enumerate(iterations, start=1):
                if metrics.get("episode/return", 0.0) >= target:
                    seconds = metrics["progress/train_seconds"]
                    return {"iterations": count, "seconds": seconds, "iteration_ms": 1e3 * seconds / count}
            time.sleep(0.2)
        sys.exit(f"the return {target} was not reached at {latency_ms} ms with {options}\n{log.read_text()[-3000:]}")


def summarize(runs: list[dict[str, Any]], latency_ms: float, mode: str) -> dict[str, Any]:
    """Return the medians over seeds, and the ratio of the time to that of every-minibatch at the same latency."""

    def medians(mode: str) -> dict[str, float]:
        found = [run for run in runs if (run["latency_ms"], run["mode"]) == (latency_ms, mode)]
        return {name: median(run[name] for run in found) for name in ("seconds", "iterations", "iteration_ms")}

    ratio = medians(mode)["seconds"] / medians("every-minibatch")["seconds"]
    return {"latency_ms": latency_ms, "mode": mode, "ratio": ratio} | medians(mode)


if __name__ == "__main__":
    main()
