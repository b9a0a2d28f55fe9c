"""Parse the command line of `paceline train` in two stages.

The first stage reads the task, the learner and the run to resume. They decide which options exist, so the second stage
parses the rest with the options of that task and that learner.
"""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from tyro.conf import FlagCreatePairsOff

from paceline.cli.options import parse_known_options, parse_options, switch_names
from paceline.cli.viewer_options import ViewerOptions
from paceline.device.gpus import choose_gpus
from paceline.distributed.launcher import under_launcher
from paceline.errors import UserError, unknown
from paceline.learners import native_config
from paceline.learners.learner import LEARNERS, settings_of
from paceline.learners.settings import Settings, flag
from paceline.run.config import RunOptions, TrainConfig, option, plain
from paceline.run.directory import RunDir
from paceline.run.mirror import download_run
from paceline.run.storage import is_url
from paceline.tasks import registry
from paceline.validation import Count, from_dict


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Options of the first stage."""

    task: Annotated[str | None, option("TASK")] = None
    """Name of the task, as an alternative to the positional argument."""
    learner: Annotated[str | None, option("NAME")] = None
    """Learning algorithm: ppo (native, the fastest), rsl_rl, rl_games, skrl or skrl_jax. Each has its own settings."""
    learner_config: Annotated[Path | None, option("FILE")] = None
    """YAML configuration file of RSL-RL, RL-Games or skrl in the library's own format. Flags take precedence. Settings
    that it omits have the defaults of the library, not those of the task."""
    ml_framework: Literal["torch", "jax"] = "torch"
    """Framework of skrl, as in Isaac Lab. `--ml-framework jax` equals `--learner skrl_jax`."""
    resume: Annotated[str | None, option("RUN|auto|URL")] = None
    """Run to continue: its directory, one of its checkpoint files, auto for the newest run under runs/, or the URL of
    its mirror, from which it is downloaded to --run-dir."""
    run_dir: Annotated[Path | None, option("DIR")] = None
    """Directory of the run, by default runs/TASK/TIME, or runs/TASK/NAME_HASH if --resume is a URL."""


@dataclass(frozen=True, kw_only=True)
class TrainArguments(ViewerOptions, RunOptions, Selection):
    """Train a policy.

    With a TASK, this page also lists the options of the task and of the learner.
    """

    mirror: Annotated[str | None, option("URL")] = None
    """URL of a folder to which the run directory is copied in the background while training, such as
    file:///FOLDER or s3://BUCKET/FOLDER (pip install 'paceline[s3]'). Credentials are read from the environment. If the
    folder holds a run with the same settings and --run-dir does not, that run continues."""
    gpu_ids: Annotated[tuple[str, ...], option("ID|all|none")] = ()
    """GPU indices relative to CUDA_VISIBLE_DEVICES, one rank each; all for all GPUs; none for the CPU.
    The default is the first GPU, or the CPU if there is none. A resumed run uses its previous devices."""
    ranks: Annotated[Count | None, option("K")] = None
    """Number of ranks (training processes) per host on the CPU, with --gpu-ids none; at least 1. The default is 1.
    On GPUs there is one rank per index of --gpu-ids."""
    launcher: Literal["elastic", "torchrunx"] = "elastic"
    """Launcher of the ranks: torch's elastic launcher, or torchrunx (pip install paceline[torchrunx]; GPL-3.0)."""
    hosts: Annotated[tuple[str, ...], option("HOST")] = ()
    """Hosts on which torchrunx starts ranks through SSH. Requires --launcher torchrunx. The default is this host."""
    max_restarts: Annotated[int, Ge(0), option("R")] = 0
    """Maximum number of restarts of all ranks from the newest checkpoint, after a rank has failed; at least 0."""
    torchrunx_log_dir: Annotated[str | None, option("DIR")] = None
    """Same as --worker-log-dir, for users of mjlab. The environment variable TORCHRUNX_LOG_DIR takes precedence."""
    headless: Annotated[bool, FlagCreatePairsOff] = False
    """Has no effect, because training never opens a window. Accepted for users of Isaac Lab."""
    enable_cameras: Annotated[bool, FlagCreatePairsOff] = False
    """Has no effect, because a task with cameras always renders them. Accepted for users of Isaac Lab."""
    distributed: Annotated[bool, FlagCreatePairsOff] = False
    """Run as a worker of a launcher such as torch.distributed.run, and fail without one."""


