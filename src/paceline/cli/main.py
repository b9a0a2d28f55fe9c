"""The command line: parse, call one function, print for people."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.markup import escape
from tyro.conf import FlagCreatePairsOff, Positional, arg

from paceline import __version__
from paceline.cli.train_arguments import parse, read
from paceline.errors import UserError, unknown
from paceline.process import interrupts, streams

if TYPE_CHECKING:
    from paceline.run.config import TrainConfig
    from paceline.run.directory import RunDir

# Heavy imports (torch, MuJoCo) stand inside the commands, so that help comes at once.

# How long a rank that refuses its input waits for the others before it ends; the main rank has printed the refusal.
_REPORT_SECONDS, _MAIN_REPORT_SECONDS = 60.0, 10.0

OVERVIEW = f"""Paceline {__version__}: robot policies by reinforcement learning in thousands of MuJoCo worlds.

  paceline train TASK     train a policy; --resume RUN|auto goes on with a run
  paceline tasks          what there is to train
  paceline play RUN       watch a trained policy, as a video
  paceline export RUN     a trained policy as ONNX or TorchScript
  paceline doctor         what would go wrong here, before it does

Each has its own --help.  Start with:  paceline train cartpole
"""


@dataclass(frozen=True)
class PlayArguments:
    """Watch a trained policy: a video, made without a screen."""

    run: Positional[str]
    """The run's directory, one of its checkpoint files, or auto for the newest."""
    task: Annotated[str | None, arg(metavar="TASK")] = None
    """For a policy that RSL-RL trained elsewhere, RUN being its model_N.pt: the task that it is for."""
    activation: str | None = None
    """Of such a policy, by RSL-RL's name, because the file does not say it; by default the task's for rsl_rl."""
    video: Annotated[Path | None, arg(metavar="FILE")] = None
    """Where the mp4 goes; by default into the run's videos/."""
    seconds: float = 10.0
    """How much of the robot's time to show."""
    width: int = 640
    height: int = 480
    overlay: bool = True
    """Show the command and the rewards, in pictures of 240 pixels and more, and the velocity as arrows."""
    seed: int = 0
    """Of the starting states."""


@dataclass(frozen=True)
class ExportArguments:
    """Write a trained policy, its observation normaliser folded in, for use elsewhere."""

    run: Positional[str]
    """The run's directory, one of its checkpoint files, or auto for the newest."""
    task: Annotated[str | None, arg(metavar="TASK")] = None
    """For a policy that RSL-RL trained elsewhere, RUN being its model_N.pt: the task that it is for."""
    activation: str | None = None
    """Of such a policy, by RSL-RL's name, because the file does not say it; by default the task's for rsl_rl."""
    format: Literal["onnx", "torchscript"] = "onnx"
    output: Annotated[Path | None, arg(metavar="FILE")] = None
    """By default policy.onnx or policy.pt in the run's directory."""


