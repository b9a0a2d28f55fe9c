"""Parse the command line of `paceline train` in two stages.

The first stage reads the task, the learner and the run to resume. They decide which options exist, so the second stage
parses the rest with the options of that task and that learner.
"""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff

from paceline.cli.options import option, parse_known_options, parse_options
from paceline.errors import UserError, unknown

if TYPE_CHECKING:
    from paceline.learners.native_config import Native
    from paceline.run.config import TrainConfig
    from paceline.run.directory import RunDir

# Modules that import torch or MuJoCo are imported inside the functions, so that help is printed at once.

# Options without a value, after which the name of the task may follow.
_SWITCHES = ("--headless", "--distributed")


@dataclass(frozen=True)
class Selection:
    """Options of the first stage."""

    task: Annotated[str | None, option("TASK")] = None
    """Name of the task, as an alternative to the positional argument."""
    learner: Annotated[str | None, option("NAME")] = None
    """Learning algorithm: ppo (native, the fastest), rsl_rl, rl_games, skrl or skrl_jax. Each has its own settings."""
    learner_config: Annotated[Path | None, option("FILE")] = None
    """YAML configuration file of RSL-RL, RL-Games or skrl in the library's own format. Flags take precedence."""
    ml_framework: Literal["torch", "jax"] = "torch"
    """Framework of skrl, as in Isaac Lab. `--learner skrl --ml_framework jax` equals `--learner skrl_jax`."""
    resume: Annotated[str | None, option("RUN|auto")] = None
    """Run to continue: its directory, one of its checkpoint files, or auto for the newest run under runs/."""


@dataclass(frozen=True)
class TrainArguments(Selection):
    """Train a policy.

    With a TASK, this page also lists the options of the task and of the learner.
    """

    num_envs: Annotated[int | None, option("N")] = None
    """Number of envs per rank, from 1 to 2^24. The default depends on the task and on the device."""
    total_envs: Annotated[int | None, option("N")] = None
    """Number of envs over all ranks, from 1 to 2^24. Replaces --num-envs."""
    max_iterations: Annotated[int, option("M")] = 100
    """Number of iterations after which training stops, including those before a resume; at least 1."""
    seed: int = 0
    """Seed of all random numbers, from 0 to 2^63 - 1. On a CPU, the same seed gives bitwise identical runs."""
    run_dir: Annotated[Path | None, option("DIR")] = None
    """Directory of this run. The default is runs/TASK/TIME."""
    engine: str = "auto"
    """Physics engine: auto, mujoco (MuJoCo C, on CPUs) or warp (MuJoCo Warp, on GPUs). Tasks gymnasium:ID have their
    own."""
    gpu_ids: Annotated[tuple[str, ...], option("ID|all|none")] = ()
    """GPU indices relative to CUDA_VISIBLE_DEVICES, one rank each; all for all GPUs; none for the CPU. The default is
    the first GPU, or the CPU if there is none. A resumed run uses its previous devices."""
    ranks: Annotated[int | None, option("K")] = None
    """Number of ranks (processes that train as one) on each host, at least 1. Used with --gpu-ids none. The default is
    1, or one per GPU."""
    launcher: Literal["elastic", "torchrunx"] = "elastic"
    """Launcher of the ranks: torch's elastic launcher, or torchrunx (pip install paceline[torchrunx]; GPL-3.0)."""
    hosts: Annotated[tuple[str, ...], option("HOST")] = ()
    """Hosts on which torchrunx starts ranks through SSH. Requires --launcher torchrunx. The default is this host."""
    max_restarts: Annotated[int, option("R")] = 0
    """Number of times that all ranks are restarted from the newest checkpoint after a rank has failed; at least 0."""
    timeout: Annotated[float, option("SECONDS")] = 60.0
    """Seconds without a heartbeat after which a rank counts as failed and all ranks exit; above 0, at most 1e6."""
    worker_log_dir: Annotated[str | None, option("DIR")] = None
    """Directory of the logs of all ranks; "" for no logs. The default is RUN/workers. The environment variable
    PACELINE_WORKER_LOG_DIR takes precedence."""
    torchrunx_log_dir: Annotated[str | None, option("DIR")] = None
    """Same as --worker-log-dir, as in mjlab. TORCHRUNX_LOG_DIR is the environment variable."""
    logger: str = "tensorboard"
    """Logger of the training metrics: tensorboard or none."""
    checkpoint_every: Annotated[int, option("N")] = 50
    """Number of iterations between two checkpoints, at least 1."""
    keep_checkpoints: Annotated[int, option("K")] = 3
    """Number of newest checkpoints to keep, at least 1. The best one is always kept."""
    headless: Annotated[bool, FlagCreatePairsOff] = False
    """Has no effect: training never opens a window. Accepted for users of Isaac Lab."""
    distributed: Annotated[bool, FlagCreatePairsOff] = False
    """Run as a worker of a launcher such as torch.distributed.run, and fail without one."""


