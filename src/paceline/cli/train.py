"""The command `paceline train`: train in this process, or launch ranks and wait for them."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from paceline.cli.train_arguments import TrainCommand, parse
from paceline.cli.viewer_options import ViewerOptions, check_viewer_options
from paceline.distributed import group
from paceline.distributed.failure import REFUSAL_EXIT_CODE, PeerLostError
from paceline.distributed.launcher import adopt_jax_launcher, under_elastic_agent, under_launcher
from paceline.distributed.rank import Rank, this_rank
from paceline.errors import UserError, counted
from paceline.launch import local, torchrunx
from paceline.process import interrupts
from paceline.run import checkpoint
from paceline.run.directory import RunDir
from paceline.run.storage import check_url
from paceline.tasks import registry
from paceline.train import RunCompletedError, TrainingFailedError
from paceline.train import train as train_rank
from paceline.training.build import resolve
from paceline.training.callbacks import Callback
from paceline.validation import check
from paceline.view.training_videos import TrainingVideos, check_renderable
from paceline.view.training_viewer import TrainingViewer
from paceline.view.viewer_server import choose_address

REPORT_SECONDS, MAIN_REPORT_SECONDS = 60.0, 10.0
"""Time limit for reporting refused input to the other ranks, s. The main rank has printed the error before that."""


def train(argv: list[str], console: Console) -> int:
    try:
        adopt_jax_launcher()
        return _run(parse(argv), argv, console)
    except UserError as error:
        _report_refusal(error)
        return 2


def _run(command: TrainCommand, argv: list[str], console: Console) -> int:
    arguments, config = command.arguments, command.config
    check(arguments, "--")
    if not arguments.gpu_ids and not config.gpu_ids and config.engine == "auto" and torch.cuda.is_available():
        console.print("Training on the CPU: there is a GPU, but not MuJoCo Warp (pip install mujoco-warp).")
    if arguments.distributed and not under_launcher():
        raise UserError(
            "--distributed is for workers under a launcher: python -m torch.distributed.run --nproc_per_node=K "
            "-m paceline train TASK --distributed; without a launcher leave it out"
        )
    if arguments.mirror:
        check_url(arguments.mirror)
    check_viewer_options(arguments)
    check_renderable(config, arguments.viewer)
    ranks = _num_ranks(command)
    launches = not under_launcher() and (ranks > 1 or arguments.max_restarts or arguments.launcher == "torchrunx")
    directory = _run_directory(command, bool(launches))
    resume_from = checkpoint.chosen(arguments.resume, directory.checkpoints) if command.run else None
    if launches:
        return _launch(argv, command, directory, ranks)
    return _train(command, directory, resume_from, console)


def _report_refusal(error: UserError) -> None:
    """Print an error once for all ranks of a run, and send it to the other ranks if they do not know of it."""
    rank = _this_rank()
    if rank.is_main:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
    if error.reported or not rank.launched:
        return
    try:
        group.report_refusal(rank, str(error), MAIN_REPORT_SECONDS if rank.is_main else REPORT_SECONDS)
    except (PeerLostError, UserError):
        if not rank.is_main:
            print(f"paceline: {error}; rank {rank.index} on {rank.host}", file=sys.stderr)


def _this_rank() -> Rank:
    """Return the rank of this process; a single rank, which prints errors, if the launcher's variables are invalid."""
    try:
        return this_rank(())
    except UserError:
        return Rank()


def _num_ranks(command: TrainCommand) -> int:
    """Return the number of ranks on this machine, or on each of --hosts."""
    arguments, ranks, gpus = command.arguments, command.arguments.ranks, len(command.config.gpu_ids)
    if gpus and ranks not in (None, gpus):
        raise UserError(
            f"--ranks {ranks} with {counted(gpus, 'GPU')}: each GPU has one rank; name a GPU twice to share it"
        )
    if arguments.hosts and arguments.launcher != "torchrunx":
        raise UserError(
            f"--hosts {' '.join(arguments.hosts)} needs --launcher torchrunx; "
            "or start python -m torch.distributed.run on each host"
        )
    if arguments.launcher == "torchrunx" and arguments.max_restarts:
        raise UserError("--max-restarts: torchrunx does not restart ranks; use --launcher elastic")
    return ranks or gpus or 1


def _run_directory(command: TrainCommand, launches: bool) -> RunDir:
    run_dir = command.arguments.run_dir
    if command.run is None:
        # All ranks use the directory that their launcher chooses, so no other process may choose the same one.
        return RunDir.new(run_dir, command.config.task, unique=launches)
    if run_dir and run_dir.absolute() != command.run.path.absolute():
        raise UserError(f"--run-dir {run_dir} with --resume: a resumed run stays in its own directory")
    return command.run


