"""The commands `paceline tasks`, `play`, `export` and `doctor`."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, Positional

from paceline.cli.options import parse_options
from paceline.cli.viewer_options import ViewerOptions, check_viewer_options, given_option
from paceline.errors import UserError, counted
from paceline.process import interrupts
from paceline.run.config import Engine, EnvCount, option
from paceline.validation import Positive, check

if TYPE_CHECKING:
    from paceline.doctor import Finding

# Modules that import torch or MuJoCo are imported inside the functions, so that help is printed at once.

_STYLES = {"ok": "green", "advice": "yellow", "fails": "bold red"}


@dataclass(frozen=True)
class TasksArguments:
    """List all tasks: those of Paceline and those of other installed packages."""


def tasks(argv: list[str], console: Console) -> int:
    parse_options(TasksArguments, argv, "tasks")
    from paceline.tasks import registry
    from paceline.tasks.aliases import ALIASES

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
        "gymnasium:ID is a Gymnasium environment, for example gymnasium:HalfCheetah-v5.\n"
        "playground:NAME is an env of MuJoCo Playground: playground:WalkerWalk.\n"
        "mjlab:NAME is a task of mjlab, in an environment in which mjlab is installed.\n"
        "\n`paceline train` accepts names of Isaac Lab and mjlab, and prints what differs:\n"
    )
    table = Table("task", "names in Isaac Lab and mjlab", box=None, header_style="bold")
    for name in registry.names():
        if aliases := [alias for alias, known in ALIASES.items() if known.task == name]:
            table.add_row(name, "\n".join(aliases))
    console.print(table)
    return 0


@dataclass(frozen=True)
class PolicyArguments:
    """Options that select a trained policy."""

    run: Annotated[Positional[str], option("RUN")]
    """Directory of the run, one of its checkpoint files, or auto for the newest run under runs/."""
    task: Annotated[str | None, option("TASK")] = None
    """Task of a policy that RSL-RL trained outside of Paceline. RUN is then its file model_N.pt."""
    activation: Annotated[str | None, option("NAME")] = None
    """Activation function of the policy in model_N.pt, such as elu, relu or tanh, used with --task. The default is that
    of the task."""


@dataclass(frozen=True)
class PlayedPolicy(PolicyArguments):
    """Options of videos and of the viewer."""

    seed: int = 0
    """Seed of the initial states and commands, from 0 to 2^63 - 1."""


@dataclass(frozen=True)
class PlayArguments(PlayedPolicy, ViewerOptions):
    """Record a video of a trained policy in one env, or show it in a browser. No display is needed."""

    video: Annotated[Path | None, option("FILE")] = None
    """Output file with the extension .mp4. The default is videos/iteration_N.mp4 in the run's directory."""
    seconds: float = 10.0
    """Length of the video in seconds of simulated time; above 0, at most 3600."""
    width: int = 640
    """Width of the video in pixels; even, from 16 to 4096."""
    height: int = 480
    """Height of the video in pixels; even, from 16 to 4096."""
    cameras: Annotated[bool, FlagCreatePairsOff] = False
    """Record what the cameras of the task see, all streams side by side, instead of a view of the robot."""
    overlay: bool = True
    """Show velocities as arrows and, from a height of 240 pixels, the command and the rewards as text."""


def play(argv: list[str], console: Console) -> int:
    arguments = parse_options(PlayArguments, argv, "play")
    check(arguments, "--")
    check_viewer_options(arguments)
    interrupts.raise_keyboard_interrupt()
    if arguments.viewer:
        return _view(arguments, console)
    from paceline.view.play import record

    recording = record(**{name: value for name, value in vars(arguments).items() if not name.startswith("viewer")})
    console.print(
        f"{escape(str(recording.file))}: {recording.seconds:.1f} s, {counted(recording.num_ended, 'episode')} ended, "
        f"mean reward {recording.mean_reward:.3f} per step"
    )
    for number, episode in enumerate(recording.episodes, 1):
        for line in episode.lines(number):
            console.print(escape(line))
    return 0


