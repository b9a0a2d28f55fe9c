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
from paceline.launch.engines.placement import Host, Placement
from paceline.launch.engines.resources import available, check_fits, visible_gpus
from paceline.launch.engines.support import check_host, check_supported, environment, heading, notes, tasks_of
from paceline.launch.engines.task_files import TaskFiles, TaskSpec
from paceline.launch.engines.task_run import Job
from paceline.launch.job_record import new_job
from paceline.launch.profile import Profile
from paceline.launch.spec import Task, Workflow
from paceline.launch.task_runner import command_of
from paceline.launch.workflow import WorkflowFile

_ENGINE = "local"

status, logs, cancel, tensorboard = print_status, print_logs, stop_coordinator, print_tensorboard


def describe(file: WorkflowFile, profile: Profile) -> str:
    """Return the rendered workflow and the commands of all tasks, as for the first job of the workflow."""
    check_supported(file, _ENGINE)
    workflow, lines = file.workflow, [file.text.rstrip(), ""]
    transport = LocalTransport(Placement([], workflow), profile)
    for group in workflow.task_groups:
        for task in group.tasks:
            files = TaskFiles(task_spec(f"{workflow.name}-1", group, task, transport))
            lines.append(heading(workflow, group, task))
            lines.append(f"cd {shlex.quote(str(files.work))}")
            values = [f"{name}={value}" for name, value in files.environment().items()]
            lines.append(shlex.join([*(["env", *values] if values else []), *command_of(files.spec)[0]]))
    return "\n".join(lines)


def launch(file: WorkflowFile, profile: Profile, console: Console, options: LaunchOptions) -> int:
    """Run a workflow and wait for its end."""
    check_supported(file, _ENGINE)
    check_host(file, profile)
    host = _this_machine(file.workflow, profile.storage_root.absolute())
    for group in file.workflow.task_groups if not options.oversubscribe else []:
        check_fits(group, file.workflow, host.have)
    transport = LocalTransport(Placement([host], file.workflow, oversubscribe=options.oversubscribe), profile)
    job = Job(file, profile.storage_root.absolute() / "jobs" / new_job(profile.storage_root, file.workflow), _ENGINE)
    for note in notes(file, profile):
        console.print(escape(note))
    processes.adopt_orphans()
    try:
        return coordinate(job, transport, profile.local, console, options.follow)
    finally:
        processes.kill()


def _this_machine(workflow: Workflow, storage_root: Path) -> Host:
    """Return what this machine has. GPUs are counted only if the workflow requests some."""
    gpus = visible_gpus() if any(workflow.resource(task).gpu for task in tasks_of(workflow)) else []
    return Host("this machine", available(storage_root, gpus), gpus)


class LocalTransport:
    """Starts the task runner as a process of this machine."""

    def __init__(self, placement: Placement, profile: Profile):
        self.storage_root, self.venv = profile.storage_root.absolute(), environment(profile)
        self.container = profile.container
        self.reserve, self.release, self.variables = placement.reserve, placement.release, placement.variables

    def host(self, task: Task) -> str:
        return "127.0.0.1"

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
