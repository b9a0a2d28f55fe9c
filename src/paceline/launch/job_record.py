"""The record of a job, job.json in its directory: which engine runs it, and the state of its tasks."""

import time
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import UserError, unknown
from paceline.launch.profile import Profile
from paceline.launch.spec import Workflow
from paceline.run.directory import write_atomically

RECORD, RESULT = "job.json", "result.json"


class State(StrEnum):
    WAITING = "waiting"
    PREPARING = "preparing"
    """The files and inputs of the task are copied to its node."""
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    """Ended by the engine, because the group has ended or the launch was interrupted."""
    SKIPPED = "skipped"
    """Never started, because the task's inputs are missing."""


class TaskRecord(BaseModel):
    """State of a task."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    group: str
    lead: bool = False
    host: str = ""
    tensorboard_port: int | None = None
    """Port on which the task serves TensorBoard: TENSORBOARD_PORT in the environment of the task."""
    state: State = State.WAITING
    exit_code: int | None = None
    """Exit code; 128 + N if signal N has ended the task."""
    reason: str = ""
    restarts: int = 0
    started: float | None = None
    """Time of the first start, seconds since 1970."""
    ended: float | None = None
    """Time of the last end, seconds since 1970."""

    @property
    def seconds(self) -> float:
        return (self.ended or time.time()) - self.started if self.started is not None else 0.0


class JobRecord(BaseModel):
    """A job. It never contains a credential."""

    engine: str
    workflow_id: str
    status: str = "running"
    """running, completed, failed or interrupted."""
    host: str = ""
    """Machine on which the process `pid` runs."""
    pid: int | None = None
    """Process that coordinates the job, for engines that have one."""
    pid_created: float = 0.0
    """Start of this process, seconds since 1970, because a process ID may be used again."""
    handles: dict[str, str] = {}
    """Names by which the tools of the engine know the job, for example its Slurm jobs or its namespace."""
    groups: dict[str, State] = {}
    tasks: dict[str, TaskRecord] = {}
    directory: Path = Field(default=Path(), exclude=True)
    """Directory of the job; the log of a task is TASK.log."""

    def save(self) -> None:
        write_atomically(self.directory / RECORD, self.model_dump_json(indent=2).encode() + b"\n")

    def log(self, task: str) -> Path:
        return self.directory / f"{task}.log"

    def check_task(self, task: str) -> None:
        """Raise UserError if the job has no such task."""
        if task not in self.tasks:
            raise unknown("task", task, self.tasks)


def read_record(directory: Path) -> JobRecord:
    """Read the record in the directory of a job. Raise UserError if there is none."""
    file = directory / RECORD
    try:
        record = JobRecord.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except ValidationError as error:
        raise UserError(f"{file} is not the record of a job: {error.errors()[0]['msg']}") from None
    record.directory = directory
    return record


def find_job(job: str, profile: Profile) -> JobRecord:
    """Return the record of a job, given its ID or the path of its directory."""
    if (Path(job) / RECORD).is_file():
        return read_record(Path(job).absolute())
    jobs = profile.storage_root.absolute() / "jobs"
    known = [file.parent.name for file in jobs.glob(f"*/{RECORD}")]
    if job not in known:
        raise UserError(f"{unknown('job', job, known)} in {jobs}; give the directory of a job that is elsewhere")
    return read_record(jobs / job)


def new_job(storage_root: Path, workflow: Workflow, last: int = 0) -> str:
    """Make the directory of a new job and return its ID. Its number is higher than `last`."""
    jobs = storage_root.absolute() / "jobs"
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        number = 1 + max(last, sum(1 for _ in jobs.glob(f"{workflow.name}-*")))
        while True:
            try:
                (jobs / f"{workflow.name}-{number}").mkdir()
                return f"{workflow.name}-{number}"
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(f"cannot make the directory of the job in {jobs}: {error.strerror}; set storage_root") from None
