"""The command `paceline check`."""

import dataclasses
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le
from rich.console import Console
from rich.text import Text
from tyro.conf import FlagCreatePairsOff

from paceline.cli.options import parse_options
from paceline.errors import UserError, counted
from paceline.process import interrupts
from paceline.run.config import option, plain
from paceline.validation import check as check_ranges

if TYPE_CHECKING:
    from paceline.check import Check

_STYLES = {"ok": "green", "fails": "bold red", "not run": "yellow"}


@dataclass(frozen=True, kw_only=True)
class CheckArguments:
    """Check a task or an env against its contract, on the CPU.

    It runs random actions and prints one line per check, then what to change.
    The exit code is 0 if nothing was found, and 1 otherwise.
    With a TASK, this page also lists the options of the task.
    """

    num_envs: Annotated[int, Ge(2), Le(2**16), option("N")] = 8
    """Number of envs, from 2 to 65536. They are also divided among two ranks."""
    steps: Annotated[int, Ge(1), Le(2**20), option("N")] = 100
    """Number of env steps with random actions, from 1 to 2^20. Ends of episodes are checked if they occur."""
    seed: Annotated[int, Ge(0), Le(2**63 - 1), option("S")] = 0
    """Seed of the envs and of the actions, from 0 to 2^63 - 1."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON instead of text."""


def check(argv: list[str], console: Console) -> int:
    arguments, task, notes = _parse(argv)
    check_ranges(arguments, "--")
    from paceline.check import check

    interrupts.raise_keyboard_interrupt()
    checks = check(task, plain(arguments.env), arguments.num_envs, arguments.steps, arguments.seed)
    found = [(each.name, text) for each in checks for text in each.findings]
    if arguments.json:
        print(json.dumps({"task": task, "ok": not found, "checks": [asdict(each) for each in checks]}, indent=2))
        return 1 if found else 0
    for note in notes:
        console.print(note, markup=False)
    for each in checks:
        console.print(_line(each))
    for name, text in found:
        console.print(f"\n{name}: {text}", markup=False)
    console.print(f"\n{task}: {counted(len(found), 'finding') if found else 'nothing was found'}", markup=False)
    return 1 if found else 0


def _line(check: "Check") -> Text:
    line = Text(check.state.ljust(9), style=_STYLES[check.state]) + Text(check.name, style="none")
    return line + Text(f" ({check.note})" if check.note else "", style="dim")


def _parse(argv: list[str]) -> tuple[Any, str, tuple[str, ...]]:
    """Return the arguments, with the options of the task as `env`, the name of the task, and what to print about it."""
    if not argv or argv[0].startswith("-"):
        parse_options(CheckArguments, argv, "check TASK")
        raise UserError("no task given: use paceline check TASK; `paceline tasks` lists the tasks")
    from paceline.cli.train_arguments import replace_alias
    from paceline.tasks import registry

    task, rest, notes = replace_alias(argv[0], argv[1:])
    entry = registry.find(str(task))
    fields = [("env", entry.task, dataclasses.field(default=entry.task()))]
    kind = dataclasses.make_dataclass("Check", fields, bases=(CheckArguments,), frozen=True, kw_only=True)
    kind.__doc__ = (
        f"Check the task {task} against its contract, on the CPU.\n\n{entry.summary[:1].upper()}{entry.summary[1:]}."
    )
    return parse_options(kind, rest, f"check {task}"), str(task), notes
