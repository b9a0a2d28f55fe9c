"""Time that each logger takes from an iteration of 20 ms with 30 metrics. wandb and MLflow run in their own process,
and for comparison in the training process.

    python bench/loggers.py        # writes bench/results/loggers.json
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.run.loggers import mlflow, wandb
from paceline.run.loggers.background import BackgroundLogger
from paceline.run.loggers.tensorboard import TensorBoard
from paceline.run.metrics_file import MetricsFile

ITERATIONS, ITERATION_SECONDS = 300, 0.02
VALUES = {f"group/metric_{index}": float(index) for index in range(30)}


def measure(make: Callable[[], Any]) -> dict[str, float]:
    """Return the median and the mean time of a call of `log`, ms."""
    logger, seconds = make(), []
    for iteration in range(ITERATIONS):
        began = time.perf_counter()
        logger.log(iteration, VALUES)
        seconds.append(time.perf_counter() - began)
        time.sleep(ITERATION_SECONDS)
    logger.close("completed")
    median, mean = statistics.median(seconds), statistics.mean(seconds)
    return {"median_ms": 1e3 * median, "mean_ms": 1e3 * mean, "share_of_20_ms": mean / ITERATION_SECONDS}


class Direct:
    """A logger of a library in this process."""

    def __init__(self, module: Any, folder: Path):
        self._logger = module.Logger(folder, "direct", {}, print)
        self.close = self._logger.close

    def log(self, iteration: int, values: dict[str, float]) -> None:
        self._logger.log(iteration, values, time.time())


def main() -> None:
    os.environ["WANDB_MODE"] = "offline"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "direct").mkdir()
        loggers = {
            "metrics.jsonl": lambda: MetricsFile(folder / "metrics.jsonl", 1, {}),
            "tensorboard": lambda: TensorBoard(folder / "tensorboard", 1, {}),
            "wandb": lambda: BackgroundLogger("wandb", folder, "run", {}, print),
            "wandb in the training process": lambda: Direct(wandb, folder / "direct"),
            "mlflow": lambda: BackgroundLogger("mlflow", folder, "run", {}, print),
            "mlflow in the training process": lambda: Direct(mlflow, folder / "direct"),
        }
        results = {name: measure(make) for name, make in loggers.items()}
    for name, result in results.items():
        print(f"{name:32} {result['median_ms']:8.3f} ms median {result['mean_ms']:8.3f} ms mean")
    file = Path(__file__).parent / "results" / "loggers.json"
    file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
