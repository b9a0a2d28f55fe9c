"""The tasks and groups of a job while they run."""

import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.engines.task_files import TaskSpec
from paceline.launch.job_record import JobRecord, State, TaskRecord
from paceline.launch.spec import Group, Task
from paceline.launch.workflow import WorkflowFile, group_by_task, upstream


class TaskRun(TaskRecord):
    """A task and its process."""

    task: Task
    log: Path
    spec: TaskSpec | None = None
    """Specification that the node has received."""
    process: subprocess.Popen[bytes] | None = None
    """The task runner."""

    @property
    def is_active(self) -> bool:
        return self.process is not None

    def begin(self, state: State, process: subprocess.Popen[bytes]) -> None:
        self._close()
        self.state, self.exit_code, self.ended, self.process = state, None, None, process
        # While a task is prepared again, the reason says why.
        self.reason = self.reason if state == State.PREPARING else ""
        self.started = self.started if self.started is not None else time.time()

    def end(self, state: State, exit_code: int | None, reason: str = "") -> None:
        self._close()
        self.state, self.exit_code, self.reason, self.ended = state, exit_code, reason, time.time()

    def _close(self) -> None:
        if self.process and self.process.stdin:
            with suppress(OSError):
                self.process.stdin.close()
        self.process = None


@dataclass
class GroupRun:
    """A group and its tasks."""

    group: Group
    tasks: list[TaskRun]
    upstream: set[str]
    state: State = State.WAITING
    started: float = 0.0
    ending: "Ending | None" = None

    @property
    def lead(self) -> TaskRun:
        return next(run for run in self.tasks if run.task is self.group.lead)

    @property
    def active(self) -> list[TaskRun]:
        return [run for run in self.tasks if run.is_active]


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
    """Groups and tasks of a workflow. `directory` holds the logs of the tasks, and the record of the job."""

    def __init__(self, file: WorkflowFile, directory: Path, engine: str, groups: list[Group] | None = None):
        """`groups` are those to run, by default all."""
        self.file, self.workflow, self.workflow_id, self.directory = file, file.workflow, directory.name, directory
        group_of = group_by_task(self.workflow)
        groups = self.workflow.task_groups if groups is None else groups
        here = {group.name for group in groups}
        self.groups = [
            GroupRun(group, [self._run(task, group) for task in group.tasks], upstream(group, group_of) & here)
            for group in groups
        ]
        self.tasks = {run.task.name: run for group in self.groups for run in group.tasks}
        self.record = JobRecord(
            engine=engine, workflow_id=self.workflow_id, tasks=dict(self.tasks), directory=directory
        )

    def _run(self, task: Task, group: Group) -> TaskRun:
        port = task.environment.get("TENSORBOARD_PORT", "")
        return TaskRun(
            group=group.name,
            lead=task is group.lead and len(group.tasks) > 1,
            tensorboard_port=int(port) if port.isdecimal() and int(port) else None,
            task=task,
            log=self.directory / f"{task.name}.log",
        )
