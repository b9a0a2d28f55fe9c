"""The logger of Weights & Biases. Its environment variables set the project, the mode and the server, for example
WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY, WANDB_MODE and WANDB_BASE_URL."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UserError

# Without a terminal it fails instead of asking for a key.
_LOGIN = "import wandb; wandb.login(verify=False)"


def check_credentials() -> None:
    """Raise UserError if wandb is to send data, but has no API key."""
    login = subprocess.run([sys.executable, "-P", "-c", _LOGIN], stdin=subprocess.DEVNULL, capture_output=True)
    if login.returncode:
        raise UserError(
            "--logger wandb: wandb has no API key; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to "
            "write to the run directory only"
        )


class Logger:
    """A run of wandb. A resumed run keeps its ID, which is in RUN/wandb.id."""

    def __init__(self, directory: Path, title: str, options: dict[str, Any], notify: Callable[[str], object]):
        import wandb

        self._wandb, id_file = wandb, directory / "wandb.id"
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            name=os.environ.get("WANDB_NAME", title),
            id=id_file.read_text().strip() if id_file.is_file() else None,
            resume="allow",
            dir=directory,
            config=options,
            settings=settings,
        )
        id_file.write_text(self._run.id + "\n")
        # The step of wandb must increase, but after a resume iterations are repeated.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        if not self._run.offline:
            notify(f"{self._run.url}")

    def log(self, iteration: int, values: dict[str, float], time: float) -> None:
        self._run.log(values | {"iteration": iteration})

    def log_image(self, iteration: int, name: str, picture: np.ndarray) -> None:
        self._run.log({name: self._wandb.Image(picture), "iteration": iteration})

    def log_video(self, iteration: int, name: str, file: Path) -> None:
        self._run.log({name: self._wandb.Video(str(file), format="mp4"), "iteration": iteration})

    def flush(self) -> None:
        """Do nothing, because the process of wandb writes and sends all values at once."""

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "completed" else 1)
