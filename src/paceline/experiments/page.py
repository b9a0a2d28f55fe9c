"""The page and the tables of a report."""

from base64 import b64encode
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING

from paceline import __version__
from paceline.errors import counted
from paceline.experiments.findings import Finding
from paceline.experiments.formatting import duration, number, percent, with_interval
from paceline.experiments.run_data import RunData
from paceline.experiments.statistics import Comparison, GroupResult

if TYPE_CHECKING:
    from paceline.experiments.plots import Plot

_TEMPLATE = files("paceline.experiments").joinpath("page.html.jinja")
Table = tuple[list[str], list[list[str]]]
"""Header and rows."""


def results_table(comparison: Comparison) -> Table:
    """Return the table with a column for each group. Rows without any value are left out."""
    bases = {group.baseline.label for group in comparison.groups if group.baseline}
    reference = {group.label: "1" if group.label in bases else "" for group in comparison.groups}
    of_ranks, effort = not comparison.is_emulated, "iterations" if comparison.is_emulated else "time"
    target = f"{effort} to return {number(comparison.target.value)}" if comparison.target else ""
    quantities: dict[str, Callable[[GroupResult], str]] = {
        "ranks" if of_ranks else "measured ranks": lambda group: str(group.world_size),
        "envs": lambda group: f"{group.total_envs:,}",
        "runs": lambda group: str(len(group.seeds)),
        "iterations": lambda group: f"{group.iterations:,}",
        "final return": lambda group: with_interval(group.final_return),
        f"final {comparison.success_name}": lambda group: with_interval(group.final_success),
        "env steps/s": lambda group: with_interval(group.steps_per_second),
        "speed-up": lambda group: f"{group.baseline.speedup:.2f}" if group.baseline else reference[group.label],
        "efficiency": lambda group: f"{group.baseline.efficiency:.2f}" if group.baseline else reference[group.label],
        f"time to {comparison.common_env_steps:,} env steps": lambda group: (
            with_interval(group.seconds_to_common_steps, duration) if of_ranks else ""
        ),
        target: lambda group: _until_target(group, effort),
        "synchronization": lambda group: _sync_share(group) if of_ranks else "",
        **{
            f"std of {name}": lambda group, name=name: with_interval(group.losses[name]["std"])
            for name in ("loss/value", "loss/surrogate")
            if all(name in group.losses for group in comparison.groups)
        },
        "memory, GiB": lambda group: f"{group.memory_mib / 1024:.2f}",
    }
    rows = [[name, *(show(group) for group in comparison.groups)] for name, show in quantities.items()]
    return ["", *(group.label for group in comparison.groups)], [row for row in rows if any(row[1:])]


def _until_target(group: GroupResult, effort: str) -> str:
    target = group.target
    if target is None:
        return ""
    runs = f" ({target.reached} of {len(group.seeds)} runs)" if 0 < target.reached < len(group.seeds) else ""
    shown = with_interval(target.seconds, duration) if effort == "time" else with_interval(target.iterations)
    return (shown or "not reached") + runs


def _sync_share(group: GroupResult) -> str:
    return "not measured" if group.sync_share is None else percent(group.sync_share)


def runs_table(groups: dict[str, list[RunData]]) -> Table:
    """Return the table of all runs."""
    rows = [
        [label, str(run.path), str(run.config.seed), f"{run.iterations:,}", run.status, run.device]
        for label, runs in groups.items()
        for run in runs
    ]
    return ["group", "run", "seed", "iterations", "status", "device"], rows


def facts(groups: dict[str, list[RunData]]) -> str:
    """Return one line about what was trained."""
    runs = [run for of_group in groups.values() for run in of_group]
    names = {
        "task": [run.config.task for run in runs],
        "learner": [run.config.learner for run in runs],
        "engine": [run.facts.engine for run in runs],
        "device": [run.device for run in runs],
    }
    stated = [f"{name} {', '.join(sorted(set(values)))}" for name, values in names.items()]
    return "; ".join([counted(f"{len(runs):,}", "run"), *stated]).removesuffix(".") + "."


def markdown(title: str, subtitle: str, notes: list[str], found: list[Finding], tables: dict[str, Table]) -> str:
    """Return the results as Markdown. Several tables have headings."""
    statements = [f"- **{finding.topic}** {' '.join(finding.statements)}" for finding in found]
    lines = [f"# {title}", "", subtitle, "", *statements, ""]
    for name, (header, rows) in tables.items():
        lines += [f"## {name}", ""] if len(tables) > 1 else []
        cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (header, *rows)]
        lines += [cells[0], "|---" * len(header) + "|", *cells[1:], ""]
    return "\n".join([*lines, *notes, ""])


def html(
    title: str,
    subtitle: str,
    notes: list[str],
    found: list[Finding],
    tables: dict[str, Table],
    plots: "list[Plot]",
) -> str:
    """Return a page that needs no other file and no network."""
    from jinja2 import Environment, StrictUndefined

    names = dict.fromkeys(plot.section for plot in plots)
    sections = {name: [plot for plot in plots if plot.section == name] for name in names}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["base64"] = lambda png: b64encode(png).decode()
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        subtitle=subtitle,
        notes=notes,
        findings=found,
        tables=tables,
        sections=sections,
        version=__version__,
    )