@dataclass(frozen=True)
class DoctorArguments:
    """Check what training needs: devices, versions, network, memory, run directory. Under a launcher it checks all
    ranks. Exits with 1 if something will fail."""

    task: Annotated[str | None, arg(metavar="TASK")] = None
    """Check also that this task's worlds fit into memory."""
    num_envs: Annotated[int | None, arg(metavar="N")] = None
    """Worlds per rank; by default what suits the task and the device."""
    gpu_ids: Annotated[tuple[str, ...], arg(metavar="ID|all|none")] = ()
    """As for train."""
    engine: str = "auto"
    """As for train."""
    run_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """Check that this can be written to; by default runs/."""
    timeout_seconds: Annotated[float, arg(name="timeout", metavar="SECONDS")] = 60.0
    """As for train."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class TasksArguments:
    """List the tasks, our own and those of other installed packages."""


def main() -> int:
    """Run the command that `sys.argv` gives; return the exit code."""
    # Torch's threads spin between the operations of an update, but not for long: the physics needs their cores next.
    # Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    output = streams.install()
    console, words = Console(highlight=False, soft_wrap=True), sys.argv[1:]
    try:
        code = _dispatch(words, console)
    except UserError as error:
        _print_refusal(error, words[0])
        code = 2
    except SystemExit as end:
        # A help text was printed.
        code = int(end.code or 0)
    sys.stdout.flush()
    # Training goes on without its output, and a reader that has closed its pipe has read enough.
    if output.error and words[:1] != ["train"] and not isinstance(output.error, BrokenPipeError):
        print(f"paceline: cannot write to standard output: {output.error.strerror}", file=sys.stderr)
        code = code or 1
    return code


def _print_refusal(error: UserError, command: str) -> None:
    """Print an error once for all ranks of a run, and report one that the others do not know of."""
    if command != "train":
        print(f"paceline: {error}", file=sys.stderr)
        return
    from paceline.distributed.failure import PeerLostError
    from paceline.distributed.group import report_refusal
    from paceline.distributed.rank import Rank, this_rank

    try:
        rank = this_rank(())
    except UserError:
        rank = Rank()
    if rank.is_main:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
    if error.reported or not rank.launched:
        return
    try:
        report_refusal(rank, str(error), _MAIN_REPORT_SECONDS if rank.is_main else _REPORT_SECONDS)
    except (PeerLostError, UserError):
        if not rank.is_main:
            print(f"paceline: {error}; rank {rank.index} on {rank.host}", file=sys.stderr)


def _adopt_jax_launcher() -> None:
    if "JAX_RANK" in os.environ:
        from paceline.distributed.rank import adopt_jax_launcher

        adopt_jax_launcher()


def _dispatch(words: list[str], console: Console) -> int:
    commands = {"train": _train, "tasks": _tasks, "play": _play, "export": _export, "doctor": _doctor}
    if not words or words[0] in ("-h", "--help"):
        print(OVERVIEW, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in commands:
        raise unknown("command", words[0], commands)
    return commands[words[0]](words[1:], console)


def _train(words: list[str], console: Console) -> int:
    _adopt_jax_launcher()
    order = read(words)
    task, arguments, config, run = order.task, order.arguments, order.config, order.run

    import torch

    from paceline.distributed.rank import is_secondary_worker, under_elastic_agent, under_launcher
    from paceline.run import checkpoint
    from paceline.run.directory import RunDir
    from paceline.train import RunCompletedError, TrainingFailedError, train

    if not arguments.gpu_ids and not config.gpu_ids and config.engine == "auto" and torch.cuda.is_available():
        console.print("A GPU is here, but not MuJoCo Warp (pip install mujoco-warp): training on the CPU.")
    if arguments.distributed:
        _refuse_without_launcher()
    ranks = _ranks(arguments, config)
    launches = not under_launcher() and (ranks > 1 or arguments.max_restarts or arguments.launcher == "torchrunx")
    resume_from = None
    if run is None:
        # The ranks must use the directory that the launcher chooses, so no other process may choose the same.
        unnamed = launches and arguments.run_dir is None
        run = RunDir.unique(task) if unnamed else RunDir.named(arguments.run_dir, task)
    elif arguments.run_dir:
        raise UserError(f"--run-dir {arguments.run_dir} with --resume: a resumed run stays in its own directory")
    else:
        resume_from = checkpoint.chosen(arguments.resume, run.checkpoints)
    if launches:
        # A name that stands for a run at present, such as auto, must mean the same run after a restart.
        place = (
            ["--run-dir", str(run.path)] if arguments.resume is None else ["--resume", _named(arguments.resume, run)]
        )
        return _launch([*words, *place], arguments, config, run, ranks)
    main = not is_secondary_worker()
    for note in order.notes if main else ():
        console.print(escape(note))
    try:
        result = train(config, run, console, resume_from)
    except RunCompletedError as done:
        if main:
            console.print(escape(str(done)))
        return 0
    except TrainingFailedError as error:
        # Of a failure elsewhere the main rank has told already.
        if main:
            print(f"paceline: training failed: {error}", file=sys.stderr)
        return 1
    if main:
        _summarise(result, console)
    # An elastic agent restarts workers that do not end with 0; whether the run was interrupted it knows itself.
    return 0 if result["status"] == "completed" or under_elastic_agent() else interrupts.EXIT_CODE


def _named(resume: str, run: "RunDir") -> str:
    """Return what --resume names, as a path: a checkpoint file, or the run's directory."""
    return resume if Path(resume).is_file() else str(run.path)