def _view(arguments: PlayArguments, console: Console) -> int:
    if given := given_option(arguments, PlayArguments):
        raise UserError(f"{given} with --viewer: the viewer records no video; leave one of them out")
    from paceline.view.viewer_server import choose_address

    address = choose_address(arguments.viewer_host, arguments.viewer_port)
    # This imports viser.
    from paceline.view.viewer import view

    view(
        run=arguments.run,
        address=address,
        num_envs=arguments.viewer_envs,
        seed=arguments.seed,
        task=arguments.task,
        activation=arguments.activation,
        announce=partial(console.print, markup=False),
    )
    return 0


@dataclass(frozen=True)
class ExportArguments(PolicyArguments):
    """Export a trained policy, including its observation normalizer, to one file."""

    format: Literal["onnx", "torchscript"] = "onnx"
    """Format of the file. onnx needs the packages onnx and onnxscript."""
    output: Annotated[Path | None, option("FILE")] = None
    """Output file. The default is policy.onnx or policy.pt in the run's directory."""
    check: Annotated[bool, FlagCreatePairsOff] = False
    """Compare actions and controls of the file with those of the run in 1000 env steps.
    The exit code is 1 if they differ by more than 1e-5. For onnx it needs the package onnxruntime."""


def export(argv: list[str], console: Console) -> int:
    arguments = parse_options(ExportArguments, argv, "export")
    from paceline.export import export

    interrupts.raise_keyboard_interrupt()
    options = {name: value for name, value in vars(arguments).items() if name != "check"}
    file = export(**options)
    console.print(escape(str(file)))
    if not arguments.check:
        return 0
    from paceline.export_check import check_export

    checked = check_export(file, arguments.run, arguments.task, arguments.activation)
    if checked.passed:
        console.print(str(checked))
        return 0
    print(f"paceline: {file} does not act as the policy of {arguments.run}: {checked}", file=sys.stderr)
    return 1


@dataclass(frozen=True)
class DoctorArguments:
    """Check devices, versions, network, memory and run directory before training.

    Under a launcher, all ranks are checked. The exit code is 1 if training would fail.
    """

    task: Annotated[str | None, option("TASK")] = None
    """Task whose envs are checked to fit into memory. The default is no such check."""
    num_envs: Annotated[EnvCount | None, option("N")] = None
    """Number of envs per rank, from 1 to 2^24. The default depends on the task and on the device."""
    gpu_ids: Annotated[tuple[str, ...], option("ID|all|none")] = ()
    """GPU indices relative to CUDA_VISIBLE_DEVICES, as for `paceline train`."""
    engine: Engine = "auto"
    """Physics engine: auto, mujoco or warp."""
    run_dir: Annotated[Path | None, option("DIR")] = None
    """Directory that must be writable. The default is runs/."""
    timeout: Annotated[Positive, option("SECONDS")] = 60.0
    """Seconds to wait for the other ranks; above 0."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


def doctor(argv: list[str], console: Console) -> int:
    arguments = parse_options(DoctorArguments, argv, "doctor")
    check(arguments, "--")
    from paceline.distributed.launcher import adopt_jax_launcher
    from paceline.doctor import examine

    adopt_jax_launcher()
    interrupts.raise_keyboard_interrupt()
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    findings = examine(**options)
    if findings is None:
        return 0
    if arguments.json:
        print(as_json(findings))
    else:
        console.print(as_table(findings))
    return 1 if any(finding.status == "fails" for finding in findings) else 0


def as_table(findings: "Iterable[Finding]") -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("check", max_width=26, overflow="fold")
    table.add_column("found", overflow="fold")
    for finding in findings:
        remedy = Text(f"\n{finding.remedy}" if finding.remedy else "", style="italic")
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.name), Text(finding.value) + remedy)
    return table


def as_json(findings: "Iterable[Finding]") -> str:
    found = [asdict(finding) for finding in findings]
    return json.dumps({"ok": all(f["status"] != "fails" for f in found), "findings": found}, indent=2)