@dataclass(frozen=True)
class TrainCommand:
    """A parsed command line of `paceline train`."""

    task: str
    arguments: Any
    """`TrainArguments` with two more fields: the options of the task as `env` and the settings of the learner."""
    config: "TrainConfig"
    run: "RunDir | None"
    """The run to resume."""
    notes: tuple[str, ...] = ()
    """Messages for the user about the configuration file, one line each."""


def parse(argv: list[str]) -> TrainCommand:
    """Parse the arguments that follow `paceline train`."""
    selection, rest = parse_known_options(Selection, argv, "train")
    task, rest = _take_task(selection.task, rest)
    run = _run_to_resume(selection.resume, task)
    stored = run.config() if run else None
    if stored and task not in (None, stored.task):
        raise UserError(f"the run to resume is of task {stored.task!r}, not {task!r}")
    task = stored.task if stored else task
    if task is None:
        if any(word in ("-h", "--help") for word in rest):
            parse_options(TrainArguments, rest, "train TASK")
        raise UserError("no task given: use paceline train TASK; `paceline tasks` lists the tasks")
    selection = dataclasses.replace(selection, task=task, learner=_learner(selection, stored))
    native, notes = None, ()
    if file := selection.learner_config:
        if stored:
            raise UserError(f"--learner-config {file} with --resume: the run has its settings; change them by flags")
        native = _read_native(file, selection, rest)
        notes = (f"{file}: Paceline itself sets {', '.join(native.ignored)}",) if native.ignored else ()
    arguments = parse_options(_arguments_class(selection, native, stored), rest, f"train {task}")
    return TrainCommand(task, arguments, _config(arguments, stored), run, notes)


def _take_task(named: str | None, rest: list[str]) -> tuple[str | None, list[str]]:
    """Return the name of the task and the arguments without it. A name that does not follow --task is the first
    argument, or any argument that is a known task and is not the value of an option."""
    from paceline.tasks import registry

    position = None if named is not None else _task_position(rest)
    if position is not None:
        named, rest = rest[position], rest[:position] + rest[position + 1 :]
    if named is not None:
        registry.find(named)
    return named, rest


def _task_position(rest: list[str]) -> int | None:
    from paceline.tasks import registry

    if rest and not rest[0].startswith("-"):
        return 0
    for position, (previous, word) in enumerate(pairwise(rest), 1):
        takes_no_value = previous in _SWITCHES or ".no-" in previous or "=" in previous
        if (takes_no_value or not previous.startswith("--")) and registry.is_name(word):
            return position
    return None


def _run_to_resume(resume: str | None, task: str | None) -> "RunDir | None":
    from paceline.run.directory import RunDir

    return RunDir.open(resume, task) if resume is not None else None


def _learner(selection: Selection, stored: "TrainConfig | None") -> str:
    from paceline.learners.learner import LEARNERS

    learner = selection.learner or (stored.learner if stored else "ppo")
    if learner not in LEARNERS:
        raise unknown("learner", learner, LEARNERS)
    if selection.ml_framework == "jax":
        if learner not in ("skrl", "skrl_jax"):
            raise UserError(f"--ml_framework jax with --learner {learner}: only skrl has JAX; use --learner skrl")
        learner = "skrl_jax"
    if stored and learner != stored.learner:
        raise UserError(f"the run to resume was trained by {stored.learner}, not {learner}: leave --learner out")
    return learner


