"""The logger of MLflow. The environment variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME set the store and the
experiment. The default store is RUN/mlflow.db."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_MOST_METRICS = 1000
"""Largest number of metrics that a store accepts at once."""
_KEEP_SECONDS, _WRITE_SECONDS = 0.2, 2.0
"""Minimum time between two values of a metric, and between two writes, s. A store takes up to a millisecond for each
value."""
_STATUS = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class Logger:
    """A run of MLflow. A resumed run keeps its ID, which is in RUN/mlflow.id."""

    def __init__(self, directory: Path, title: str, options: dict[str, Any], notify: Callable[[str], object]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._latest, self._metrics = Metric, dict[str, Metric](), list[Metric]()
        self._kept_at = self._written_at = 0.0
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{directory / 'mlflow.db'}")
        id_file = directory / "mlflow.id"
        if id_file.is_file():
            self._id = id_file.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline")
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            # A database of MLflow keeps artifacts in the current directory by default.
            folder = None if uri else (directory / "mlflow_artifacts").as_uri()
            experiment_id = self._client.create_experiment(name, folder)
        self._id = self._client.create_run(experiment_id, run_name=title).info.run_id
        params = [Param(name, str(value)[:6000]) for name, value in options.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[start : start + 100])
        id_file.write_text(self._id + "\n")

    def log(self, iteration: int, values: dict[str, float], time: float) -> None:
        """Keep the values, at most a few times per second. Of values in between, the latest of each metric is kept."""
        milliseconds = int(time * 1000)
        self._latest |= {name: self._metric(name, value, milliseconds, iteration) for name, value in values.items()}
        if time - self._kept_at >= _KEEP_SECONDS:
            self._keep_latest()
            self._kept_at = time
        if len(self._metrics) >= _MOST_METRICS or time - self._written_at >= _WRITE_SECONDS:
            self._write()
            self._written_at = time

    def log_image(self, iteration: int, name: str, picture: np.ndarray) -> None:
        self._client.log_image(self._id, picture, key=name.replace("/", "_"), step=iteration)

    def log_video(self, iteration: int, name: str, file: Path) -> None:
        self._client.log_artifact(self._id, str(file), "videos")

    def flush(self) -> None:
        self._keep_latest()
        self._write()

    def close(self, status: str) -> None:
        self.flush()
        self._client.set_terminated(self._id, _STATUS[status])

    def _keep_latest(self) -> None:
        self._metrics += self._latest.values()
        self._latest = {}

    def _write(self) -> None:
        for start in range(0, len(self._metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=self._metrics[start : start + _MOST_METRICS])
        self._metrics = []
