"""Train cartpole-camera with the encoder in bfloat16 and in float32, over several seeds, in one run.

    python bench/image_precision.py                                        on a GPU
    python bench/image_precision.py --device cpu --num-envs 4 --iterations 2 --seeds 1      a dry run

Reports the mean episode length over all iterations, which is proportional to the area under the learning curve, the
final episode length, and env steps per second. float32 uses TF32 for matrix products.
"""

import argparse
import time
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import rates
import torch
from rich.console import Console
from rich.table import Table

from paceline.device.cpu import tune_torch
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole_camera import ENTRY

DTYPES = ("bfloat16", "float32")
LAST = 10
"""Number of iterations whose mean is the final episode length."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    tune_torch(device)
    runs: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        # The order alternates, so that neither is always first.
        for dtype in DTYPES[:: 1 if seed % 2 == 0 else -1]:
            runs.append({"seed": seed, "dtype": dtype} | train(dtype, seed, args.num_envs, args.iterations, device))
            print(f"seed {seed} {dtype}: final length {runs[-1]['final_length']:.1f}", flush=True)
    rows = [summary(dtype, [run for run in runs if run["dtype"] == dtype]) for dtype in DTYPES]
    rates.write("image_precision", device=args.device, num_envs=args.num_envs, rows=rows, runs=runs)
    table = Table(*rows[0], title=f"cartpole-camera on {args.device}, {args.seeds} seeds")
    for row in rows:
        table.add_row(*(rates.show(value) for value in row.values()))
    Console().print(table)


def train(dtype: str, seed: int, num_envs: int, iterations: int, device: torch.device) -> dict[str, Any]:
    """Return the curve of the mean episode length, its mean and end, and the rate."""
    settings = replace(PpoSettings.from_training(ENTRY.training), image_dtype=dtype)
    learner = Ppo(RobotEnv(ENTRY.task(), num_envs, "auto", device, seed=seed), settings, seed=seed)
    lengths, seconds = [0.0], []
    for _ in range(iterations):
        started = time.perf_counter()
        metrics = learner.learn()
        seconds.append(time.perf_counter() - started)
        # An iteration in which no episode ended has the length of the one before.
        lengths.append(metrics["length"] / metrics["episodes"] if metrics["episodes"] else lengths[-1])
    # The first iterations compile and capture.
    warm = seconds[4:] or seconds
    return {
        "mean_length": fmean(lengths[1:]),
        "final_length": fmean(lengths[1:][-LAST:]),
        "steps_per_second": num_envs * settings.horizon * len(warm) / sum(warm),
        "lengths": [round(length, 1) for length in lengths[1:]],
    }


def summary(dtype: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"dtype": dtype}
    for name in ("mean_length", "final_length", "steps_per_second"):
        values = [run[name] for run in runs]
        row |= {name: fmean(values), f"{name} std": stdev(values) if len(values) > 1 else 0.0}
    return row


if __name__ == "__main__":
    main()
