"""Run a workflow on this machine: every task is a process with a private directory."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.errors import UserError, one_line
from paceline.launch.engines import processes
from paceline.launch.engines.resources import Amounts, available, check_fits, needed, visible_gpus
from paceline.launch.engines.task_files import TaskFiles, check_files
from paceline.launch.profile import Profile
from paceline.launch.spec import Dataset, Group, Task, Workflow
from paceline.launch.workflow import WorkflowFile, upstream
from paceline.process.interrupts import EXIT_CODE, Interrupts

_POLL_SECONDS = 0.1
_FINISH_SECONDS = 2.0
"""Time that the other tasks of a group have to end by themselves after the lead has completed, s."""
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


_STYLES = {State.RUNNING: "cyan", State.COMPLETED: "green", State.FAILED: "bold red"}


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


def check_supported(file: WorkflowFile) -> None:
    """Raise UserError, with the name of the key, if the workflow needs something that this engine does not have."""
    for task in (task for group in file.workflow.task_groups for task in group.tasks):
        for key, reason in _unsupported(task):
            raise UserError(f"{file.path}: task {task.name}: the engine local does not support {key}: {reason}")
        check_files(task, file.path.parent, on_host=False)


def _unsupported(task: Task) -> Iterator[tuple[str, str]]:
    for key, places in (("inputs", task.inputs), ("outputs", task.outputs)):
        for url in (place.url for place in places if place.url is not None):
            parts = urlsplit(url) if "\0" not in url else None
            if not parts or parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
                yield key, f"the URL {url[:80]!r} must begin with file:///"
    datasets = [place.dataset for place in (*task.inputs, *task.outputs)]
    for dataset in filter(None, (*datasets, *(output.update_dataset for output in task.outputs))):
        yield from _unsupported_dataset(dataset)
    if task.checkpoint:
        yield "checkpoint", "remove it; {{output}} is kept when a task is started again"
    if task.kpis:
        yield "kpis", "remove it"
    if task.volumeMounts:
        yield "volumeMounts", "tasks run without a container; use the paths of this machine"
    if task.privileged:
        yield "privileged", "tasks run with the rights of the user; remove it"
    for name, variables in task.credentials.items():
        if isinstance(variables, str):
            yield f"credentials.{name}", "a credential cannot be mounted as a file; name environment variables"


def _unsupported_dataset(dataset: Dataset) -> Iterator[tuple[str, str]]:
    for key in ("paths", "metadata", "labels", "localpath"):
        if getattr(dataset, key):
            yield f"dataset.{key}", "remove it"
    for key, value in (("name", dataset.name), ("path", dataset.path)):
        if ".." in Path(value).parts or value.startswith("/") or "\0" in value:
            yield f"dataset.{key}", f"{value[:80]!r} must be a relative path without .."


def notes(file: WorkflowFile, profile: Profile) -> list[str]:
    """Return what the engine does not use although the file has it, one line each."""
    workflow = file.workflow
    images = dict.fromkeys(task.image for group in workflow.task_groups for task in group.tasks)
    found = [f"image {', '.join(images)} is not used: tasks run in the environment {_environment(profile)}"]
    resources = workflow.resources.values()
    for key in ("platform", "nodesExcluded", "topology"):
        if any(getattr(resource, key) for resource in resources):
            found.append(f"{key} is not used: all tasks run on this machine")
    if workflow.pool:
        found.append(f"pool {workflow.pool} is not used: all tasks run on this machine")
    if any(task.downloadType or task.cacheSize for group in workflow.task_groups for task in group.tasks):
        found.append("downloadType and cacheSize are not used: inputs are copied")
    return found


def _environment(profile: Profile) -> Path:
    return profile.environment or Path(sys.prefix)


def describe(file: WorkflowFile, profile: Profile) -> str:
    """Return the commands of all tasks as text, as `run` would start them for the first job of the workflow."""
    check_supported(file)
    job = _Job(file, profile, f"{file.workflow.name}-1")
    lines = list[str]()
    for group in job.groups:
        waits = f" after {', '.join(sorted(group.upstream))}" if group.upstream else ""
        for run in group.tasks:
            lead = " (lead)" if run is group.lead and len(group.tasks) > 1 else ""
            lines.append(f"# {group.group.name}{waits}: {run.task.name}{lead}")
            lines.append(f"cd {shlex.quote(str(run.files.work))}")
            values = [f"{name}={run.files.resolve(value)}" for name, value in run.task.environment.items()]
            lines.append(shlex.join([*(["env", *values] if values else []), *run.command()]))
    return "\n".join(lines)


def run(file: WorkflowFile, profile: Profile, console: Console, oversubscribe: bool = False) -> int:
    """Run a workflow and wait for its end. Return 0 if all tasks have completed that the file does not allow to fail,
    1 if one has failed, and 130 after an interruption."""
    check_supported(file)
    _check_host(file, profile)
    engine = _Engine(file, profile, console, oversubscribe)
    processes.adopt_orphans()
    with Interrupts(notice="Stopping all tasks. Press Ctrl-C again to kill them.", before_exit=processes.kill) as stop:
        try:
            return engine.run(stop)
        finally:
            processes.kill()


def _check_host(file: WorkflowFile, profile: Profile) -> None:
    for task in (task for group in file.workflow.task_groups for task in group.tasks):
        check_files(task, file.path.parent, on_host=True)
        for variables in task.credentials.values():
            for name in variables:
                if name not in os.environ:
                    raise UserError(f"task {task.name}: credentials: set the environment variable {name}")
    if not (_environment(profile) / "bin").is_dir():
        raise UserError(f"the environment {_environment(profile)} of the profile has no directory bin")


class _Job:
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


class _Engine:
    def __init__(self, file: WorkflowFile, profile: Profile, console: Console, oversubscribe: bool):
        self._file, self._profile, self._console, self._oversubscribe = file, profile, console, oversubscribe
        workflow = file.workflow
        asks_for_gpus = any(workflow.resource(task).gpu for group in workflow.task_groups for task in group.tasks)
        self._gpus = visible_gpus() if asks_for_gpus else []
        self._have = available(profile.storage_root.absolute(), self._gpus)
        for group in workflow.task_groups:
            if not oversubscribe:
                check_fits(group, needed(group, workflow), self._have)
        self._job = _Job(file, profile, _new_job(profile.storage_root, workflow))
        (self._job.directory / "workflow.yaml").write_text(file.text)
        self._shown = dict[str, str]()

    def run(self, stop: Interrupts) -> int:
        for note in notes(self._file, self._profile):
            self._console.print(escape(note))
        self._console.print(f"Job {self._job.workflow_id}; logs: {escape(str(self._job.directory))}/TASK.log")
        live = Live(get_renderable=self._table, console=self._console, refresh_per_second=2, transient=True)
        with live if self._console.is_terminal else nullcontext():
            while any(group.state in (State.WAITING, State.RUNNING) for group in self._job.groups):
                for group in self._job.groups:
                    self._step(group, stop.requested)
                if not self._console.is_terminal:
                    self._print_changes()
                time.sleep(_POLL_SECONDS)
        self._console.print(self._table())
        self._print_failures()
        self._write_result(stop.requested)
        if stop.requested:
            return EXIT_CODE
        return 0 if all(group.state == State.COMPLETED for group in self._job.groups) else 1

    def _step(self, group: GroupRun, stopping: bool) -> None:
        if group.state == State.WAITING:
            self._start_when_ready(group, stopping)
        elif group.state == State.RUNNING and group.ending:
            self._continue_ending(group)
        elif group.state == State.RUNNING:
            limit = self._job.workflow.timeout.exec_timeout
            if stopping:
                self._end(group, State.STOPPED, "interrupted")
            elif limit is not None and time.monotonic() - group.started > limit:
                self._end(group, State.FAILED, f"exec_timeout of {limit:g} s")
            else:
                for run in group.tasks:
                    if run.state == State.RUNNING and not group.ending:
                        self._check_task(group, run)

    def _start_when_ready(self, group: GroupRun, stopping: bool) -> None:
        states = {other.group.name: other.state for other in self._job.groups}
        before = {states[name] for name in group.upstream}
        if stopping or before & {State.FAILED, State.SKIPPED, State.STOPPED}:
            group.state = State.SKIPPED
            for run in group.tasks:
                run.state = State.SKIPPED
                run.reason = "interrupted" if stopping else "a task whose output it needs has failed"
        elif before <= {State.COMPLETED} and self._has_room(group):
            self._allocate_gpus(group)
            group.state, group.started = State.RUNNING, time.monotonic()
            self._start(group, group.tasks)

    def _has_room(self, group: GroupRun) -> bool:
        running = [other.need for other in self._job.groups if other.state == State.RUNNING]
        return self._oversubscribe or not running or sum(running, group.need).fits(self._have)

    def _allocate_gpus(self, group: GroupRun) -> None:
        """Give each task GPUs that no other running task has, as far as there are enough."""
        taken = [gpu for other in self._job.groups if other.state == State.RUNNING for gpu in other.gpus]
        order = sorted(self._gpus, key=taken.count)
        count = int(group.need.gpu)
        group.gpus = (order * (count // len(order) + 1))[:count] if order else []

    def _start(self, group: GroupRun, runs: list[TaskRun]) -> None:
        """Start tasks of a group. With a barrier, none is started before the files of all are ready."""
        ready = list[TaskRun]()
        for run in runs:
            if self._prepare(run):
                ready.append(run)
            if not group.group.barrier and ready[-1:] == [run]:
                run.start(self._variables(group, run))
        if group.group.barrier:
            for run in ready if len(ready) == len(runs) else []:
                run.start(self._variables(group, run))
        for run in runs:
            if not run.process:
                self._failed(group, run)

    def _prepare(self, run: TaskRun) -> bool:
        run.started = time.monotonic() if run.started is None else run.started
        try:
            run.files.prepare(lambda name: self._job.tasks[name].files.output, self._file.path.parent, run.log)
        except (OSError, UnicodeError) as error:
            run.end(State.FAILED, None, f"cannot prepare its files: {one_line(error)}")
            return False
        return True

    def _variables(self, group: GroupRun, run: TaskRun) -> dict[str, str]:
        programs = _environment(self._profile) / "bin"
        variables = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
        variables.setdefault("PYTHONUNBUFFERED", "1")
        gpu = self._job.workflow.resource(run.task).gpu
        if gpu is not None:
            counts = [self._job.workflow.resource(other.task).gpu or 0 for other in group.tasks]
            first = sum(counts[: group.tasks.index(run)])
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(group.gpus[first : first + gpu]))
        return variables

    def _check_task(self, group: GroupRun, run: TaskRun) -> None:
        """Act on the end of a task."""
        code = run.process.poll() if run.process else None
        if code is None:
            return
        # As in a container, nothing of a task continues after its first process.
        processes.kill(run.mark)
        code = code if code >= 0 else 128 - code
        match run.task.action(code):
            case "COMPLETE":
                self._completed(group, run, code)
            case "RESCHEDULE":
                self._reschedule(group, run, code)
            case _:
                run.end(State.FAILED, code, f"exit code {code}")
                self._failed(group, run)

    def _completed(self, group: GroupRun, run: TaskRun, code: int) -> None:
        try:
            run.files.store_outputs()
        except OSError as error:
            reason = f"its output cannot be stored: {one_line(error)}; it is kept in {run.files.output}"
            run.end(State.FAILED, code, reason)
            return self._failed(group, run)
        run.end(State.COMPLETED, code)
        if run is group.lead:
            self._end(group, State.COMPLETED, "the lead has completed", _FINISH_SECONDS)

    def _failed(self, group: GroupRun, run: TaskRun) -> None:
        if run is group.lead:
            self._end(group, State.FAILED, "the lead has failed")
        elif not group.group.ignoreNonleadStatus:
            self._end(group, State.FAILED, f"{run.task.name} has failed")

    def _reschedule(self, group: GroupRun, run: TaskRun, code: int) -> None:
        limit = self._profile.local.max_reschedules
        if run.restarts >= limit:
            run.end(State.FAILED, code, f"exit code {code} after {limit} restarts (local.max_reschedules)")
            return self._failed(group, run)
        run.restarts += 1
        run.end(State.WAITING, code, f"exit code {code}: it is started again")
        if run is group.lead or not group.group.ignoreNonleadStatus:
            self._end(group, State.RUNNING, f"{run.task.name} is started again")
        else:
            self._start(group, [run])

    def _end(self, group: GroupRun, result: State, reason: str, wait: float = 0.0) -> None:
        """Begin to end all processes of a group."""
        if group.ending is None:
            begin = time.monotonic() + wait
            group.ending = Ending(result, reason, begin, begin + self._profile.local.grace_seconds)

    def _continue_ending(self, group: GroupRun) -> None:
        ending, now = group.ending, time.monotonic()
        assert ending
        if not ending.terminated and now >= ending.terminate_at:
            ending.terminated = True
            for run in group.running:
                if run.process and run.process.poll() is None:
                    processes.terminate(run.process)
        for run in group.running:
            code = run.process.poll() if run.process else None
            if code is None and now < ending.kill_at:
                continue
            processes.kill(run.mark)
            code = run.process.wait() if run.process else 0
            code = code if code >= 0 else 128 - code
            by_itself = not ending.terminated and run.task.action(code) == "COMPLETE"
            state = State.COMPLETED if by_itself else State.STOPPED
            run.end(state, code, "" if by_itself else ending.reason)
        if group.running:
            return
        group.ending = None
        if ending.result == State.RUNNING:
            group.started = time.monotonic()
            self._start(group, group.tasks)
            return
        group.state = ending.result
        for run in group.tasks:
            if run.state in (State.WAITING, State.RUNNING):
                run.end(State.STOPPED, run.exit_code, ending.reason)

    def _table(self) -> Table:
        table = Table("task", "group", "state", "time", "exit code", "restarts", box=None, header_style="bold")
        for group in self._job.groups:
            for run in group.tasks:
                lead = " (lead)" if run is group.lead and len(group.tasks) > 1 else ""
                code = "" if run.exit_code is None else str(run.exit_code)
                table.add_row(
                    Text(run.task.name + lead),
                    Text(group.group.name),
                    Text(run.state, style=_STYLES.get(run.state, "")),
                    f"{run.seconds:.0f} s" if run.started is not None else "",
                    code,
                    str(run.restarts or ""),
                )
        return table

    def _print_changes(self) -> None:
        for name, run in self._job.tasks.items():
            line = f"{run.state}{f': {run.reason}' if run.reason else ''}"
            if run.restarts:
                line = f"{line}; restarts: {run.restarts}"
            if line != self._shown.get(name, State.WAITING):
                self._shown[name] = line
                self._console.print(escape(f"{name}: {line}"))

    def _print_failures(self) -> None:
        for name, run in self._job.tasks.items():
            if run.state == State.FAILED:
                last = _last_line(run.log)
                ending = f"\n  last line: {last}" if last else ""
                self._console.print(escape(f"{name} failed: {run.reason}; log: {run.log}{ending}"))

    def _write_result(self, interrupted: bool) -> None:
        completed = all(group.state == State.COMPLETED for group in self._job.groups)
        result = {
            "workflow_id": self._job.workflow_id,
            "status": "interrupted" if interrupted else "completed" if completed else "failed",
            "groups": {group.group.name: str(group.state) for group in self._job.groups},
            "tasks": {
                name: {
                    "state": str(run.state),
                    "exit_code": run.exit_code,
                    "seconds": round(run.seconds, 3),
                    "restarts": run.restarts,
                    "reason": run.reason,
                }
                for name, run in self._job.tasks.items()
            },
        }
        (self._job.directory / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def _new_job(storage_root: Path, workflow: Workflow) -> str:
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


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:200] if lines else ""
