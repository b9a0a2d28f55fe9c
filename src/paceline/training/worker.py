"""End a rank, and with it all ranks, after a failure."""

import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.distributed import worker_log
from paceline.distributed.failure import Failure, PeerLostError
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.errors import UserError, one_line
from paceline.process.interrupts import ignore
from paceline.run.config import TrainConfig
from paceline.run.mirror import Mirror
from paceline.training.plan import Plan
from paceline.training.session import NonFiniteError, Session


class TrainingFailedError(Exception):
    """Training failed. The message names the cause, the rank, the host and the file with the traceback."""


class Worker:
    """Plan, session and log of this rank, as far as they exist, for the code that ends it after a failure."""

    def __init__(self, rank: Rank, config: TrainConfig):
        self.rank, self._config = rank, config
        self.log = worker_log.WorkerLog(rank.is_main)
        self.plan: Plan | None = None
        """Set once the directory of the run is held."""
        self.session: Session | None = None
        self.mirror: Mirror | None = None
        """Mirror of the run, on the main rank only."""

    def end(self, error: Exception, group: Group) -> Exception:
        """Record that an error ends this rank, and end all ranks. Return the exception of the failure that was reported
        first."""
        refused = isinstance(error, UserError)
        if group.is_distributed:
            ignore()  # a launcher sends signals to this rank when another one ends
        log = self.log.path if group.is_distributed or not self.plan else str(self.plan.run.error_file)
        failure = Failure(self.rank.index, self.rank.host, _cause(error), "" if refused else log, refused)
        if group.watch:
            # A value that became NaN on another rank is reported there.
            learner = self.session.learner if self.session else None
            on_another_rank = isinstance(error, NonFiniteError) and learner and learner.first_non_finite() is None
            failure = group.watch.report(failure, echo=bool(on_another_rank) or isinstance(error, PeerLostError))
        details = f"{failure}\n" if refused else traceback.format_exc()
        if not self._record(failure, details) and not group.is_distributed:
            print(details, file=sys.stderr)
            failure = replace(failure, log="")
        if self.mirror and (reason := self.mirror.finish(stop_requested=lambda: True)):
            print(f"paceline: {reason}", file=sys.stderr)
        return UserError(str(failure), reported=True) if failure.refused else TrainingFailedError(str(failure))

    def end_with_others(self, failure: Failure) -> None:
        """Record the failure of another rank. The watch ends this process afterwards."""
        if self.session:
            self.session.checkpoints.wait_after_failure()
        self._record(failure, f"ending, because another rank failed: {failure}\n")
        if self.rank.is_main:
            print(f"paceline: {'' if failure.refused else 'training failed: '}{failure}", file=sys.stderr, flush=True)

    def mark_interrupted(self) -> None:
        """Write to result.json that the run ends at once, without a checkpoint."""
        if self.rank.is_main and self.plan:
            self.plan.run.mark_ended("interrupted")

    def _record(self, failure: Failure, details: str) -> bool:
        """Write a failure to the log of this rank and, on the main rank, to the run directory. Return whether error.log
        was written, which is not possible on a full disk."""
        self.log.write(details)
        if not self.plan or not self.rank.is_main:
            return False
        run, written = self.plan.run, False
        with suppress(OSError):
            # A new run without files has removed its directory.
            run.path.mkdir(parents=True, exist_ok=True)
            run.error_file.write_text(details)
            written = True
        with suppress(OSError, UserError):
            if self.session:
                run.write_result(**self.session.result("failed", str(failure)))
            elif self.plan.is_new:
                # Otherwise the result of an earlier start is kept.
                run.write_result(**self.plan.result(self._config, "failed", str(failure)))
        return written


def _cause(error: Exception) -> str:
    """Return a description of an error in one line, with the line of the task's code that raised it."""
    if isinstance(error, (NonFiniteError, PeerLostError, UserError)):
        return str(error)
    installed = str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*installed, "<"))]
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)}{place}"
