"""The command `paceline new-task`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional

from paceline.cli.options import parse_options
from paceline.run.config import option


@dataclass(frozen=True)
class NewTaskArguments:
    """Write a package with a task that trains, to start your own from.

    It has a MuJoCo model, the task, a test, a README and the entry point that registers the task.
    """

    name: Annotated[Positional[str], option("NAME")]
    """Name of the task and of the package: lower-case letters and numbers, with - between words."""
    output: Annotated[Path | None, option("DIR")] = None
    """Folder of the package, new or empty. The default is NAME in the current directory."""


def new_task(argv: list[str], console: Console) -> int:
    arguments = parse_options(NewTaskArguments, argv, "new-task")
    # This imports torch.
    from paceline.tasks.new_package import write_package

    folder = arguments.output or Path(arguments.name)
    for file in write_package(arguments.name, folder):
        console.print(str(file), markup=False)
    console.print(
        f"\nInstall and train it:\n  pip install -e {folder}\n  paceline train {arguments.name}\n"
        f"  paceline check {arguments.name}",
        markup=False,
    )
    return 0
