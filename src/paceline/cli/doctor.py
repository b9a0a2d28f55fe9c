"""The command `paceline doctor`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff

from paceline.cli.options import option, parse_options
from paceline.process import interrupts


@dataclass(frozen=True)
class DoctorArguments:
    """Check devices, versions, network, memory and run directory before training.

    Under a launcher, all ranks are checked. Exits with 1 if training would fail.
    """

    task: Annotated[str | None, option("TASK")] = None
    """Also check that the envs of this task fit into memory."""
    num_envs: Annotated[int | None, option("N")] = None
    """Number of envs per rank, at least 1. The default depends on the task and on the device."""
    gpu_ids: Annotated[tuple[str, ...], option("ID|all|none")] = ()
    """GPU indices relative to CUDA_VISIBLE_DEVICES, as for `paceline train`."""
    engine: str = "auto"
    """Physics engine: auto, mujoco or warp."""
    run_dir: Annotated[Path | None, option("DIR")] = None
    """Directory that must be writable. The default is runs/."""
    timeout: Annotated[float, option("SECONDS")] = 60.0
    """Seconds to wait for the other ranks; above 0."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


def run(argv: list[str], console: Console) -> int:
    from paceline.cli.train import adopt_jax_launcher

    adopt_jax_launcher()
    arguments = parse_options(DoctorArguments, argv, "doctor")
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
        print(doctor.as_json(findings))
    else:
        console.print(doctor.table(findings))
    return 1 if any(finding.status == "fails" for finding in findings) else 0