def _train(command: TrainCommand, directory: RunDir, resume_from: Path | None, console: Console) -> int:
    is_main = _this_rank().is_main
    for note in command.notes if is_main else ():
        console.print(escape(note))
    callbacks = _callbacks(command) if is_main else ()
    try:
        result = train_rank(command.config, directory, console, resume_from, command.arguments.mirror, callbacks)
    except RunCompletedError as done:
        if is_main:
            console.print(escape(str(done)))
        return _report_mirror(done.mirror_error)
    except TrainingFailedError as error:
        if is_main:
            print(f"paceline: training failed: {error}", file=sys.stderr)
        return 1
    if is_main:
        _print_summary(result, console)
    mirror_code = _report_mirror(result["mirror_error"])
    if result["status"] == "completed":
        return mirror_code
    # An elastic agent restarts workers that exit with another code than 0, and detects interruptions itself.
    return 0 if under_elastic_agent() else interrupts.EXIT_CODE


def _callbacks(command: TrainCommand) -> tuple[Callback, ...]:
    arguments: ViewerOptions = command.arguments
    callbacks: list[Callback] = [TrainingVideos()] if command.config.video_every else []
    if arguments.viewer:
        address = choose_address(arguments.viewer_host, arguments.viewer_port)
        callbacks.append(TrainingViewer(address, arguments.viewer_envs))
    return tuple(callbacks)


def _report_mirror(error: str | None) -> int:
    """Print why the mirror is not complete, if it is not. Return the exit code."""
    if error:
        print(f"paceline: the mirror is not complete: {error}", file=sys.stderr)
    return 1 if error else 0


def _launch(argv: list[str], command: TrainCommand, directory: RunDir, ranks: int) -> int:
    """Start the ranks and wait for them. The ranks print; the launcher prints only what no rank could print."""
    resolve(command.config)
    arguments, before = command.arguments, directory.result()
    # After a restart, the arguments must name the same run; "auto" could then name another one.
    run = str(directory.path)
    if arguments.resume is None:
        rank_argv = ["train", *argv, "--run-dir", run]
    else:
        rank_argv = ["train", *argv, "--resume", arguments.resume if Path(arguments.resume).is_file() else run]
    try:
        if arguments.launcher == "torchrunx":
            torchrunx.launch(rank_argv, ranks, arguments.hosts)
        else:
            local.launch(rank_argv, ranks, arguments.max_restarts)
    except KeyboardInterrupt:
        if directory.result() == before:
            # No rank has started to train.
            raise
        if not directory.is_held() and directory.mark_ended("interrupted"):
            print(f"paceline: interrupted; {run} continues from its newest checkpoint", file=sys.stderr)
    except local.RankFailedError as error:
        if error.exit_code == REFUSAL_EXIT_CODE:
            return error.exit_code
        # If the directory is held, another process has begun to train in it.
        if (not directory.is_held() and directory.mark_ended("failed", str(error))) or error.exit_code < 0:
            print(f"paceline: training failed: {error}", file=sys.stderr)
        interrupted = error.exit_code == interrupts.EXIT_CODE or directory.result().get("status") == "interrupted"
        return interrupts.EXIT_CODE if interrupted else 1
    # If the directory is on another host, its result is not readable here. No rank has failed, so the run is completed.
    return 0 if directory.result().get("status", "completed") == "completed" else interrupts.EXIT_CODE


def _print_summary(result: dict[str, Any], console: Console) -> None:
    # Over all sessions of the run; `steps_per_second` of the result is the rate of the last one.
    steps, seconds = result["env_steps"], result["train_seconds"]
    console.print(
        f"\n[bold]{result['status']}[/] after {counted(result['iterations'], 'iteration')}, "
        f"{counted(f'{steps:,}', 'env step')} in {seconds:.1f} s ({steps / seconds if seconds else 0.0:,.0f} steps/s)"
    )
    if result["mean_return"] is not None:
        console.print(
            f"  return   {result['mean_return']:.1f}, episode length {result['mean_length']:.0f} "
            f"of {result['max_length']}"
        )
    for name, mean in result["measures"].items():
        console.print(f"  {name.replace('_', ' ')} {mean:.3f}")
    for fault, meaning in (("failures", "envs became unstable and were reset"), ("overflows", "contact overflows")):
        if result[fault]:
            console.print(f"  [yellow]{result[fault]} {meaning}[/]")
    parts = (str(result["run"]), _program("paceline"), _program("tensorboard"))
    run, paceline, tensorboard = (escape(shlex.quote(part)) for part in parts)
    console.print(f"  run      {run}")
    if result["status"] == "interrupted":
        console.print(f"  resume   {paceline} train --resume {run}")
    if registry.is_renderable(result["task"]):
        console.print(f"  play     {paceline} play {run} --video {result['task']}.mp4")
    console.print(f"  curves   {tensorboard} --logdir {run}")


def _program(name: str) -> str:
    """Return the shortest command for a program of this Python environment, which may not be activated."""
    program = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not program.exists() or (found and Path(found).samefile(program)):
        return name
    relative = os.path.relpath(program)
    return str(program) if relative.startswith("..") else relative
