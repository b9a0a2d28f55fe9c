"""The command line: parse, call one function, print for people."""

import dataclasses
import io
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, cast

import tyro
from rich.console import Console
from rich.markup import escape
from tyro.conf import FlagCreatePairsOff, Positional, arg

from paceline import __version__, interrupts
from paceline.errors import UserError, unknown

if TYPE_CHECKING:
    from paceline.config import TrainConfig
    from paceline.run_dir import RunDir

# Heavy imports (torch, MuJoCo) stand inside the commands, so that help comes at once.

OVERVIEW = f"""Paceline {__version__}: robot policies by reinforcement learning in thousands of MuJoCo worlds.

  paceline train TASK     train a policy; --resume RUN|auto goes on with a run
  paceline tasks          what there is to train
  paceline play RUN       watch a trained policy, as a video
  paceline export RUN     a trained policy as ONNX or TorchScript
  paceline doctor         what would go wrong here, before it does

Each has its own --help.  Start with:  paceline train cartpole
"""


@dataclass(frozen=True)
class TrainArguments:
    """Train a policy."""

    learner: str = "ppo"
    """The algorithm: ppo."""
    num_envs: Annotated[int | None, arg(metavar="N")] = None
    """Worlds per rank; by default what suits the task and the device."""
    total_envs: Annotated[int | None, arg(metavar="N")] = None
    """Worlds over all ranks, in place of --num-envs."""
    max_iterations: Annotated[int, arg(metavar="M")] = 100
    """Stop after so many iterations in all, those before a resume included."""
    seed: int = 0
    """On the CPU the same seed gives the same run, bit by bit."""
    run_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """This run's own directory; by default runs/TASK/TIME."""
    resume: Annotated[str | None, arg(metavar="RUN|auto")] = None
    """Go on with a run: its directory, one of its checkpoint files, or auto for the newest under runs/."""
    engine: str = "auto"
    """auto, mujoco (the C engine, on CPUs) or warp (MuJoCo Warp, on GPUs)."""
    gpu_ids: Annotated[tuple[str, ...], arg(metavar="ID|all|none")] = ()
    """GPUs, relative to CUDA_VISIBLE_DEVICES, one rank each; none is the CPU. By default the first GPU, or else the
    CPU; a resumed run stays where it was."""
    ranks: Annotated[int | None, arg(metavar="K")] = None
    """With --gpu-ids none, so many processes that train as one; on several hosts, on each of them."""
    launcher: Literal["elastic", "torchrunx"] = "elastic"
    """What starts the ranks: torch's elastic launcher, or torchrunx (pip install paceline[torchrunx]; GPL-3.0)."""
    hosts: Annotated[tuple[str, ...], arg(metavar="HOST")] = ()
    """With --launcher torchrunx: the machines to use, over SSH; by default this one."""
    max_restarts: Annotated[int, arg(metavar="R")] = 0
    """When a rank fails, start all anew from the newest checkpoint, so many times."""
    timeout_seconds: Annotated[float, arg(name="timeout", metavar="SECONDS")] = 60.0
    """A rank that is not heard of for so long has failed, and all end."""
    worker_log_dir: Annotated[str | None, arg(metavar="DIR")] = None
    """Where each rank's log goes, "" for nowhere; by default RUN/workers. The environment variable
    PACELINE_WORKER_LOG_DIR wins over it."""
    torchrunx_log_dir: Annotated[str | None, arg(metavar="DIR")] = None
    """For users of mjlab: the same as --worker-log-dir, and so is TORCHRUNX_LOG_DIR."""
    logger: str = "tensorboard"
    """tensorboard or none."""
    checkpoint_every: Annotated[int, arg(metavar="N")] = 50
    """Iterations from one checkpoint to the next."""
    keep_checkpoints: Annotated[int, arg(metavar="K")] = 3
    """Keep the newest so many, and the best beside them."""
    headless: Annotated[bool, FlagCreatePairsOff] = False
    """For users of Isaac Lab: training never opens a window anyway."""
    distributed: Annotated[bool, FlagCreatePairsOff] = False
    """Be a worker under a launcher such as torch.distributed.run."""


@dataclass(frozen=True)
class PlayArguments:
    """Watch a trained policy: a video, made without a screen."""

    run: Positional[str]
    """The run's directory, one of its checkpoint files, or auto for the newest."""
    video: Annotated[Path | None, arg(metavar="FILE")] = None
    """Where the mp4 goes; by default into the run's videos/."""
    seconds: float = 10.0
    """How much of the robot's time to show."""
    width: int = 640
    height: int = 480
    seed: int = 0
    """Of the starting states."""


@dataclass(frozen=True)
class ExportArguments:
    """Write a trained policy, its observation normaliser folded in, for use elsewhere."""

    run: Positional[str]
    """The run's directory, one of its checkpoint files, or auto for the newest."""
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


