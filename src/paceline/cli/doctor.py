"""The command `paceline doctor`."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import FlagCreatePairsOff

from paceline.cli.options import option, parse_options
from paceline.process import interrupts
from paceline.validation import Count, Positive, check

if TYPE_CHECKING:
    from paceline.doctor import Finding

_STYLES = {"ok": "green", "advice": "yellow", "fails": "bold red"}


@dataclass(frozen=True)
class DoctorArguments:
    """Check devices, versions, network, memory and run directory before training.

    Under a launcher, all ranks are checked. Exits with 1 if training would fail.
    """

    task: Annotated[str | None, option("TASK")] = None
    """Also check that the envs of this task fit into memory."""
    num_envs: Annotated[Count | None, option("N")] = None
    """Number of envs per rank, at least 1. The default depends on the task and on the device."""
    gpu_ids: Annotated[tuple[str, ...], option("ID|all|none")] = ()
    """GPU indices relative to CUDA_VISIBLE_DEVICES, as for `paceline train`."""
    engine: str = "auto"
    """Physics engine: auto, mujoco or warp."""
    run_dir: Annotated[Path | None, option("DIR")] = None
    """Directory that must be writable. The default is runs/."""
    timeout: Annotated[Positive, option("SECONDS")] = 60.0
    """Seconds to wait for the other ranks; above 0."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


def run(argv: list[str], console: Console) -> int:
    from paceline.cli.train import adopt_jax_launcher

    adopt_jax_launcher()
    arguments = parse_options(DoctorArguments, argv, "doctor")
    check(arguments, "--")
    from paceline import doctor

    interrupts.raise_keyboard_interrupt()
    findings = doctor.examine(
        arguments.task,
        arguments.num_envs,
        arguments.gpu_ids,
        arguments.engine,
        arguments.run_dir,
        arguments.timeout,
    )
    if findings is None:
        return 0
    if arguments.json:
        print(as_json(findings))
    else:
        console.print(table(findings))
    return 1 if any(finding.status == "fails" for finding in findings) else 0


def table(findings: "Iterable[Finding]") -> Table:
    """Return a table for a console."""
    result = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    result.add_column("")
    result.add_column("check", max_width=26, overflow="fold")
    result.add_column("found", overflow="fold")
    for finding in findings:
        remedy = Text(f"\n{finding.remedy}" if finding.remedy else "", style="italic")
        status = Text(finding.status, style=_STYLES[finding.status])
        result.add_row(status, Text(finding.name), Text(finding.value) + remedy)
    return result


def as_json(findings: "Iterable[Finding]") -> str:
    found = [asdict(finding) for finding in findings]
    return json.dumps({"ok": all(f["status"] != "fails" for f in found), "findings": found}, indent=2)