@dataclass(frozen=True)
class TrainCommand:
    """A parsed command line of `paceline train`."""

    arguments: Any
    """`TrainArguments` with two more fields: the options of the task as `env` and the settings of the learner."""
    config: TrainConfig
    run: RunDir | None
    """The run to resume."""
    notes: tuple[str, ...] = ()
    """Messages for the user about the task and the configuration file, one line each."""


@dataclass(frozen=True)
class _Defaults:
    """Values of the options that the command line does not set: those of the task, of a library's configuration file
    or of the run to resume."""

    env: Any
    settings: Settings
    run: dict[str, Any]


def parse(argv: list[str]) -> TrainCommand:
    """Parse the arguments that follow `paceline train`."""
    selection, rest = parse_known_options(Selection, argv, "train")
    task, rest = _take_task(selection.task, rest)
    task, rest, notes = replace_alias(task, rest)
    run = _open_run(selection, task)
    stored = run.config() if run else None
    if stored and task not in (None, stored.task):
        raise UserError(f"the run to resume is of task {stored.task!r}, not {task!r}")
    task = stored.task if stored else task
    if task is None:
        if {"-h", "--help"} & set(rest):
            parse_options(TrainArguments, rest, "train TASK")
        raise UserError("no task given: use paceline train TASK; `paceline tasks` lists the tasks")
    learner, file = _learner(selection, stored), selection.learner_config
    selection = dataclasses.replace(selection, task=task, learner=learner)
    if stored and file:
        raise UserError(f"--learner-config {file} with --resume: the run has its settings; change them by flags")
    entry = registry.find(task)
    if stored:
        env = from_dict(entry.task, stored.env, f"options of task {task}")
        gpu_ids = tuple(map(str, stored.gpu_ids)) or ("none",)
        defaults = _Defaults(env, settings_of(learner, stored.settings), vars(stored) | {"gpu_ids": gpu_ids})
    else:
        settings = LEARNERS[learner].settings.from_training(entry.training)
        defaults = _Defaults(entry.task(), settings, {"max_iterations": entry.max_iterations})
    if file:
        native = _read_native(file, selection, rest, defaults)
        defaults = _Defaults(defaults.env, native.settings, defaults.run | native.run)
        notes += tuple(f"{file}: {note}" for note in native.notes)
        notes += (f"{file}: Paceline itself sets {', '.join(native.ignored)}",) if native.ignored else ()
    arguments = _parse_rest(rest, selection, defaults)
    return TrainCommand(arguments, _config(arguments, stored), run, notes)


def _open_run(selection: Selection, task: str | None) -> RunDir | None:
    if selection.resume is None:
        return None
    if is_url(selection.resume):
        return download_run(selection.resume, selection.run_dir)
    return RunDir.open(selection.resume, task)


def _take_task(named: str | None, rest: list[str]) -> tuple[str | None, list[str]]:
    """Return the name of the task and the arguments without it. A name that does not follow --task is the first
    argument, or any argument that is a known task and is not the value of an option."""
    if named is None:
        switches = switch_names(TrainArguments)
        for position, (previous, argument) in enumerate(pairwise(["", *rest])):
            takes_no_value = previous.replace("_", "-") in switches or ".no-" in previous or "=" in previous
            is_value = previous.startswith("--") and not takes_no_value
            is_first = position == 0 and not argument.startswith("-")
            if is_first or (not is_value and registry.is_name(argument)):
                named, rest = argument, rest[:position] + rest[position + 1 :]
                break
    return named, rest


def replace_alias(name: str | None, rest: list[str]) -> tuple[str | None, list[str], tuple[str, ...]]:
    """Replace the name that a task has in another library. Return the name of the task, the arguments, and notes for
    the user. Raise UserError if there is no such task."""
    if name is None:
        return None, rest, ()
    alias = registry.alias(name)
    if alias is None:
        registry.find(name)
        return name, rest, ()
    note = f"{name} is the task {' '.join((alias.task, *alias.flags))}. {alias.difference}"
    return alias.task, [*alias.flags, *rest], (note,)


