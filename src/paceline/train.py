"""Train a run as one rank: set up the rank, plan, build, restore, loop, finish."""

import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.device.cpu import tune_torch
from paceline.distributed import worker_log
from paceline.distributed.failure import Failure, PeerLostError, Watch
from paceline.distributed.group import Group, differences
from paceline.distributed.launch_record import LaunchRecord, merged, this_launch
from paceline.distributed.rank import Rank, die_with_launcher, this_rank, under_elastic_agent
from paceline.distributed.sharding import shard_ranges
from paceline.errors import UserError
from paceline.learners.settings import Settings, check_samples
from paceline.process.interrupts import STOP_NOTICE, Interrupts, ignore
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.versions import versions
from paceline.training.build import fingerprint, resolve
from paceline.training.header import Member, print_header, this_member
from paceline.training.plan import load_start, make_plan
from paceline.training.session import NonFiniteError, Session

# A terminal or a scheduler and a launcher both pass on the same request.
_SAME_REQUEST_SECONDS = 2.0
# Time in which a rank that stops because another rank was requested to stop waits for its own request. If it ended
# earlier, its launcher, which may be about to restart all ranks, would take the run for completed.
_SIGNAL_SECONDS = 15.0


class TrainingFailedError(Exception):
    """Training failed. The message names the cause, the rank, the host and the file with the traceback."""


class RunCompletedError(Exception):
    """The run had completed before, so there is nothing to train."""


class _SharedRefusalError(UserError):
    """A refusal that all ranks raise alike."""


def train(config: TrainConfig, run: RunDir, console: Console, resume_from: Path | None = None) -> dict[str, Any]:
    """Train until `max_iterations`, Ctrl-C or a failure.

    Return the content of result.json and, as `run`, the directory it is in. Under a launcher this process is one of
    several ranks, and the main rank's `run` and `resume_from` are used.
    """
    config, settings = resolve(config)
    rank = this_rank(config.gpu_ids)
    die_with_launcher()
    tune_torch(rank.device)
    worker = _Worker(rank, run)
    try:
        group = Group(rank, config.timeout_seconds, worker.end_with_others)
    except PeerLostError as error:
        raise TrainingFailedError(str(Failure(rank.index, rank.host, str(error)))) from error
    try:
        return _train(worker, group, config, settings, console, resume_from)
    except RunCompletedError:
        raise
    except _SharedRefusalError as error:
        error.reported = True
        raise
    except UserError as error:
        if group.watch is None:
            raise
        raise _exception(_refuse_on_all_ranks(error, worker, group.watch)) from error
    except Exception as error:
        raise _exception(_fail_on_all_ranks(error, worker, group)) from error
    finally:
        group.close()


def _train(
    worker: "_Worker",
    group: Group,
    config: TrainConfig,
    settings: Settings,
    console: Console,
    resume_from: Path | None,
) -> dict[str, Any]:
    rank, began = group.rank, time.monotonic()
    launch = merged(group.all_gather(this_launch()))
    plan = _decide_on_main(group, lambda: make_plan(config, worker.run, resume_from, launch))
    if plan.completed:
        raise RunCompletedError(f"{plan.run.path} has completed before: nothing to do.")
    start = _decide_on_main(group, lambda: load_start(plan, config, settings, group.size))
    envs = _decide_on_main(group, lambda: _shard_envs(settings, start.total_envs, group.size))[rank.index]
    members = _check_ranks_agree(config, group, len(envs))
    warn = partial(console.print, markup=False, soft_wrap=True)
    with ExitStack() as stack:
        run = _decide_on_main(group, lambda: stack.enter_context(plan.run.held(plan.is_new, warn)))
        worker.run, worker.holds_directory = run, True
        worker.log = worker_log.begin(rank, group.alone, config.worker_log_dir, run.worker_logs)
        if plan.is_new:
            worker.result = partial(_early_result, config, launch)
        consoles = worker.log.consoles(console)
        for each in consoles:
            print_header(each, config, settings, group, plan, start, members, run)

        session = Session(config, settings, group, envs, plan, start, launch, consoles, began)
        # A run exists only if all ranks could be built.
        group.all_gather(None)
        worker.result, worker.session = session.result, session
        if rank.is_main:
            checkpoint.set_aside_later(run.checkpoints, session.learner.iteration)
            run.write_config(config)

        same_seconds = 0.0 if group.alone else _SAME_REQUEST_SECONDS
        with Interrupts(same_seconds, STOP_NOTICE if rank.is_main else "", worker.mark_interrupted) as interrupts:
            session.interrupts = interrupts
            session.write_result(run, "running")
            session.loop(run)
            session.save(run)
            completed = session.learner.iteration >= config.max_iterations
            result = session.write_result(run, "completed" if completed else "interrupted")
            if not completed and under_elastic_agent():
                if group.watch:
                    group.watch.stop()  # the other ranks may end before this one
                interrupts.wait(_SIGNAL_SECONDS)
    return result | {"run": run.path}