def _ranks(arguments: Any, config: "TrainConfig") -> int:
    """How many to start on this machine, or on each of --hosts."""
    gpus, asked = len(config.gpu_ids), arguments.ranks
    if asked is not None and asked < 1:
        raise UserError(f"--ranks {asked} must be at least 1")
    if gpus and asked not in (None, gpus):
        raise UserError(f"--ranks {asked} with {gpus} GPUs: each GPU has one rank; name a GPU twice to share it")
    if arguments.max_restarts < 0:
        raise UserError(f"--max-restarts {arguments.max_restarts} must not be negative")
    if arguments.hosts and arguments.launcher != "torchrunx":
        raise UserError(
            f"--hosts {' '.join(arguments.hosts)} needs --launcher torchrunx; "
            "or start python -m torch.distributed.run on each host"
        )
    if arguments.launcher == "torchrunx" and arguments.max_restarts:
        raise UserError("--max-restarts: torchrunx starts nothing anew; use --launcher elastic")
    return asked or gpus or 1


def _launch(words: list[str], arguments: Any, config: "TrainConfig", run: "RunDir", ranks: int) -> int:
    """Start the ranks and wait for them. They print; the launcher prints only what no rank could."""
    from paceline.build import resolve
    from paceline.distributed.failure import REFUSAL_EXIT_CODE
    from paceline.launch import local, torchrunx

    resolve(config)
    before = run.result()
    try:
        if arguments.launcher == "torchrunx":
            torchrunx.launch(["train", *words], ranks, arguments.hosts)
        else:
            local.launch(["train", *words], ranks, arguments.max_restarts)
    except KeyboardInterrupt:
        if run.result() == before:
            # No rank has started to train.
            raise
        if not run.is_held() and run.mark_ended("interrupted"):
            print(f"paceline: interrupted; {run.path} continues from its newest checkpoint", file=sys.stderr)
    except local.RankFailedError as error:
        if error.exit_code == REFUSAL_EXIT_CODE:
            return error.exit_code
        # Another process may have begun to train in the directory.
        if (not run.is_held() and run.mark_ended("failed", str(error))) or error.was_killed:
            print(f"paceline: training failed: {error}", file=sys.stderr)
        interrupted = error.exit_code == interrupts.EXIT_CODE or run.result().get("status") == "interrupted"
        return interrupts.EXIT_CODE if interrupted else 1
    # The directory may be on another host; there a rank that was interrupted ends with its own exit code.
    return 0 if run.result().get("status", "completed") == "completed" else interrupts.EXIT_CODE


def _refuse_without_launcher() -> None:
    from paceline.distributed.rank import under_launcher

    if not under_launcher():
        raise UserError(
            "--distributed is for workers under a launcher: python -m torch.distributed.run --nproc_per_node=K "
            "-m paceline train TASK --distributed; without a launcher leave it out"
        )