def _read_native(file: Path, selection: Selection, rest: list[str]) -> "Native":
    """Read the configuration file of a library; settings given by flags replace its values."""
    from paceline.learners import native_config
    from paceline.learners.learner import LEARNERS
    from paceline.learners.settings import flag
    from paceline.tasks import registry

    assert selection.task is not None
    assert selection.learner is not None
    # Some values of the file depend on the number of envs and on other flags, so the flags are parsed without it first.
    without_help = [word for word in rest if word not in ("-h", "--help")]
    arguments = parse_options(_arguments_class(selection, None, None), without_help, f"train {selection.task}")
    base = LEARNERS[selection.learner].settings.from_training(registry.find(selection.task).training)
    names = {word.partition("=")[0].replace("_", "-").replace(".no-", ".") for word in rest}
    flagged = getattr(arguments, _field_of(base))
    given = {name: value for name, value in vars(flagged).items() if flag(base, name) in names}
    num_envs = None if arguments.total_envs else _num_envs(arguments)
    return native_config.read(selection.learner, file, base, given, num_envs)


def _arguments_class(selection: Selection, native: "Native | None", stored: "TrainConfig | None") -> type:
    """Return `TrainArguments` with the options of the task and of the learner. The defaults come from the task, from
    the configuration file of a library, or from the run to resume."""
    from paceline.learners.learner import LEARNERS, settings_of
    from paceline.tasks import registry
    from paceline.validation import from_dict

    task, learner = selection.task, selection.learner
    assert task is not None
    assert learner is not None
    entry = registry.find(task)
    env, settings = entry.task(), LEARNERS[learner].settings.from_training(entry.training)
    defaults: dict[str, Any] = {"max_iterations": entry.max_iterations}
    if native:
        settings, defaults = native.settings, defaults | native.run
    if stored:
        env = from_dict(entry.task, stored.env, f"options of task {task}")
        settings = settings_of(learner, stored.settings)
        defaults = vars(stored) | {
            "gpu_ids": tuple(map(str, stored.gpu_ids)) or ("none",),
            "timeout": stored.timeout_seconds,
        }
    defaults |= vars(selection)
    general = [
        (f.name, f.type, dataclasses.field(default=defaults.get(f.name, f.default)))
        for f in dataclasses.fields(TrainArguments)
    ]
    groups = [
        ("env", entry.task, dataclasses.field(default=env)),
        (_field_of(settings), type(settings), dataclasses.field(default=settings)),
    ]
    kind = dataclasses.make_dataclass("Train", [*general, *groups], bases=(TrainArguments,), frozen=True)
    kind.__doc__ = f"Train a policy for the task {task}.\n\n{entry.summary[:1].upper()}{entry.summary[1:]}."
    return kind


def _field_of(settings: Any) -> str:
    """Return the field of the arguments that holds the settings of a learner."""
    return settings.flags.replace("-", "_")


def _num_envs(arguments: Any) -> int:
    """Return the number of envs per rank."""
    from paceline.device.gpus import choose_gpus
    from paceline.distributed.rank import under_launcher
    from paceline.tasks import registry

    if arguments.num_envs is not None:
        return arguments.num_envs
    entry = registry.find(arguments.task)
    return entry.gpu_envs if choose_gpus(arguments.gpu_ids, arguments.engine, under_launcher()) else entry.cpu_envs


def _config(arguments: Any, stored: "TrainConfig | None") -> "TrainConfig":
    from paceline.device.gpus import choose_gpus
    from paceline.distributed.rank import under_launcher
    from paceline.learners.learner import LEARNERS
    from paceline.run.config import TrainConfig

    shared = {f.name for f in dataclasses.fields(TrainConfig)} & set(vars(arguments))
    values = {name: getattr(arguments, name) for name in shared}
    values["env"] = dataclasses.asdict(arguments.env)
    values["settings"] = dataclasses.asdict(getattr(arguments, _field_of(LEARNERS[arguments.learner].settings)))
    values["gpu_ids"] = choose_gpus(arguments.gpu_ids, arguments.engine, under_launcher())
    values["num_envs"] = _num_envs(arguments)
    values["timeout_seconds"] = arguments.timeout
    if stored and values["num_envs"] != stored.num_envs and arguments.total_envs == stored.total_envs:
        values["total_envs"] = None
    if arguments.torchrunx_log_dir is not None and arguments.worker_log_dir is None:
        values["worker_log_dir"] = arguments.torchrunx_log_dir
    return TrainConfig(**values)
