"""The tasks and groups of a job on this machine, and their states."""

import subprocess
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.errors import UserError, one_line
from paceline.launch.engines import processes
from paceline.launch.engines.resources import Amounts, needed
from paceline.launch.engines.task_files import TaskFiles
from paceline.launch.profile import Profile
from paceline.launch.spec import Group, Task, Workflow
from paceline.launch.workflow import WorkflowFile, upstream

_NOT_FOUND_CODE = 127


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    """Ended by the engine, because the group has ended or the launch was interrupted."""
    SKIPPED = "skipped"
    """Never started, because the task's inputs are missing."""


@dataclass
class TaskRun:
    """A task and its process."""

    task: Task
    files: TaskFiles
    log: Path
    state: State = State.WAITING
    exit_code: int | None = None
    """Exit code; 128 + N if signal N has ended the task."""
    reason: str = ""
    restarts: int = 0
    started: float | None = None
    ended: float | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def mark(self) -> str:
        return f"{self.files.workflow_id}/{self.task.name}"

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started if self.started is not None else 0.0

    def command(self) -> list[str]:
        return [self.files.resolve(part) for part in (*self.task.command, *self.task.args)]

    def start(self, environment: dict[str, str]) -> None:
        self.state, self.exit_code, self.reason, self.ended = State.RUNNING, None, "", None
        self.started = self.started if self.started is not None else time.monotonic()
        values = {name: self.files.resolve(value) for name, value in self.task.environment.items()}
        environment = environment | values | {processes.MARK: self.mark}
        try:
            self.process = processes.start(self.command(), self.files.work, environment, self.log)
        except (OSError, ValueError) as error:
            # ValueError: a null character in an argument or variable.
            self.end(State.FAILED, _NOT_FOUND_CODE, f"cannot start {self.task.command[0]}: {one_line(error)}")

    def end(self, state: State, exit_code: int | None, reason: str = "") -> None:
        self.state, self.exit_code, self.reason, self.ended = state, exit_code, reason, time.monotonic()
        self.process = None


@dataclass
class GroupRun:
    """A group and its tasks."""

    group: Group
    tasks: list[TaskRun]
    upstream: set[str]
    need: Amounts
    state: State = State.WAITING
    started: float = 0.0
    gpus: list[str] = field(default_factory=list)
    ending: "Ending | None" = None

    @property
    def lead(self) -> TaskRun:
        return next(run for run in self.tasks if run.task is self.group.lead)

    @property
    def running(self) -> list[TaskRun]:
        return [run for run in self.tasks if run.process]


@dataclass
class Ending:
    """A group whose processes are being ended."""

    result: State
    """State of the group afterwards. RUNNING: it is started again."""
    reason: str
    terminate_at: float
    kill_at: float
    terminated: bool = False


class Job:
    """Groups and tasks of a workflow with their directories."""

    def __init__(self, file: WorkflowFile, profile: Profile, workflow_id: str):
        self.workflow, self.workflow_id = file.workflow, workflow_id
        root = profile.storage_root.absolute()
        self.directory = root / "jobs" / workflow_id
        groups = self.workflow.task_groups
        group_of = {task.name: group for group in groups for task in group.tasks}
        self.groups = [
            GroupRun(
                group,
                [self._task_run(task, root / "datasets") for task in group.tasks],
                upstream(group, group_of),
                needed(group, self.workflow),
            )
            for group in groups
        ]
        self.tasks = {run.task.name: run for group in self.groups for run in group.tasks}

    def _task_run(self, task: Task, datasets: Path) -> TaskRun:
        files = TaskFiles(task, self.directory / task.name, self.workflow_id, datasets)
        return TaskRun(task, files, self.directory / f"{task.name}.log")


def new_job(storage_root: Path, workflow: Workflow) -> str:
    """Make the directory of a new job and return its ID."""
    jobs = storage_root.absolute() / "jobs"
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        number = 1 + sum(1 for _ in jobs.glob(f"{workflow.name}-*"))
        while True:
            try:
                (jobs / f"{workflow.name}-{number}").mkdir()
                return f"{workflow.name}-{number}"
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(f"cannot make the directory of the job in {jobs}: {error.strerror}; set storage_root") from None
