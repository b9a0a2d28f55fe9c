"""Compare runs: a page, plots, a table in Markdown, and the results as JSON."""

import json
import textwrap
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from paceline.errors import UserError, counted
from paceline.experiments.findings import findings
from paceline.experiments.page import facts, html, markdown, results_table, runs_table
from paceline.experiments.run_data import RunData, read_run, without_logs
from paceline.experiments.statistics import Comparison, compare
from paceline.run.directory import write_atomically
from paceline.validation import parse_json, read_text

PAGE = "report.html"
_RESULTS = "results.json"
_MOST_DIFFERENCES = 4


def write_report(
    directory: Path,
    groups: dict[str, list[Path]],
    title: str,
    notes: list[str],
    is_emulated: bool = False,
) -> dict[str, Any]:
    """Compare groups of runs that differ only in their seed, by label. Write report.html, plots/*.png, results.json and
    results.md to a directory. Return the content of results.json.

    `notes` are sentences that the page shows. With `is_emulated`, one rank with more envs stands for several ranks, so
    neither efficiency nor times are compared.
    """
    check_installed()
    runs = {label: [read_run(path) for path in paths] for label, paths in groups.items()}
    return _write(directory, runs, title, notes, compare(runs, None, is_emulated))


def report(runs: list[Path], directory: Path, target_return: float | None = None) -> dict[str, Any]:
    """Group any runs by their settings, and compare the groups as `write_report` does. The logs of a scaling experiment
    may be among the paths of its runs."""
    check_installed()
    groups = group_runs([read_run(path) for path in without_logs(runs)])
    tasks = sorted({run.config.task for of_group in groups.values() for run in of_group})
    comparison = compare(groups, target_return, is_emulated=False)
    return _write(directory, groups, f"Comparison of runs: {', '.join(tasks)}", [], comparison)


def print_findings(results: dict[str, Any], console: Console) -> None:
    """Print the statements of results.json. On a terminal, lines end between words."""
    for finding in results["findings"]:
        console.print(f"[bold]{escape(finding['topic'])}[/]")
        for statement in finding["statements"]:
            lines = textwrap.wrap(statement, max(console.width - 2, 20)) if console.is_terminal else [statement]
            console.print(escape("\n".join(f"  {line}" for line in lines)))


def check_installed() -> None:
    """Raise UserError if the plots cannot be drawn."""
    try:
        import_module("paceline.experiments.plots")
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs {error.name}: pip install 'paceline[report]'") from None


def _write(
    directory: Path, groups: dict[str, list[RunData]], title: str, notes: list[str], comparison: Comparison
) -> dict[str, Any]:
    from paceline.experiments import plots

    notes = [*notes, *_run_notes(groups)]
    found, table = findings(comparison), results_table(comparison)
    drawn = plots.draw(groups, comparison)
    results = {
        "title": title,
        "notes": notes,
        "findings": [asdict(finding) for finding in found],
        **asdict(comparison),
        "runs": {label: [str(run.path) for run in runs] for label, runs in groups.items()},
        "plots": [f"{plot.name}.png" for plot in drawn],
    }
    page = html(title, facts(groups), notes, found, {"Results": table, "Runs": runs_table(groups)}, drawn)
    try:
        (directory / "plots").mkdir(parents=True, exist_ok=True)
        for plot in drawn:
            write_atomically(directory / "plots" / f"{plot.name}.png", plot.png)
        # results.json lists the plots, so those of the earlier report are removed before it is replaced.
        for name in _plots_of_earlier_report(directory) - set(results["plots"]):
            (directory / "plots" / name).unlink(missing_ok=True)
        write_atomically(
            directory / "results.md", markdown(title, facts(groups), notes, found, {"Results": table}).encode()
        )
        write_atomically(directory / _RESULTS, json.dumps(results, indent=2, allow_nan=False).encode() + b"\n")
        write_atomically(directory / PAGE, page.encode())
    except OSError as error:
        raise UserError(f"cannot write the report to {directory}: {error.strerror}") from None
    return results


def _plots_of_earlier_report(directory: Path) -> set[str]:
    """Return the names of the plots that the report in a directory has written; none if there is no readable report."""
    try:
        names = parse_json(read_text(directory / _RESULTS)).get("plots")
    except (OSError, ValueError):
        return set()
    # The file may have been edited: only names of PNG files in plots/ are accepted.
    listed = names if isinstance(names, list) else []
    return {name for name in listed if isinstance(name, str) and name == Path(name).name and name.endswith(".png")}


def _run_notes(groups: dict[str, list[RunData]]) -> list[str]:
    """Return sentences about runs that cannot be compared without reservation."""
    notes = list[str]()
    for label, runs in groups.items():
        for run in runs:
            if run.status != "completed":
                done = counted(f"{run.iterations:,}", "iteration")
                notes.append(f"{run.path} has the status {run.status}; it has done {done}.")
            if len({session.world_size for session in run.sessions}) > 1:
                sizes = ", ".join(str(session.world_size) for session in run.sessions)
                notes.append(f"{run.path} changed its number of ranks: {sizes}. It counts as a run of the last one.")
        seeds = [run.config.seed for run in runs]
        if len(set(seeds)) < len(seeds):
            notes.append(f"Runs of {label} have the same seed: the intervals do not show the variation between seeds.")
    return notes


def group_runs(runs: list[RunData]) -> dict[str, list[RunData]]:
    """Return runs that differ only in their seed together, by a label that names what differs between the groups."""
    groups = dict[str, list[RunData]]()
    for run in sorted(runs, key=lambda run: (run.facts.world_size, run.facts.total_envs)):
        groups.setdefault(repr(_settings(run)), []).append(run)
    settings = [_settings(of_group[0]) for of_group in groups.values()]
    common = set[str].intersection(*(set(each) for each in settings))
    differing = [name for name in settings[0] if name in common and len({repr(each[name]) for each in settings}) > 1]
    # Envs are not part of the label if they follow from the ranks.
    if "envs per rank" not in differing:
        differing = [name for name in differing if name != "envs"]
    labels = [_label(each, [name for name in differing if name != "envs per rank"]) for each in settings]
    numbered = [label if labels.count(label) == 1 else f"{label} ({index + 1})" for index, label in enumerate(labels)]
    return dict(zip(numbered, groups.values(), strict=True))


def _settings(run: RunData) -> dict[str, Any]:
    ranks, envs = run.facts.world_size, run.facts.total_envs
    return {
        "ranks": ranks,
        "envs": envs,
        "envs per rank": envs / ranks,
        "device": run.device,
    } | run.options()


def _label(settings: dict[str, Any], names: list[str]) -> str:
    if not names:
        return str(settings["task"])
    parts = [
        counted(f"{value:,}", name.removesuffix("s")) if name in ("ranks", "envs") else f"{name} {value}"
        for name, value in ((name, settings[name]) for name in names[:_MOST_DIFFERENCES])
    ]
    # Without commas, because sentences list several labels.
    return " / ".join(parts) + (" / ..." if len(names) > _MOST_DIFFERENCES else "")
