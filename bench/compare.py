"""Compare the training rate of two checkouts on the same machine, in alternating rounds.

    python bench/compare.py OLD NEW
    python bench/compare.py OLD NEW --rounds 2 --device cpu --num-envs 64 --iterations 2        a dry run without a GPU

OLD and NEW are directories of two checkouts. Each measurement is a robot of bench/robots.py or a learner of
bench/learners.py. One process per checkout and measurement compiles and warms up; then the two processes of a
measurement train in turns, one round at a time, while all other processes wait. The table shows medians over the
rounds, their ratio, and the spread of each checkout: the largest deviation of a round from its median.
"""

import argparse
import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, cast

SIDES = ("old", "new")
ROBOTS = ("go1-velocity", "g1-velocity")
LEARNERS = ("ppo", "rsl_rl", "rl_games", "skrl", "skrl_jax")
RATE = "training rate: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs=2, metavar="CHECKOUT", help="directories OLD and NEW")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--robots", nargs="*", default=ROBOTS, choices=ROBOTS)
    parser.add_argument("--learners", nargs="*", default=LEARNERS, choices=LEARNERS)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=20, help="measured iterations per round")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--name", default="compare", help="name of the file in bench/results")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        script, name = args.measure
        measure(script, name, args)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    import rates
    from rich.console import Console
    from rich.table import Table

    rows: list[dict[str, Any]] = []
    chosen = [("robots", name) for name in args.robots] + [("learners", name) for name in args.learners]
    workers = {pair: [start(checkout.resolve(), *pair, args) for checkout in args.checkouts] for pair in chosen}
    try:
        with ThreadPoolExecutor() as pool:
            every = [worker for pair in workers.values() for worker in pair]
            for worker, _ in zip(every, pool.map(next_rate, every), strict=True):
                print(f"{command_of(worker)[-1]} in {command_of(worker)[2]}: ready", flush=True)
        for (script, name), pair in workers.items():
            found: dict[str, list[float]] = {side: [] for side in SIDES}
            for round_ in range(args.rounds):
                # Reverse the order in every second round, so that a drift of the machine affects both sides.
                for side in SIDES[:: -1 if round_ % 2 else 1]:
                    found[side].append(next_rate(pair[SIDES.index(side)]))
            rows.append({"measurement": f"{name} ({script})"} | summarize(found))
            # Write after each measurement, so that an interrupted run keeps the finished ones.
            sizes = {name: getattr(args, name) for name in ("num_envs", "iterations", "rounds", "device")}
            rates.write(args.name, unit="env steps per second", **sizes, rows=rows)
    finally:
        for worker in (worker for pair in workers.values() for worker in pair):
            worker.kill()
            worker.wait()
    table = Table("training rate, env steps/s", "old", "new", "new/old", "spread old", "spread new")
    for row in rows:
        ratio, spreads = f"{row['new/old']:.3f}", [f"{row[f'{side} spread']:.1%}" for side in SIDES]
        table.add_row(row["measurement"], *(f"{row[side]:,.0f}" for side in SIDES), ratio, *spreads)
    Console(width=100).print(table)


def start(checkout: Path, script: str, name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the process that measures one robot or learner with the code of a checkout."""
    command = [sys.executable, str(Path(__file__).resolve()), str(checkout), str(checkout)]
    command += ["--num-envs", str(args.num_envs), "--iterations", str(args.iterations), "--device", args.device]
    path = os.pathsep.join([str(checkout / "bench"), str(checkout / "src"), os.environ.get("PYTHONPATH", "")])
    # Several processes share one GPU: JAX must not reserve most of its memory.
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.Popen(
        [*command, "--measure", script, name],
        cwd=checkout,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def next_rate(worker: subprocess.Popen[str]) -> float:
    """Let a process train one round and return its rate. The first round warms up."""
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write("\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith(RATE):
            return float(line.removeprefix(RATE))
    sys.exit(f"{' '.join(command_of(worker))} failed")


def command_of(worker: subprocess.Popen[str]) -> list[str]:
    return [str(argument) for argument in cast("list[Any]", worker.args)]


def measure(script: str, name: str, args: argparse.Namespace) -> None:
    """Run the benchmark of this process's checkout, with rounds in place of one run of iterations."""
    rates: Any = importlib.import_module("rates")
    benchmark = importlib.import_module(script)
    learning, warm = rates.learning, rates.WARM.start

    def rounds(learner: Any, steps: int, _: int) -> None:
        for round_, _line in enumerate(sys.stdin):
            durations = learning(learner, steps, args.iterations if round_ else warm)
            print(f"{RATE}{durations.rates(slice(None))['train']}", flush=True)
        sys.exit()

    rates.learning, rates.physics = rounds, lambda *_: 1.0
    sys.argv = [script, f"--{script}", name, "--num-envs", str(args.num_envs), "--device", args.device]
    benchmark.main()


def summarize(sides: dict[str, list[float]]) -> dict[str, Any]:
    medians = {side: median(values) for side, values in sides.items()}
    spreads = {
        f"{side} spread": max(abs(value / medians[side] - 1.0) for value in values) for side, values in sides.items()
    }
    return medians | {"new/old": medians["new"] / medians["old"]} | spreads | {"rounds": sides}


if __name__ == "__main__":
    main()