def _learner(selection: Selection, stored: TrainConfig | None) -> str:
    uses_jax = selection.ml_framework == "jax"
    learner = selection.learner or (stored.learner if stored else "skrl_jax" if uses_jax else "ppo")
    if learner not in LEARNERS:
        raise unknown("learner", learner, LEARNERS)
    if uses_jax:
        if learner not in ("skrl", "skrl_jax"):
            raise UserError(f"--ml_framework jax with --learner {learner}: only skrl has JAX; use --learner skrl")
        learner = "skrl_jax"
    if stored and learner != stored.learner:
        raise UserError(f"the run to resume was trained by {stored.learner}, not {learner}: leave --learner out")
    return learner


def _read_native(file: Path, selection: Selection, rest: list[str], defaults: _Defaults) -> native_config.Native:
    """Read the configuration file of a library; settings given by flags replace its values."""
    # Some values of the file depend on the number of envs and on other flags, so the flags are parsed without it first.
    arguments = _parse_rest([argument for argument in rest if argument not in ("-h", "--help")], selection, defaults)
    base = defaults.settings
    names = {argument.partition("=")[0].replace("_", "-").replace(".no-", ".") for argument in rest}
    flagged = vars(getattr(arguments, _field_of(base)))
    given = {name: value for name, value in flagged.items() if flag(base, name) in names}
    num_envs = None if arguments.total_envs else _num_envs(arguments, _gpu_ids(arguments))
    return native_config.read(arguments.learner, file, base, given, num_envs)


def _parse_rest(rest: list[str], selection: Selection, defaults: _Defaults) -> Any:
    """Parse the arguments with the options of the task and of the learner."""
    entry, values = registry.find(str(selection.task)), defaults.run | vars(selection)
    fields = [
        (f.name, f.type, dataclasses.field(default=values.get(f.name, f.default)))
        for f in dataclasses.fields(TrainArguments)
    ]
    for name, values in (("env", defaults.env), (_field_of(defaults.settings), defaults.settings)):
        fields.append((name, type(values), dataclasses.field(default=values)))
    kind = dataclasses.make_dataclass("Train", fields, bases=(TrainArguments,), frozen=True, kw_only=True)
    kind.__doc__ = f"Train a policy for the task {selection.task}.\n\n{entry.summary[:1].upper()}{entry.summary[1:]}."
    return parse_options(kind, rest, f"train {selection.task}")


def _field_of(settings: Settings | type[Settings]) -> str:
    """Return the field of the arguments that holds the settings of a learner."""
    return settings.flags.replace("-", "_")


def _gpu_ids(arguments: TrainArguments) -> tuple[int, ...]:
    return choose_gpus(arguments.gpu_ids, arguments.engine, under_launcher())


def _num_envs(arguments: TrainArguments, gpu_ids: tuple[int, ...]) -> int:
    """Return the number of envs per rank."""
    entry = registry.find(str(arguments.task))
    default = entry.gpu_envs if gpu_ids else entry.cpu_envs
    return default if arguments.num_envs is None else arguments.num_envs


def _config(arguments: Any, stored: TrainConfig | None) -> TrainConfig:
    shared = {f.name for f in dataclasses.fields(TrainConfig)} & set(vars(arguments))
    values = {name: getattr(arguments, name) for name in shared}
    values["env"] = plain(arguments.env)
    values["settings"] = plain(getattr(arguments, _field_of(LEARNERS[arguments.learner].settings)))
    values["gpu_ids"] = _gpu_ids(arguments)
    values["num_envs"] = _num_envs(arguments, values["gpu_ids"])
    if stored and values["num_envs"] != stored.num_envs and arguments.total_envs == stored.total_envs:
        values["total_envs"] = None
    if stored and values["sync"] != stored.sync and values["sync_every"] == stored.sync_every:
        values["sync_every"] = None
    if arguments.worker_log_dir is None:
        values["worker_log_dir"] = arguments.torchrunx_log_dir
    return TrainConfig(**values)
