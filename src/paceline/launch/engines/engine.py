"""Interface of an engine."""

from dataclasses import dataclass
from typing import Protocol

from rich.console import Console

from paceline.launch.job_record import JobRecord
from paceline.launch.profile import Profile
from paceline.launch.workflow import WorkflowFile


@dataclass(frozen=True)
class LaunchOptions:
    oversubscribe: bool = False
    """Run tasks also if they request more than the machine has."""
    follow: bool = False
    """Print the output of the tasks while they run."""


class Engine(Protocol):
    """A module of paceline.launch.engines. All functions raise UserError for what the engine cannot do, and return an
    exit code."""

    def describe(self, file: WorkflowFile, profile: Profile) -> str:
        """Return what would be submitted, as `--dry-run` prints it. This depends on the file and the profile only, not
        on the host."""
        ...

    def launch(self, file: WorkflowFile, profile: Profile, console: Console, options: LaunchOptions) -> int:
        """Run or submit a workflow."""
        ...

    def status(self, job: JobRecord, console: Console) -> int:
        """Print the state of a job and its tasks."""
        ...

    def logs(self, job: JobRecord, task: str | None, follow: bool) -> int:
        """Print the output of a task, or of all tasks; with `follow`, until the job has ended."""
        ...

    def cancel(self, job: JobRecord) -> int:
        """End a job and all its processes."""
        ...

    def tensorboard(self, job: JobRecord) -> int:
        """Print the address of the job's TensorBoard; where a tunnel is needed, keep it open until Ctrl-C."""
        ...