def main() -> None:
    # Torch's threads spin between the operations of an update, but not for long: the physics needs their cores next.
    # Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    console = Console(highlight=False, soft_wrap=True, file=cast("TextIO", _Patient()))
    try:
        code = _dispatch(sys.argv[1:], console)
    except UserError as error:
        # Ranks refuse alike: one voice is enough.
        if os.environ.get("RANK", "0") == "0":
            print(f"paceline: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


class _Patient:
    """Standard output, whose early end, as by `| head -1`, does not end a training run."""

    def write(self, text: str) -> int:
        with self._going_on():
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        with self._going_on():
            sys.stdout.flush()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


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
    # The task decides which options there are and their defaults, so it is looked for before all else.
    run = _run_to_resume(words)
    stored = run.config() if run else None
    task, rest = _take_task(words, stored.task if stored else None)
    if task is None:
        if any(word in ("-h", "--help") for word in rest):
            _parse(TrainArguments, rest, "train TASK")
        raise UserError("no task given: paceline train TASK, where `paceline tasks` lists the tasks")
    kind = _arguments_for(task, stored)
    arguments = _parse(kind, rest, f"train {task}")

    import torch

    from paceline import checkpoint
    from paceline.distributed.rank import under_launcher
    from paceline.run_dir import RunDir
    from paceline.train import TrainingFailedError, train

    config = _config(task, arguments, stored)
    if not arguments.gpu_ids and not config.gpu_ids and config.engine == "auto" and torch.cuda.is_available():
        console.print("A GPU is here, but not MuJoCo Warp (pip install mujoco-warp): training on the CPU.")
    if arguments.distributed:
        _refuse_without_launcher()
    if run is None:
        run, resume_from = RunDir.named(arguments.run_dir, task), None
    elif arguments.run_dir:
        raise UserError(f"--run-dir {arguments.run_dir} with --resume: a resumed run stays in its own directory")
    else:
        resume_from = checkpoint.chosen(arguments.resume, run.checkpoints)
    ranks = _ranks(arguments, config)
    if not under_launcher() and (ranks > 1 or arguments.max_restarts or arguments.launcher == "torchrunx"):
        return _launch(words, arguments, config, run, resumed=resume_from is not None, ranks=ranks)
    main = os.environ.get("RANK", "0") == "0"
    try:
        result = train(config, run, console, resume_from)
    except TrainingFailedError as error:
        # Of a failure elsewhere the main rank has told already.
        if main:
            print(f"paceline: training failed: {error}", file=sys.stderr)
        return 1
    if main:
        _summarise(result, console)
    # A launcher would start anew what does not end with 0; whether it was interrupted it knows itself.
    return 0 if result["status"] == "completed" or under_launcher() else interrupts.EXIT_CODE


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


def _launch(words: list[str], arguments: Any, config: "TrainConfig", run: "RunDir", resumed: bool, ranks: int) -> int:
    """Start the ranks and wait for them; they do the talking."""
    from paceline.launch import local, torchrunx

    config.check()
    if not resumed:
        run.check_new()
        words = [*words, "--run-dir", str(run.path)]
    try:
        if arguments.launcher == "torchrunx":
            torchrunx.launch(["train", *words], ranks, arguments.hosts)
        else:
            local.launch(["train", *words], ranks, arguments.max_restarts)
    except KeyboardInterrupt:
        result = run.result()
        if result.get("status") == "running":
            # The ranks were ended before they could save anything.
            run.write_result(**(result | {"status": "interrupted"}))
            print(f"paceline: interrupted; {run.path} goes on from its newest checkpoint", file=sys.stderr)
        return interrupts.EXIT_CODE
    except local.RankFailedError as error:
        if error.exit_code == 2:
            return 2
        result = run.result()
        if result.get("status") != "failed":
            # The main rank could not say it any more.
            print(f"paceline: training failed: {error}", file=sys.stderr)
            if result:
                run.write_result(**(result | {"status": "failed", "cause": str(error)}))
        return 1
    return 0 if run.result()["status"] == "completed" else interrupts.EXIT_CODE


def _run_to_resume(words: list[str]) -> "RunDir | None":
    """The run that --resume names, looked for before parsing because its task decides how to parse."""
    value = None
    for i, word in enumerate(words):
        if word == "--resume" and i + 1 < len(words):
            value = words[i + 1]
        elif word.startswith("--resume="):
            value = word.removeprefix("--resume=")
    if value is None:
        return None
    from paceline.run_dir import RunDir

    return RunDir.open(value, task=words[0] if not words[0].startswith("-") else None)


def _take_task(words: list[str], stored: str | None) -> tuple[str | None, list[str]]:
    """The task's name, and the words without it: first, or --task NAME, or anywhere if it is a known one."""
    from paceline.tasks import registry

    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        named = before == "--task" or word.startswith("--task=")
        takes_no_value = before in ("--headless", "--distributed") or ".no-" in before or "=" in before
        free = takes_no_value or not before.startswith("--")
        if named or (i == 0 and not word.startswith("-")) or (free and word in registry.names()):
            task = word.removeprefix("--task=")
            if stored not in (None, task):
                raise UserError(f"the run to resume is of task {stored!r}, not {task!r}")
            registry.find(task)
            return task, words[: i - (before == "--task")] + words[i + 1 :]
    return stored, words


def _arguments_for(task: str, stored: "TrainConfig | None") -> type:
    """`TrainArguments` with the task's own options, defaults from the task or from the run to resume."""
    from paceline.config import PpoConfig, from_dict
    from paceline.tasks import registry

    entry = registry.find(task)
    env, ppo, defaults = entry.task(), entry.ppo, {"max_iterations": entry.max_iterations}
    if stored:
        env = from_dict(entry.task, stored.env, f"options of task {task}")
        names = {f.name for f in dataclasses.fields(TrainArguments)}
        ppo, defaults = stored.ppo, {k: v for k, v in vars(stored).items() if k in names}
        defaults["gpu_ids"] = tuple(str(gpu) for gpu in stored.gpu_ids) or ("none",)
    own = [
        (f.name, f.type, dataclasses.field(default=defaults.get(f.name, f.default)))
        for f in dataclasses.fields(TrainArguments)
    ]
    groups = [("env", entry.task, dataclasses.field(default=env)), ("ppo", PpoConfig, dataclasses.field(default=ppo))]
    kind = dataclasses.make_dataclass("Train", [*own, *groups], bases=(TrainArguments,), frozen=True)
    kind.__doc__ = f"Train a policy for {task}: {entry.summary}."
    return kind


def _config(task: str, arguments: Any, stored: "TrainConfig | None") -> "TrainConfig":
    from paceline.config import TrainConfig
    from paceline.distributed.rank import choose_gpus
    from paceline.tasks import registry

    gpu_ids, entry = choose_gpus(arguments.gpu_ids, arguments.engine), registry.find(task)
    num_envs = arguments.num_envs
    if num_envs is None:
        num_envs = entry.gpu_envs if gpu_ids else entry.cpu_envs
    shared = {f.name for f in dataclasses.fields(TrainConfig)} & set(vars(arguments))
    values = {name: getattr(arguments, name) for name in shared}
    values |= {"env": dataclasses.asdict(arguments.env), "gpu_ids": gpu_ids, "num_envs": num_envs}
    if stored and num_envs != stored.num_envs and arguments.total_envs == stored.total_envs:
        values["total_envs"] = None
    if arguments.torchrunx_log_dir is not None and arguments.worker_log_dir is None:
        values["worker_log_dir"] = arguments.torchrunx_log_dir
    return TrainConfig(task=task, **values)


def _refuse_without_launcher() -> None:
    if "RANK" not in os.environ:
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
    _parse(TasksArguments, words, "tasks")
    from rich.table import Table

    from paceline.tasks import registry

    table = Table("task", "what it is", "worlds on a CPU", "on a GPU", box=None, header_style="bold")
    for name in registry.names():
        try:
            entry = registry.find(name)
        except UserError as error:
            # One package's fault should not hide the others' tasks.
            table.add_row(name, f"[red]{escape(str(error))}[/]", "", "")
        else:
            table.add_row(name, entry.summary, str(entry.cpu_envs), str(entry.gpu_envs))
    console.print(table)
    return 0


def _play(words: list[str], console: Console) -> int:
    arguments = _parse(PlayArguments, words, "play")
    from paceline.play import record

    shown = record(arguments.run, arguments.video, arguments.seconds, arguments.width, arguments.height, arguments.seed)
    console.print(
        f"{escape(str(shown.file))}: {shown.seconds:.1f} s, {shown.episodes} episodes ended, "
        f"mean reward {shown.mean_reward:.3f} per step"
    )
    return 0


def _export(words: list[str], console: Console) -> int:
    arguments = _parse(ExportArguments, words, "export")
    from paceline.export import export

    console.print(escape(str(export(arguments.run, arguments.format, arguments.output))))
    return 0


def _doctor(words: list[str], console: Console) -> int:
    arguments = _parse(DoctorArguments, words, "doctor")
    from paceline import doctor

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


def _parse(kind: type, words: list[str], command: str) -> Any:
    """Help and values by tyro; what is wrong, in one line."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parsed, rest = tyro.cli(kind, args=words, prog=f"paceline {command}", return_unknown_args=True)
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(_unboxed(said.getvalue())) from None
    if rest:
        parser = tyro.extras.get_parser(kind, prog=f"paceline {command}")
        known = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        raise unknown("option", rest[0], known)
    return parsed


def _unboxed(text: str) -> str:
    """The first paragraph of what tyro drew a box around."""
    lines = [line.strip("│╭╮╰╯─ ") for line in text.splitlines()[1:]]
    end = lines.index("") if "" in lines else len(lines)
    return " ".join(" ".join(lines[:end]).split())
