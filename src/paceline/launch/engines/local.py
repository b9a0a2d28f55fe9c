"""Run a workflow on this machine: every task is a process with a private directory."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline.launch.engines import processes
from paceline.launch.engines.coordinator import Phase, coordinate, task_spec
from paceline.launch.engines.engine import LaunchOptions
from paceline.launch.engines.job_control import print_logs, print_status, print_tensorboard, stop_coordinator
from paceline.launch.engines.resources import Amounts, available, check_fits, needed, visible_gpus
from paceline.launch.engines.support import check_host, check_supported, environment, notes
from paceline.launch.engines.task_files import TaskFiles, TaskSpec
from paceline.launch.engines.task_run import Job
from paceline.launch.job_record import new_job
from paceline.launch.profile import Profile
from paceline.launch.spec import Group, Task, Workflow
from paceline.launch.task_runner import command_of
from paceline.launch.workflow import WorkflowFile, group_by_task, upstream

_ENGINE, _HOST = "local", "127.0.0.1"

status, logs, cancel, tensorboard = print_status, print_logs, stop_coordinator, print_tensorboard


def describe(file: WorkflowFile, profile: Profile) -> str:
    """Return the rendered workflow and the commands of all tasks, as for the first job of the workflow."""
    check_supported(file, _ENGINE)
    transport, groups = LocalTransport(file.workflow, profile), group_by_task(file.workflow)
    lines = [file.text.rstrip(), ""]
    for group in file.workflow.task_groups:
        names = sorted(upstream(group, groups))
        waits = f" after {', '.join(names)}" if names else ""
        for task in group.tasks:
            files = TaskFiles(task_spec(f"{file.workflow.name}-1", group, task, transport))
            lead = " (lead)" if task is group.lead and len(group.tasks) > 1 else ""
            lines.append(f"# {group.name}{waits}: {task.name}{lead}")
            lines.append(f"cd {shlex.quote(str(files.work))}")
            values = [f"{name}={value}" for name, value in files.environment().items()]
            lines.append(shlex.join([*(["env", *values] if values else []), *command_of(files.spec)[0]]))
    return "\n".join(lines)


def launch(file: WorkflowFile, profile: Profile, console: Console, options: LaunchOptions) -> int:
    """Run a workflow and wait for its end."""
    check_supported(file, _ENGINE)
    check_host(file, profile)
    transport = LocalTransport(file.workflow, profile, options.oversubscribe)
    transport.measure()
    job = Job(file, profile.storage_root.absolute() / "jobs" / new_job(profile.storage_root, file.workflow), _ENGINE)
    for note in notes(file, profile):
        console.print(escape(note))
    processes.adopt_orphans()
    try:
        return coordinate(job, transport, profile.local, console, options.follow)
    finally:
        processes.kill()


class LocalTransport:
    """Starts the task runner as a process of this machine."""

    def __init__(self, workflow: Workflow, profile: Profile, oversubscribe: bool = False):
        self.storage_root, self.venv = profile.storage_root.absolute(), environment(profile)
        self.container = profile.container
        self._workflow, self._oversubscribe = workflow, oversubscribe
        self._have, self._gpus = Amounts(), list[str]()
        self._reserved = dict[str, Amounts]()
        self._gpus_of = dict[str, list[str]]()
        """GPUs of the tasks of reserved groups."""

    def measure(self) -> None:
        """Determine what this machine has. Raise UserError if a group needs more."""
        groups = self._workflow.task_groups
        requests_gpus = any(self._workflow.resource(task).gpu for group in groups for task in group.tasks)
        self._gpus = visible_gpus() if requests_gpus else []
        self._have = available(self.storage_root, self._gpus)
        for group in groups if not self._oversubscribe else []:
            check_fits(group, needed(group, self._workflow), self._have)

    def reserve(self, group: Group) -> bool:
        need = needed(group, self._workflow)
        used = self._reserved.values()
        if used and not self._oversubscribe and not sum(used, need).fits(self._have):
            return False
        self._reserved[group.name] = need
        for task in group.tasks:
            # GPUs that no other running task has come first, as far as there are enough.
            taken = [gpu for gpus in self._gpus_of.values() for gpu in gpus]
            order = sorted(self._gpus, key=taken.count)
            self._gpus_of[task.name] = order[: self._workflow.resource(task).gpu or 0]
        return True

    def release(self, group: Group) -> None:
        del self._reserved[group.name]
        for task in group.tasks:
            del self._gpus_of[task.name]

    def host(self, task: Task) -> str:
        return _HOST

    def variables(self, task: Task) -> dict[str, str]:
        if self._workflow.resource(task).gpu is None:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus_of[task.name])}

    def start(self, spec: TaskSpec, phase: Phase, log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "paceline.launch.task_runner", phase]
        line = spec.model_dump_json().encode()
        return processes.start(command, line, log, os.environ | {processes.MARK: spec.mark})

    def terminate(self, process: subprocess.Popen[bytes], spec: TaskSpec) -> None:
        process.terminate()

    def failure(self, spec: TaskSpec, code: int) -> str:
        return ""

    def kill(self, process: subprocess.Popen[bytes], spec: TaskSpec) -> None:
        processes.kill(spec.mark)
        TaskFiles(spec).remove_secrets()
