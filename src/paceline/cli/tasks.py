"""The command `paceline tasks`."""

from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.options import parse_options
from paceline.errors import UserError


@dataclass(frozen=True)
class TasksArguments:
    """List all tasks: those of Paceline and those of other installed packages."""


def run(argv: list[str], console: Console) -> int:
    parse_options(TasksArguments, argv, "tasks")
    from paceline.tasks import registry

    table = Table("task", "description", "CPU envs", "GPU envs", box=None, header_style="bold")
    for name in registry.names():
        try:
            entry = registry.find(name)
        except UserError as error:
            # An error in one package does not hide the tasks of the others.
            table.add_row(name, f"[red]{escape(str(error))}[/]", "", "")
        else:
            table.add_row(name, entry.summary, str(entry.cpu_envs), str(entry.gpu_envs))
    console.print(table)
    console.print(
        "\nThe numbers are the defaults of --num-envs.\n"
        "gymnasium:ID is any Gymnasium environment with continuous actions, for example\ngymnasium:HalfCheetah-v5."
    )
    return 0
