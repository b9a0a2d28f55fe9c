"""Train a run as one rank: set up the rank, plan, build, restore, loop, finish."""

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.device.cpu import tune_torch
from paceline.distributed import worker_log
from paceline.distributed.failure import Failure, PeerLostError
from paceline.distributed.group import Group
from paceline.distributed.launch_record import merged, this_launch
from paceline.distributed.launcher import under_elastic_agent
from paceline.distributed.rank import die_with_launcher, this_rank
from paceline.errors import UserError
from paceline.learners.settings import Settings
from paceline.process.interrupts import STOP_NOTICE, Interrupts
from paceline.process.stage import stage
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.loggers.logger import check_loggers
from paceline.run.mirror import Mirror
from paceline.training.build import resolve
from paceline.training.callbacks import Callback
from paceline.training.plan import Plan, load_start, make_plan, plan_with_mirror
from paceline.training.ranks import check_ranks_agree
from paceline.training.session import Session
from paceline.training.worker import TrainingFailedError, Worker

# One stop request may arrive twice within this time, s: at a rank from a terminal or scheduler and from a launcher, and
# at a single process from `timeout`, which signals it and its process group.
_SAME_REQUEST_SECONDS = 2.0
_SAME_REQUEST_SECONDS_ALONE = 0.5
# Time for which a rank that stops on the request of another rank waits for its own request, s. If it ended earlier,
# a launcher that is about to restart all ranks would regard the run as completed.
_SIGNAL_SECONDS = 15.0


class RunCompletedError(Exception):
    """The run had completed before, so there is nothing to train."""

    def __init__(self, message: str, mirror_error: str | None):
        super().__init__(message)
        self.mirror_error = mirror_error


def train(
    config: TrainConfig,
    run: RunDir,
    console: Console,
    resume_from: Path | None = None,
    mirror_url: str | None = None,
    callbacks: tuple[Callback, ...] = (),
) -> dict[str, Any]:
    """Train until `max_iterations`, Ctrl-C or a failure. The `callbacks` run on the main rank.

    Return the content of result.json, the directory it is in as `run`, and the reason why `mirror_url` does not hold
    the complete run, or None, as `mirror_error`. Under a launcher this process is one of several ranks, and the main
    rank's `run`, `resume_from` and `mirror_url` are used.
    """
    config, settings = resolve(config)
    rank = this_rank(config.gpu_ids)
    die_with_launcher()
    tune_torch(rank.device)
    worker = Worker(rank, config)
    is_waiting = rank.is_main and rank.world_size > 1
    try:
        with stage(console, f"Waiting for {rank.world_size} ranks") if is_waiting else nullcontext():
            group = Group(rank, config.timeout, worker.end_with_others)
    except PeerLostError as error:
        raise TrainingFailedError(str(Failure(rank.index, rank.host, str(error)))) from error

    def plan() -> Plan:
        check_loggers(config.logger)
        plan = make_plan(config, run, resume_from, launch)
        if mirror_url:
            worker.mirror = Mirror(mirror_url, partial(console.print, markup=False, soft_wrap=True))
            plan = plan_with_mirror(config, plan, worker.mirror)
        return load_start(plan, config, settings, group.size)

    began = time.monotonic()
    try:
        launch = merged(group.all_gather(this_launch()))
        return _train(worker, group, config, settings, _decide_on_main(group, plan), console, began, callbacks)
    except RunCompletedError:
        raise
    except Exception as error:
        if isinstance(error, UserError) and (error.reported or not group.is_distributed):
            raise
        raise worker.end(error, group) from error
    finally:
        if worker.session:
            worker.session.close("failed")  # otherwise it is closed already
        group.close()


def _train(
    worker: Worker,
    group: Group,
    config: TrainConfig,
    settings: Settings,
    plan: Plan,
    console: Console,
    began: float,
    callbacks: tuple[Callback, ...],
) -> dict[str, Any]:
    rank, warn = group.rank, partial(console.print, markup=False, soft_wrap=True)
    if plan.completed:
        if group.watch:
            group.watch.stop()  # the other ranks may end before this one
        # The last upload of the run may have failed.
        mirror_error = _mirror_completed(worker.mirror, plan.run) if worker.mirror else None
        raise RunCompletedError(f"{plan.run.path} has completed before: nothing to do.", mirror_error)
    members = check_ranks_agree(config, group, len(plan.envs[rank.index]))
    with ExitStack() as stack:
        run = _decide_on_main(group, lambda: stack.enter_context(plan.run.held(plan.is_new, warn)))
        plan = worker.plan = replace(plan, run=run)
        worker.log = worker_log.begin(rank, config.worker_log_dir, run.worker_logs)
        same_seconds = _SAME_REQUEST_SECONDS if group.is_distributed else _SAME_REQUEST_SECONDS_ALONE
        interrupts = Interrupts(same_seconds, STOP_NOTICE if rank.is_main else "", worker.mark_interrupted)
        consoles = worker.log.consoles(console)
        session = Session(config, settings, group, plan, members, interrupts, consoles, began, callbacks)
        # Files are written only after all ranks are built.
        group.all_gather(None)
        worker.session = session
        stack.callback(session.checkpoints.wait_after_failure)  # while the directory is still locked
        if rank.is_main:
            checkpoint.set_aside_later(run.checkpoints, session.learner.iteration)
            run.write_config(config)
        if worker.mirror:
            worker.mirror.start(run)

        with interrupts:
            session.write_result("running")
            session.loop()
            session.save()
            session.checkpoints.wait()
            completed = session.learner.iteration >= config.max_iterations
            result = session.write_result("completed" if completed else "interrupted")
            if group.watch:
                group.watch.stop()  # the other ranks may end before this one
            session.close(result["status"])
            mirror_error = worker.mirror.finish(lambda: interrupts.requested) if worker.mirror else None
            if not completed and under_elastic_agent():
                interrupts.wait(_SIGNAL_SECONDS)
    return result | {"run": run.path, "mirror_error": mirror_error}


def _mirror_completed(mirror: Mirror, run: RunDir) -> str | None:
    with Interrupts(notice=STOP_NOTICE) as interrupts:
        mirror.start(run)
        return mirror.finish(lambda: interrupts.requested)


def _decide_on_main(group: Group, decide: Callable[[], Any]) -> Any:
    """Return on all ranks what `decide` returns on the main rank; raise its UserError on all ranks."""
    decision = None
    if group.rank.is_main:
        try:
            decision = decide()
        except UserError as error:
            decision = UserError(str(error), reported=True)
    decision = group.broadcast(decision)
    if isinstance(decision, UserError):
        raise decision
    return decision
