"""How `paceline train` is told what to do: task, learner and run to resume decide which options there are."""

import dataclasses
import io
import warnings
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, arg

from paceline.errors import UserError, unknown

if TYPE_CHECKING:
    from paceline.learners.native_config import Native
    from paceline.run.config import TrainConfig
    from paceline.run.directory import RunDir

# Heavy imports (torch, MuJoCo) stand inside the functions, so that help comes at once.

# Flags without a value.
_SWITCHES = ("--headless", "--distributed")


@dataclass(frozen=True)
class TrainArguments:
    """Train a policy."""

    learner: str = "ppo"
    """ppo (the native one, the fastest), rsl_rl, rl_games, skrl or skrl_jax; each has settings of its own."""
    learner_config: Annotated[Path | None, arg(metavar="FILE")] = None
    """The library's own configuration file: YAML, as RSL-RL, RL-Games or skrl take it. Flags win over it."""
    ml_framework: Annotated[Literal["torch", "jax"], arg(name="ml_framework")] = "torch"
    """For users of Isaac Lab: --learner skrl --ml_framework jax is --learner skrl_jax."""
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
    """auto, mujoco (the C engine, on CPUs) or warp (MuJoCo Warp, on GPUs); gymnasium: tasks have their own."""
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
class Order:
    """What the words of `paceline train` come to."""

    task: str
    arguments: Any
    """`TrainArguments`, with the task's options as `env` and the learner's as a group of its own."""
    config: "TrainConfig"
    run: "RunDir | None"
    """The one to resume."""
    notes: tuple[str, ...] = ()
    """What the user should know of how the words were taken, a line each."""


def read(words: list[str]) -> Order:
    run = _run_to_resume(words)
    stored = run.config() if run else None
    task, rest = _take_task(words, stored.task if stored else None)
    if task is None:
        if any(word in ("-h", "--help") for word in rest):
            parse(TrainArguments, rest, "train TASK")
        raise UserError("no task given: paceline train TASK, where `paceline tasks` lists the tasks")
    learner = _learner(words, stored)
    rest = [word for word in rest if not word.startswith("--ml_framework=")]
    native, notes = None, ()
    file = _value(words, "--learner-config")
    if file:
        if stored:
            raise UserError(f"--learner-config {file} with --resume: the run has its settings; change them by flags")
        native = _native(Path(file), task, learner, rest)
        notes = (f"{file}: Paceline itself sees to {', '.join(native.ours)}",) if native.ours else ()
    arguments = parse(_arguments_for(task, learner, native, stored), rest, f"train {task}")
    return Order(task, arguments, _config(task, learner, arguments, stored), run, notes)


def _value(words: list[str], flag: str) -> str | None:
    """Of a flag that must be known before the rest can be read; - and _ are the same in it, as they are to tyro."""
    value = None
    for i, word in enumerate(words):
        name, equals, after = word.partition("=")
        if name.replace("_", "-") == flag and (equals or i + 1 < len(words)):
            value = after if equals else words[i + 1]
    return value


def _learner(words: list[str], stored: "TrainConfig | None") -> str:
    from paceline.learners.learner import LEARNERS

    learner = _value(words, "--learner") or (stored.learner if stored else "ppo")
    if learner not in LEARNERS:
        raise unknown("learner", learner, LEARNERS)
    framework = _value(words, "--ml-framework")
    if framework == "jax":
        if learner not in ("skrl", "skrl_jax"):
            raise UserError(f"--ml_framework jax with --learner {learner}: only skrl has JAX; use --learner skrl")
        learner = "skrl_jax"
    if stored and learner != stored.learner:
        raise UserError(f"the run to resume was trained by {stored.learner}, not {learner}: leave --learner out")
    return learner


def _run_to_resume(words: list[str]) -> "RunDir | None":
    """The run that --resume names, looked for before parsing because its task decides how to parse."""
    value = _value(words, "--resume")
    if value is None:
        return None
    from paceline.run.directory import RunDir

    return RunDir.open(value, task=words[0] if not words[0].startswith("-") else None)


def _take_task(words: list[str], stored: str | None) -> tuple[str | None, list[str]]:
    """The task's name, and the words without it: first, or --task NAME, or anywhere if it is a known one."""
    from paceline.tasks import registry

    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        named = before == "--task" or word.startswith("--task=")
        takes_no_value = before in _SWITCHES or ".no-" in before or "=" in before
        free = takes_no_value or not before.startswith("--")
        if named or (i == 0 and not word.startswith("-")) or (free and registry.is_name(word)):
            task = word.removeprefix("--task=")
            if stored not in (None, task):
                raise UserError(f"the run to resume is of task {stored!r}, not {task!r}")
            registry.find(task)
            return task, words[: i - (before == "--task")] + words[i + 1 :]
    return stored, words


