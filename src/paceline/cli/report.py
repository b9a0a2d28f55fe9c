"""The command `paceline report`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import FiniteFloat
from rich.console import Console
from rich.markup import escape
from tyro.conf import FlagCreatePairsOff, Positional

from paceline.cli.options import parse_options
from paceline.errors import UserError
from paceline.process import interrupts
from paceline.run.config import option
from paceline.validation import check


@dataclass(frozen=True)
class ReportArguments:
    """Compare runs: learning curves, speed, scaling, losses and memory.

    Runs that differ only in their seed form a group.
    The page report.html needs no network; plots/*.png, results.md and results.json are written beside it.
    """

    runs: Annotated[Positional[tuple[Path, ...]], option("RUN...")]
    """Directories of the runs, at least one."""
    output: Annotated[Path, option("DIR")] = Path("report")
    """Directory of the report. Files of an earlier report are replaced."""
    target_return: Annotated[FiniteFloat | None, option("R")] = None
    """Mean return of an episode whose time is compared. The default lies at 90 % of the way from the mean first
    return to the lowest mean return of a group in the last tenth of its iterations."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print the results as JSON instead of their summary."""


def report(argv: list[str], console: Console) -> int:
    arguments = parse_options(ReportArguments, argv, "report")
    check(arguments, "--")
    if not arguments.runs:
        raise UserError("no run: give the directories of one or more runs")
    from paceline.experiments.report import PAGE, print_findings, report

    interrupts.raise_keyboard_interrupt()
    results = report(list(arguments.runs), arguments.output, arguments.target_return)
    if arguments.json:
        print(json.dumps(results, indent=2))
        return 0
    print_findings(results, console)
    console.print(escape(f"Wrote {arguments.output / PAGE}"))
    return 0
