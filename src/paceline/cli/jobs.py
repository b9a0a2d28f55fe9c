"""The commands `paceline status`, `logs`, `cancel` and `tensorboard`: watch and end a job of `paceline launch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional

from paceline.cli.options import parse_options
from paceline.launch.engines import load_engine
from paceline.launch.job_record import JobRecord, find_job
from paceline.launch.profile import read_profile
from paceline.process import interrupts
from paceline.run.config import option


@dataclass(frozen=True)
class _JobArguments:
    """Options that select a job."""

    job: Annotated[Positional[str], option("JOB")]
    """ID of the job, which paceline launch prints, for example train-policy-1, or the path of its directory."""
    profile: Annotated[Path | None, option("FILE")] = None
    """File with the settings of this site, as for paceline launch. Its storage_root holds the directory of the job."""

    def find(self) -> JobRecord:
        return find_job(self.job, read_profile(self.profile))


@dataclass(frozen=True)
class StatusArguments(_JobArguments):
    """Print the state of a job and its tasks."""


@dataclass(frozen=True)
class LogsArguments(_JobArguments):
    """Print the output of the tasks of a job, with the name of the task before each line."""

    task: Annotated[Positional[str | None], option("TASK")] = None
    """Name of the only task whose output is printed. The default is all tasks."""
    follow: Annotated[bool, FlagCreatePairsOff] = False
    """Continue to print until the job has ended, or until Ctrl-C. The job is not affected."""


@dataclass(frozen=True)
class CancelArguments(_JobArguments):
    """End a job: stop all its tasks, and wait until no process of it runs."""


@dataclass(frozen=True)
class TensorboardArguments(_JobArguments):
    """Print the address of the TensorBoard that a task of a job serves. Where a tunnel is needed, it is open until
    Ctrl-C."""


def status(argv: list[str], console: Console) -> int:
    job = parse_options(StatusArguments, argv, "status").find()
    return load_engine(job.engine).status(job, console)


def logs(argv: list[str], console: Console) -> int:
    arguments = parse_options(LogsArguments, argv, "logs")
    job = arguments.find()
    interrupts.exit_at_once()
    return load_engine(job.engine).logs(job, arguments.task, arguments.follow)


def cancel(argv: list[str], console: Console) -> int:
    job = parse_options(CancelArguments, argv, "cancel").find()
    return load_engine(job.engine).cancel(job)


def tensorboard(argv: list[str], console: Console) -> int:
    job = parse_options(TensorboardArguments, argv, "tensorboard").find()
    return load_engine(job.engine).tensorboard(job)
