"""Loggers of the training metrics. The main rank opens them."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from paceline.errors import UserError
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.loggers.background import BackgroundLogger
from paceline.run.loggers.wandb import check_credentials
from paceline.run.metrics_file import MetricsFile
from paceline.run.optional_parts import OptionalParts

# The packages that each logger in its own process needs; its extra has the same name.
_PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}


class Logger(Protocol):
    """A logger may also have `log_image(iteration, name, picture)`, with `picture` RGB uint8 [3, height, width], and
    `log_video(iteration, name, file)`, with an mp4 file."""

    def log(self, iteration: int, values: dict[str, float]) -> None: ...

    def flush(self) -> None:
        """Write everything to disk or send it."""
        ...

    def close(self, status: str) -> None:
        """Stop after the end of the session; `status` as in result.json."""
        ...


class Loggers(OptionalParts):
    """All loggers of a run."""

    def log(self, iteration: int, values: dict[str, float]) -> None:
        self.call("log", iteration, values)

    def log_image(self, iteration: int, name: str, picture: Tensor) -> None:
        self.call("log_image", iteration, name, picture)

    def log_video(self, iteration: int, name: str, file: Path) -> None:
        self.call("log_video", iteration, name, file)

    def flush(self) -> None:
        self.call("flush")


def check_loggers(names: tuple[str, ...]) -> None:
    """Raise UserError if a logger cannot work because a package or credentials are missing."""
    for name in names:
        for package in _PACKAGES.get(name, ()):
            if find_spec(package) is None:
                raise UserError(
                    f"--logger {name} needs the package {package}, which is not installed: "
                    f"pip install 'paceline[{name}]'"
                )
    if "wandb" in names:
        check_credentials()


def open_loggers(
    config: TrainConfig, run: RunDir, first_iteration: int, facts: dict[str, Any], warn: Callable[[str], object]
) -> Loggers:
    """Open the file of metrics and the loggers of the configuration. `facts` describe the session, see
    `MetricsFile`."""
    loggers = Loggers(warn)
    loggers.add("logger metrics.jsonl", lambda: MetricsFile(run.metrics_file, first_iteration, facts))
    options = config.by_name() | {"world_size": facts["world_size"]}
    if "tensorboard" in config.logger:
        # Importing TensorBoard takes longer than all of Paceline.
        from paceline.run.loggers.tensorboard import TensorBoard

        loggers.add("logger tensorboard", lambda: TensorBoard(run.tensorboard, first_iteration, options))
    directory = run.path.absolute()
    for name in sorted(_PACKAGES.keys() & set(config.logger)):
        arguments = name, directory, f"{config.task} {directory.name}", options, warn
        loggers.add(f"logger {name}", partial(BackgroundLogger, *arguments))
    return loggers
