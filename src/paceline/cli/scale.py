"""The command `paceline scale`: scaling experiments. `forecast` is in cli/forecast.py."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import FlagCreatePairsOff

from paceline.cli.forecast import forecast
from paceline.cli.options import parse_known_options
from paceline.cli.train_arguments import TrainCommand, parse
from paceline.device.gpus import choose_gpus
from paceline.distributed.sharding import shard_ranges
from paceline.errors import UserError, unknown
from paceline.experiments.grid import Grid
from paceline.experiments.nodes import SHARING_ENGINES, Nodes
from paceline.experiments.scaling import run
from paceline.run.config import option
from paceline.run.directory import runs_of
from paceline.tasks import registry
from paceline.training.build import resolve
from paceline.validation import Count, check

_OVERVIEW = """Compare training on several numbers of ranks.

  paceline scale horizontal TASK --ranks 1 2 4 8 --num-envs 512
      The same number of envs on every rank.
  paceline scale vertical TASK --ranks 1 2 4 --total-envs 2048
      The same number of envs in total.
  paceline scale forecast RUN --to 1024
      Forecast the throughput of a run with more ranks.

`paceline scale EXPERIMENT --help` lists the options.
"""
# Options of `paceline train` that name one run, or one place for all runs.
_REFUSED = {
    "resume": "the same command with the same --run-dir continues the experiment",
    "mirror": "the runs would share the URL",
    "hosts": "use --on ssh",
    "worker_log_dir": "the logs are in the run directories",
    "torchrunx_log_dir": "the logs are in the run directories",
}


@dataclass(frozen=True, kw_only=True)
class ScaleArguments:
    """Train a task on several numbers of ranks and write a report that compares the runs.

    All other options are those of `paceline train TASK`, for example --max-iterations, --learner, --eval-every or
    --ppo.learning-rate. The exit code is 0 if all runs have completed, 1 if one has failed, 2 if an option was refused,
    and 130 after an interruption.
    """

    ranks: Annotated[tuple[Count, ...], option("K")]
    """Numbers of ranks to compare, each at least 1. A rank is a GPU, or a process on the CPU with --gpu-ids none."""
    seeds: Annotated[Count, option("K")] = 1
    """Number of runs for each number of ranks, at least 1. Their seeds are --seed, --seed + 1, and so on."""
    run_dir: Annotated[Path | None, option("DIR")] = None
    """Directory of the experiment, by default runs/TASK/scale_EXPERIMENT_TIME. If it holds the same experiment, runs
    that have completed are kept and the others continue. --ranks and --seeds may then be extended."""
    emulate_ranks: Annotated[bool, FlagCreatePairsOff] = False
    """Run k ranks as one rank with k times the envs, which computes the same updates. The learning curves are those of
    k ranks; the throughput is that of one rank. Only for horizontal experiments with --learner ppo."""
    gpu_ids: Annotated[tuple[str, ...], option("ID|all|none")] = ()
    """GPU indices relative to CUDA_VISIBLE_DEVICES, one rank each; all for all GPUs; none for the CPU. k ranks use the
    first k. The default is all GPUs, or the CPU if there is none."""
    jobs: Annotated[Count, option("J")] = 1
    """Maximum number of runs at the same time, at least 1. Runs that share a machine slow each other down, so their
    throughput is not comparable."""
    on: Annotated[str | None, option("|".join(SHARING_ENGINES))] = None
    """Engine of `paceline launch` that starts the ranks of each run on several nodes. The nodes and this machine must
    share --run-dir. The default is to start them on this machine."""
    ranks_per_node: Annotated[Count | None, option("K")] = None
    """Number of ranks per node with --on, at least 1. Fewer ranks use one node. The default is 8."""
    profile: Annotated[Path | None, option("FILE")] = None
    """File with the settings of the site, as for `paceline launch`, with --on."""
    set: Annotated[tuple[str, ...], option("NAME=VALUE")] = ()
    """Further values of the workflow file train_policy.yaml, for example memory=64Gi, with --on."""
    dry_run: Annotated[bool, FlagCreatePairsOff] = False
    """Check all options, print the command of each run, and start nothing."""


@dataclass(frozen=True)
class _CellOptions:
    """Options of `paceline train` that differ between the cells of a grid."""

    num_envs: int | None = None
    total_envs: int | None = None
    seed: int | None = None


def scale(argv: list[str], console: Console) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_OVERVIEW, end="")
        return 0 if argv else 2
    if argv[0] not in _EXPERIMENTS:
        raise unknown("experiment", argv[0], _EXPERIMENTS)
    return _EXPERIMENTS[argv[0]](argv[1:], console)


def _run(kind: Literal["horizontal", "vertical"], argv: list[str], console: Console) -> int:
    arguments, train_argv = parse_known_options(ScaleArguments, argv, f"scale {kind}", add_help=True)
    check(arguments, "--")
    grid = _grid(kind, arguments, train_argv)
    directory = arguments.run_dir or runs_of(grid.task) / f"scale_{kind}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    if arguments.dry_run:
        for cell in grid.cells:
            command = grid.command(cell, directory / cell.name, grid.gpu_ids[: grid.processes(cell)])
            print(shlex.join(["paceline", *command]))
        return 0
    return run(grid, directory, console)


_EXPERIMENTS: dict[str, Callable[[list[str], Console], int]] = {
    "horizontal": partial(_run, "horizontal"),
    "vertical": partial(_run, "vertical"),
    "forecast": forecast,
}


def _grid(kind: Literal["horizontal", "vertical"], arguments: ScaleArguments, train_argv: list[str]) -> Grid:
    """Return the experiment that the options describe. Raise UserError for what a run would refuse."""
    command = parse([*train_argv, "--gpu-ids", "none"])
    nodes = _nodes(arguments)
    gpu_ids = choose_gpus(arguments.gpu_ids, command.config.engine, all_by_default=True) if nodes is None else ()
    on_gpus = bool(gpu_ids) if nodes is None else arguments.gpu_ids != ("none",)
    config, _ = resolve(command.config)
    differing = ("task", "num_envs", "total_envs", "seed")
    shared = {name: value for name, value in config.by_name().items() if name not in differing}
    grid = Grid(
        kind=kind,
        task=config.task,
        ranks=tuple(sorted(set(arguments.ranks))),
        seeds=tuple(range(config.seed, config.seed + arguments.seeds)),
        envs=_envs(kind, command, on_gpus),
        max_iterations=config.max_iterations,
        train_argv=tuple(parse_known_options(_CellOptions, train_argv, "train")[1]),
        settings=shared,
        emulate_ranks=arguments.emulate_ranks,
        gpu_ids=gpu_ids,
        on_gpus=on_gpus,
        nodes=nodes,
        jobs=arguments.jobs,
    )
    _check(grid, command)
    return grid


def _nodes(arguments: ScaleArguments) -> Nodes | None:
    if arguments.on is None:
        for name in ("ranks_per_node", "profile", "set"):
            if getattr(arguments, name):
                raise UserError(f"--{name.replace('_', '-')} needs --on ENGINE, which starts ranks on several nodes")
        return None
    if arguments.gpu_ids not in ((), ("none",)):
        raise UserError(
            f"--gpu-ids {' '.join(arguments.gpu_ids)} with --on {arguments.on}: nodes use their first GPUs; leave it "
            "out, or use --gpu-ids none"
        )
    return Nodes(arguments.on, arguments.ranks_per_node or 8, arguments.profile, arguments.set)


def _envs(kind: str, command: TrainCommand, on_gpus: bool) -> int:
    """Return the number of envs per rank of a horizontal experiment, in total of a vertical one."""
    given = command.arguments
    if kind == "vertical":
        if given.total_envs is None:
            raise UserError("a vertical experiment needs --total-envs N, the number of envs over all ranks")
        if given.num_envs is not None:
            raise UserError(f"--num-envs {given.num_envs}: a vertical experiment has --total-envs; leave it out")
        return given.total_envs
    if given.total_envs is not None:
        raise UserError(f"--total-envs {given.total_envs}: a horizontal experiment has --num-envs, per rank; use that")
    entry = registry.find(command.config.task)
    return given.num_envs or (entry.gpu_envs if on_gpus else entry.cpu_envs)


def _check(grid: Grid, command: TrainCommand) -> None:
    """Raise UserError for a grid whose cells cannot run."""
    for name, reason in _REFUSED.items():
        if value := getattr(command.arguments, name):
            raise UserError(f"--{name.replace('_', '-')} {value}: {reason}; leave it out")
    if grid.emulate_ranks and grid.kind == "vertical":
        raise UserError("--emulate-ranks: k ranks of a vertical experiment equal one rank with the same envs")
    if grid.emulate_ranks and command.config.learner != "ppo":
        raise UserError(f"--emulate-ranks with --learner {command.config.learner}: only k ranks of ppo equal one rank")
    if grid.emulate_ranks and command.config.sync != "every-minibatch":
        raise UserError(
            f"--emulate-ranks with --sync {command.config.sync}: only --sync every-minibatch equals one rank"
        )
    grid.check_ranks()
    for cell in grid.cells:
        ranks = grid.processes(cell)
        config, settings = resolve(parse([*grid.cell_argv(cell), "--gpu-ids", "none"]).config)
        envs = config.total(ranks)
        if envs < ranks:
            raise UserError(f"--total-envs {envs} is too few for --ranks {ranks}: each rank needs one env")
        settings.check_samples(min(map(len, shard_ranges(envs, ranks))))