def _decide_on_main(group: Group, decide: Callable[[], Any]) -> Any:
    """Return on all ranks what `decide` returns on the main rank; raise its UserError on all ranks."""
    decision = None
    if group.rank.is_main:
        try:
            decision = decide()
        except UserError as error:
            decision = error
    decision = group.broadcast(decision)
    if isinstance(decision, UserError):
        raise _SharedRefusalError(str(decision)) from decision
    return decision


def _shard_envs(settings: Settings, total_envs: int, ranks: int) -> list[range]:
    """Return the global indices of the envs of each rank."""
    if total_envs < ranks:
        raise UserError(f"{total_envs} envs are too few for {ranks} ranks: each needs one")
    ranges = shard_ranges(total_envs, ranks)
    check_samples(settings, min(map(len, ranges)))
    return ranges


def _check_ranks_agree(config: TrainConfig, group: Group, num_envs: int) -> list[Member]:
    """Return all ranks for the header. Raise if versions, settings or code differ between ranks."""
    members, fingerprints = zip(*group.all_gather((this_member(group, num_envs), fingerprint(config))), strict=True)
    differing = differences(fingerprints)
    if differing:
        index, name, theirs, ours = differing[0]
        more = f" ({len(differing) - 1} more differences)" if len(differing) > 1 else ""
        raise _SharedRefusalError(
            f"rank {index} on {members[index].host} has {name} {theirs}, the main rank on {members[0].host} "
            f"has {ours}: all ranks need the same{more}"
        )
    return list(members)


class _Worker:
    """What this rank has created so far, for the code that ends it after a failure."""

    def __init__(self, rank: Rank, run: RunDir):
        self.rank, self.run = rank, run
        self.log = worker_log.WorkerLog(rank.is_main)
        self.session: Session | None = None
        self.holds_directory = False
        self.result: Callable[[str, str], dict[str, Any]] | None = None
        """Returns the content of result.json for a status and a cause. None while that of an earlier start is kept."""

    def record(self, failure: Failure, details: str) -> bool:
        """Write a failure to the log of this rank and, on the main rank, to the run directory. Return whether error.log
        was written: the disk may be what failed."""
        self.log.write(details)
        if not self.holds_directory or not self.rank.is_main:
            return False
        written = False
        with suppress(OSError):
            # A new run without files has removed its directory.
            self.run.path.mkdir(parents=True, exist_ok=True)
            self.run.error_file.write_text(details)
            written = True
        with suppress(OSError, UserError):
            if self.result:
                self.run.write_result(**self.result("failed", str(failure)))
        return written

    def mark_interrupted(self) -> None:
        """Write to result.json that the run ends at once, without a checkpoint."""
        if self.rank.is_main:
            self.run.mark_ended("interrupted")

    def end_with_others(self, failure: Failure) -> None:
        """Record the failure of another rank. The watch ends this process afterwards."""
        self.record(failure, f"ending, because another rank failed: {failure}\n")
        if self.rank.is_main:
            print(f"paceline: {'' if failure.refused else 'training failed: '}{failure}", file=sys.stderr, flush=True)


def _refuse_on_all_ranks(error: UserError, worker: _Worker, watch: Watch) -> Failure:
    """End all ranks because this one refuses its input. Return the failure that was reported first."""
    ignore()  # a launcher that sees another rank end signals this one
    rank = worker.rank
    failure = watch.report(Failure(rank.index, rank.host, str(error), refused=True))
    worker.record(failure, f"{failure}\n")
    return failure


def _fail_on_all_ranks(error: Exception, worker: _Worker, group: Group) -> Failure:
    """Record the failure of this rank and end all ranks. Return the failure that was reported first."""
    if not group.alone:
        ignore()  # a launcher that sees another rank end signals this one
    session, log = worker.session, worker.log.path
    if group.alone and worker.holds_directory:
        log = str(worker.run.error_file)
    failure = Failure(group.rank.index, group.rank.host, _cause(error), log)
    if group.watch:
        # A value that became NaN on another rank is reported there.
        from_another_rank = (
            isinstance(error, NonFiniteError) and session is not None and session.learner.first_non_finite() is None
        )
        failure = group.watch.report(failure, echo=from_another_rank or isinstance(error, PeerLostError))
    details = traceback.format_exc()
    if not worker.record(failure, details) and group.alone:
        print(details, file=sys.stderr)
        return replace(failure, log="")
    return failure


def _exception(failure: Failure) -> Exception:
    """Return the exception for a failure that all ranks know of."""
    if not failure.refused:
        return TrainingFailedError(str(failure))
    refusal = UserError(str(failure))
    refusal.reported = True
    return refusal


def _cause(error: Exception) -> str:
    """Describe an error in one line, with the line of the task's code that raised it."""
    if isinstance(error, (NonFiniteError, PeerLostError)):
        return str(error)
    installed = str(Path(__file__).parent), sys.prefix, sys.base_prefix
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*installed, "<"))]
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _early_result(config: TrainConfig, launch: LaunchRecord, status: str, cause: str) -> dict[str, Any]:
    """Return the content of result.json for a run that failed before its first iteration."""
    fields = {"status": status, "cause": cause, "task": config.task, "learner": config.learner, "restarts": 0}
    return fields | launch.fields() | {"versions": versions()}
