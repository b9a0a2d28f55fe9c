"""The command `paceline export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional

from paceline.cli.options import option, parse_options
from paceline.process import interrupts


@dataclass(frozen=True)
class ExportArguments:
    """Export a trained policy, including its observation normalizer, to one file."""

    run: Annotated[Positional[str], option("RUN")]
    """Directory of the run, one of its checkpoint files, or auto for the newest run under runs/."""
    task: Annotated[str | None, option("TASK")] = None
    """Task of a policy that RSL-RL trained outside of Paceline. RUN is then its file model_N.pt."""
    activation: Annotated[str | None, option("NAME")] = None
    """Activation function of such a policy, because the file does not contain it. The default is that of the task."""
    format: Literal["onnx", "torchscript"] = "onnx"
    """Format of the file. onnx needs the packages onnx and onnxscript."""
    output: Annotated[Path | None, option("FILE")] = None
    """Output file. The default is policy.onnx or policy.pt in the run's directory."""


def run(argv: list[str], console: Console) -> int:
    arguments = parse_options(ExportArguments, argv, "export")
    from paceline.export import export

    interrupts.raise_keyboard_interrupt()
    console.print(escape(str(export(**vars(arguments)))))
    return 0
