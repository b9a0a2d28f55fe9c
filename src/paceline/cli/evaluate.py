"""The command `paceline eval`."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table
from tyro.conf import FlagCreatePairsOff

from paceline.cli.commands import PolicyArguments
from paceline.cli.options import parse_options
from paceline.errors import counted
from paceline.process import interrupts
from paceline.run.config import Engine, option
from paceline.validation import check

if TYPE_CHECKING:
    from paceline.evaluate import Evaluation
    from paceline.training.evaluation import Estimate

_LABELS = {"return": "return", "length": "episode length, steps", "ended_early": "fraction that ended early"}
_METRIC_PREFIX = "measure/"


@dataclass(frozen=True)
class EvalArguments(PolicyArguments):
    """Evaluate a trained policy over complete episodes, without exploration noise.

    Commands have their full range, and curricula are at their end.
    Tasks with randomization are evaluated with it and without it.
    The means with 95 % confidence intervals are written to RUN/eval/.
    """

    episodes: Annotated[int, Ge(2), Le(2**24), option("N")] = 512
    """Number of episodes, from 2 to 2^24. It is rounded up to a multiple of the number of envs that run at once."""
    engine: Engine = "auto"
    """Physics engine: auto, mujoco (on the CPU) or warp (MuJoCo Warp, on the GPU if there is one)."""
    seed: Annotated[Annotated[int, Ge(0), Le(2**63 - 1)] | None, option("S")] = None
    """Seed of the episodes, from 0 to 2^63 - 1. The default is that of the run plus 1000003."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


def eval(argv: list[str], console: Console) -> int:
    arguments = parse_options(EvalArguments, argv, "eval")
    check(arguments, "--")
    from paceline.evaluate import evaluate

    interrupts.raise_keyboard_interrupt()
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        lines = dict[str, TaskID]()

        def progress(what: str, done: int, total: int) -> None:
            if what not in lines:
                lines[what] = bar.add_task(f"{what} envs, steps", total=total)
            bar.update(lines[what], completed=done)

        evaluation, file = evaluate(**options, progress=progress)
    if arguments.json:
        print(json.dumps(asdict(evaluation), indent=2))
        return 0
    policy = f"{evaluation.task}, iteration {evaluation.iteration}"
    console.print(escape(f"{policy}: {counted(evaluation.episodes, 'episode')} without exploration noise"))
    console.print(f"engine {evaluation.engine}, seed {evaluation.seed}")
    console.print(table_of(evaluation))
    console.print(escape(f"Wrote {file}"))
    return 0


def table_of(evaluation: "Evaluation") -> Table:
    """Return a table of all estimates except those of the reward terms. Two columns fit into 80 characters."""
    columns = {"nominal": evaluation.nominal, "randomized": evaluation.randomized}
    columns = {name: estimates for name, estimates in columns.items() if estimates}
    table = Table("mean and 95 % interval", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name in next(iter(columns.values())):
        if not name.startswith("reward/"):
            label = _LABELS.get(name, name.removeprefix(_METRIC_PREFIX).replace("_", " "))
            table.add_row(label, *(_show(estimates[name]) for estimates in columns.values()))
    return table


def _show(estimate: "Estimate") -> str:
    from paceline.experiments.formatting import number

    return f"{number(estimate.mean)} ({number(estimate.low)} to {number(estimate.high)})"