def _native(file: Path, task: str, learner: str, rest: list[str]) -> "Native":
    """The library's own file, with what the flags say over it."""
    from paceline.learners import native_config
    from paceline.learners.learner import LEARNERS
    from paceline.learners.settings import flag
    from paceline.tasks import registry

    # Read twice, first without the file: some of its values depend on the number of worlds, and on other flags.
    plain = [word for word in rest if word not in ("-h", "--help")]
    arguments = parse(_arguments_for(task, learner, None, None), plain, f"train {task}")
    base = LEARNERS[learner].settings.from_training(registry.find(task).training)
    flagged = getattr(arguments, base.flags.replace("-", "_"))
    given = {name: value for name, value in vars(flagged).items() if _value(rest, flag(base, name)) is not None}
    return native_config.read(learner, file, base, given, None if arguments.total_envs else _worlds(task, arguments))


def _arguments_for(task: str, learner: str, native: "Native | None", stored: "TrainConfig | None") -> type:
    """`TrainArguments` with the task's and the learner's own options; defaults from the task, from the library's own
    configuration file, or from the run to resume."""
    from paceline.learners.learner import LEARNERS, settings_of
    from paceline.tasks import registry
    from paceline.validation import from_dict

    entry = registry.find(task)
    env, settings = entry.task(), LEARNERS[learner].settings.from_training(entry.training)
    defaults: dict[str, Any] = {"max_iterations": entry.max_iterations, "learner": learner}
    if native:
        settings, defaults = native.settings, defaults | native.run
    if stored:
        env = from_dict(entry.task, stored.env, f"options of task {task}")
        names = {f.name for f in dataclasses.fields(TrainArguments)}
        settings = settings_of(learner, stored.settings)
        defaults = {k: v for k, v in vars(stored).items() if k in names}
        defaults["gpu_ids"] = tuple(str(gpu) for gpu in stored.gpu_ids) or ("none",)
    own = [
        (f.name, f.type, dataclasses.field(default=defaults.get(f.name, f.default)))
        for f in dataclasses.fields(TrainArguments)
    ]
    groups = [
        ("env", entry.task, dataclasses.field(default=env)),
        (settings.flags.replace("-", "_"), type(settings), dataclasses.field(default=settings)),
    ]
    kind = dataclasses.make_dataclass("Train", [*own, *groups], bases=(TrainArguments,), frozen=True)
    kind.__doc__ = f"Train a policy for {task}: {entry.summary}."
    return kind


def _worlds(task: str, arguments: Any) -> int:
    """Per rank."""
    from paceline.device.gpus import choose_gpus
    from paceline.distributed.rank import under_launcher
    from paceline.tasks import registry

    if arguments.num_envs is not None:
        return arguments.num_envs
    entry = registry.find(task)
    return entry.gpu_envs if choose_gpus(arguments.gpu_ids, arguments.engine, under_launcher()) else entry.cpu_envs


def _config(task: str, learner: str, arguments: Any, stored: "TrainConfig | None") -> "TrainConfig":
    from paceline.device.gpus import choose_gpus
    from paceline.distributed.rank import under_launcher
    from paceline.learners.learner import LEARNERS
    from paceline.run.config import TrainConfig

    gpu_ids = choose_gpus(arguments.gpu_ids, arguments.engine, under_launcher())
    num_envs = _worlds(task, arguments)
    settings = getattr(arguments, LEARNERS[learner].settings.flags.replace("-", "_"))
    shared = {f.name for f in dataclasses.fields(TrainConfig)} & set(vars(arguments))
    values = {name: getattr(arguments, name) for name in shared}
    values |= {"env": dataclasses.asdict(arguments.env), "gpu_ids": gpu_ids, "num_envs": num_envs}
    values |= {"learner": learner, "settings": dataclasses.asdict(settings)}
    if stored and num_envs != stored.num_envs and arguments.total_envs == stored.total_envs:
        values["total_envs"] = None
    if arguments.torchrunx_log_dir is not None and arguments.worker_log_dir is None:
        values["worker_log_dir"] = arguments.torchrunx_log_dir
    return TrainConfig(task=task, **values)


def parse(kind: type, words: list[str], command: str) -> Any:
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
        raise unknown("option", rest[0], _options(kind))
    return parsed


def _options(kind: type) -> list[str]:
    """The names of all options of a command, with their dashes."""
    with warnings.catch_warnings():
        # tyro 1 has no other way to list them.
        warnings.filterwarnings("ignore", r"get_parser\(\) is deprecated", DeprecationWarning)
        parser = tyro.extras.get_parser(kind)
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def _unboxed(text: str) -> str:
    """The first paragraph of what tyro drew a box around."""
    lines = [line.strip("│╭╮╰╯─ ") for line in text.splitlines()[1:]]
    end = lines.index("") if "" in lines else len(lines)
    return " ".join(" ".join(lines[:end]).split())