def _summarise(result: dict[str, Any], console: Console) -> None:
    done = f"[bold]{result['status']}[/] after {result['iterations']} iterations"
    console.print(
        f"\n{done}, {result['env_steps']:,} env steps in {result['train_seconds']:.1f} s "
        f"({result['steps_per_second']:,.0f} steps/s)"
    )
    if result["mean_return"] is not None:
        console.print(
            f"  return   {result['mean_return']:.1f}, episode length {result['mean_length']:.0f} "
            f"of {result['max_length']}"
        )
    for name, mean in result["measures"].items():
        console.print(f"  {name.replace('_', ' ')} {mean:.3f}")
    for fault, meaning in (("failures", "worlds blew up and were reset"), ("overflows", "steps ran out of contacts")):
        if result[fault]:
            console.print(f"  [yellow]{result[fault]} {meaning}[/]")
    words = (str(result["run"]), _program("paceline"), _program("tensorboard"))
    run, paceline, tensorboard = (escape(shlex.quote(word)) for word in words)
    console.print(f"  run      {run}")
    if result["status"] == "interrupted":
        console.print(f"  go on    {paceline} train --resume {run}")
    console.print(f"  watch    {paceline} play {run} --video {result['task']}.mp4")
    console.print(f"  curves   {tensorboard} --logdir {run}")


def _program(name: str) -> str:
    """How to call this environment's program from where the user is, also if the environment is not activated."""
    here = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not here.exists() or (found and Path(found).samefile(here)):
        return name
    near = os.path.relpath(here)
    return str(here) if near.startswith("..") else near


def _tasks(words: list[str], console: Console) -> int:
    parse(TasksArguments, words, "tasks")
    from rich.table import Table

    from paceline.tasks import registry

    table = Table("task", "what it is", "on CPU", "on GPU", box=None, header_style="bold")
    for name in registry.names():
        try:
            entry = registry.find(name)
        except UserError as error:
            # One package's fault should not hide the others' tasks.
            table.add_row(name, f"[red]{escape(str(error))}[/]", "", "")
        else:
            table.add_row(name, entry.summary, str(entry.cpu_envs), str(entry.gpu_envs))
    console.print(table)
    console.print("\nThe numbers are the worlds that --num-envs has by default.")
    console.print(
        "gymnasium:ID is any Gymnasium environment with continuous actions, such as gymnasium:HalfCheetah-v5."
    )
    return 0


def _play(words: list[str], console: Console) -> int:
    arguments = parse(PlayArguments, words, "play")
    from paceline.build import Elsewhere
    from paceline.view.play import record

    interrupts.raise_keyboard_interrupt()
    shown = record(
        arguments.run,
        arguments.video,
        arguments.seconds,
        arguments.width,
        arguments.height,
        arguments.seed,
        Elsewhere(arguments.task, arguments.activation),
        arguments.overlay,
    )
    console.print(
        f"{escape(str(shown.file))}: {shown.seconds:.1f} s, {shown.episodes} episodes ended, "
        f"mean reward {shown.mean_reward:.3f} per step"
    )
    for number, episode in enumerate(shown.log, 1):
        for line in episode.lines(number):
            console.print(escape(line), soft_wrap=True)
    return 0


def _export(words: list[str], console: Console) -> int:
    arguments = parse(ExportArguments, words, "export")
    from paceline.build import Elsewhere
    from paceline.export import export

    interrupts.raise_keyboard_interrupt()
    elsewhere = Elsewhere(arguments.task, arguments.activation)
    console.print(escape(str(export(arguments.run, arguments.format, arguments.output, elsewhere))))
    return 0


def _doctor(words: list[str], console: Console) -> int:
    _adopt_jax_launcher()
    arguments = parse(DoctorArguments, words, "doctor")
    from paceline import doctor

    interrupts.raise_keyboard_interrupt()
    findings = doctor.examine(
        arguments.task,
        arguments.num_envs,
        arguments.gpu_ids,
        arguments.engine,
        arguments.run_dir,
        arguments.timeout_seconds,
    )
    if findings is None:
        return 0
    if arguments.json:
        print(doctor.as_json(findings))
    else:
        console.print(doctor.table(findings))
    return 1 if any(finding.status == "fails" for finding in findings) else 0
