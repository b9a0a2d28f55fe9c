"""Run the tasks of a job: groups, lead, barrier, dependencies, exit actions, restarts and timeouts.

The engine provides a `Transport`, which starts the task runner (paceline.launch.task_runner) on the node of a task.
"""

import os
import subprocess
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from paceline.errors import counted, one_line
from paceline.launch.engines.job_control import record_process
from paceline.launch.engines.report import LogPrinter, Report, last_line
from paceline.launch.engines.task_files import TaskSpec, secret_mounts, secret_variable
from paceline.launch.engines.task_run import Ending, GroupRun, Job, TaskRun
from paceline.launch.job_record import State
from paceline.launch.profile import ContainerSettings, TaskLimits
from paceline.launch.spec import Group, Task
from paceline.launch.task_runner import STORAGE_CODE
from paceline.launch.workflow import WorkflowFile
from paceline.process.interrupts import EXIT_CODE, Interrupts

Phase = Literal["prepare", "run"]

_POLL_SECONDS = 0.1
_FINISH_SECONDS = 2.0
"""Time that the other tasks of a group have to end by themselves after the lead has completed, s."""
_KILL_SECONDS = 5.0
"""Time after the grace period in which the task runner kills the processes of its task, s."""


class Transport(Protocol):
    """Starts tasks on nodes."""

    storage_root: Path
    """Directory on the nodes that holds jobs/ and datasets/."""
    venv: Path
    """Virtual environment of the tasks on the nodes."""
    container: ContainerSettings | None
    """Container tool of the nodes."""

    def reserve(self, group: Group) -> bool:
        """Reserve nodes and GPUs for the tasks of a group. Return False if the group must wait until another one has
        ended. A group that is started again is released and then reserved again."""
        ...

    def release(self, group: Group) -> None:
        """End the reservation of a group."""
        ...

    def host(self, task: Task) -> str:
        """Return the value of {{host:TASK}}. The group is reserved, except for a dry run."""
        ...

    def variables(self, task: Task) -> dict[str, str]:
        """Return environment variables of the node for a task of a reserved group, for example CUDA_VISIBLE_DEVICES."""
        ...

    def start(self, spec: TaskSpec, phase: Phase, log: Path) -> subprocess.Popen[bytes]:
        """Start the task runner on the node, for example by `processes.start`. The spec is sent to its standard input,
        which stays open: when it ends, the runner stops the task. Raise OSError."""
        ...

    def terminate(self, process: subprocess.Popen[bytes], spec: TaskSpec) -> None:
        """Request the task runner to stop its task: by SIGTERM, or by the end of its standard input."""
        ...

    def failure(self, spec: TaskSpec, code: int) -> str:
        """Return why the process of a task has ended with an exit code, if it is not because the task runner has ended;
        "" if it is. An example is a lost host."""
        ...

    def kill(self, process: subprocess.Popen[bytes], spec: TaskSpec) -> None:
        """Kill the task runner and all processes of its task, also those that remain after the end of the runner, and
        wait until they have ended."""
        ...


def task_spec(workflow_id: str, group: Group, task: Task, transport: Transport, grace_seconds: float = 0.0) -> TaskSpec:
    """Return a task without credentials and files of this host, as for a dry run."""
    return TaskSpec(
        workflow_id=workflow_id,
        task=task,
        storage_root=transport.storage_root,
        venv=transport.venv,
        container=transport.container,
        hosts={other.name: transport.host(other) for other in group.tasks},
        grace_seconds=grace_seconds,
    )


def complete_spec(spec: TaskSpec, file: WorkflowFile, transport: Transport) -> TaskSpec:
    """Return a task with its credentials and the contents of files that are on this host. Raise OSError."""
    task, source = spec.task, file.path.parent
    contents = {each.path: (source / each.localpath).read_bytes() for each in task.files if each.localpath is not None}
    names = [name for variables in task.credentials.values() if isinstance(variables, dict) for name in variables]
    variables = transport.variables(task) | {name: os.environ[name] for name in names}
    secrets = {name: os.environ[secret_variable(name)] for name in secret_mounts(task)}
    return spec.model_copy(update={"contents": contents, "variables": variables, "secrets": secrets})


def coordinate(job: Job, transport: Transport, limits: TaskLimits, console: Console, follow: bool = False) -> int:
    """Run a job and wait for its end. With `follow`, print the output of the tasks in place of the table. Return 0 if
    all groups have completed, 1 if one has failed, and 130 after an interruption."""
    coordinator = Coordinator(job, transport, limits, console, follow)
    notice = "Stopping all tasks. Press Ctrl-C again to kill them."
    with Interrupts(notice=notice, before_exit=coordinator.abort) as stop:
        try:
            return coordinator.run(stop)
        finally:
            coordinator.kill()


class Coordinator:
    def __init__(self, job: Job, transport: Transport, limits: TaskLimits, console: Console, follow: bool):
        self._job, self._transport, self._limits, self._console = job, transport, limits, console
        self._report = Report(job.record, console)
        self._output = LogPrinter(job.record, [*job.tasks]) if follow else None

    def kill(self) -> None:
        """Kill all tasks."""
        for run in self._job.tasks.values():
            self._kill(run)

    def abort(self) -> None:
        """Kill all tasks at once, from the thread that handles signals."""
        self.kill()
        for run in self._job.tasks.values():
            if run.state in (State.PREPARING, State.RUNNING):
                run.end(State.STOPPED, None, "killed")
        self._job.record.status = "interrupted"
        self._save()

    def _kill(self, run: TaskRun) -> None:
        # The thread that handles signals may call this at the same time.
        process = run.process
        if process and run.spec:
            self._transport.kill(process, run.spec)
            process.wait()

    def run(self, stop: Interrupts) -> int:
        job, record = self._job, self._job.record
        (job.directory / "workflow.yaml").write_text(job.file.text)
        record_process(record)
        self._save()
        self._console.print(f"Job {job.workflow_id}; logs: {escape(str(job.directory))}/TASK.log")
        live = Live(get_renderable=self._report.table, console=self._console, refresh_per_second=2, transient=True)
        has_table = self._console.is_terminal and not self._output
        with live if has_table else nullcontext():
            while any(group.state in (State.WAITING, State.RUNNING) for group in job.groups):
                for group in job.groups:
                    self._step(group, stop.requested)
                if self._output:
                    self._output.print_new()
                if self._report.changes(printed=not has_table):
                    self._save()
                time.sleep(_POLL_SECONDS)
        if self._output:
            self._output.print_new(is_last=True)
        completed = all(group.state == State.COMPLETED for group in job.groups)
        record.status = "interrupted" if stop.requested else "completed" if completed else "failed"
        self._save()
        self._console.print(self._report.table())
        self._report.print_failures()
        try:
            self._report.write_result()
        except OSError as error:
            self._console.print(escape(f"result.json cannot be written: {error}"))
        return EXIT_CODE if stop.requested else 0 if completed else 1

    def _save(self) -> None:
        self._job.record.groups = {group.group.name: group.state for group in self._job.groups}
        # A full disk must not end the tasks.
        with suppress(OSError):
            self._job.record.save()

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
                self._check_tasks(group)

    def _start_when_ready(self, group: GroupRun, stopping: bool) -> None:
        states = {other.group.name: other.state for other in self._job.groups}
        before = {states[name] for name in group.upstream}
        if stopping or before & {State.FAILED, State.SKIPPED, State.STOPPED}:
            group.state = State.SKIPPED
            for run in group.tasks:
                run.state = State.SKIPPED
                run.reason = "interrupted" if stopping else "a task whose output it needs has failed"
        elif before <= {State.COMPLETED} and self._transport.reserve(group.group):
            group.state = State.RUNNING
            self._start(group)

    def _start(self, group: GroupRun) -> None:
        group.started = time.monotonic()
        for run in group.tasks:
            self._prepare(group, run)

    def _prepare(self, group: GroupRun, run: TaskRun) -> None:
        """Begin to prepare the files of a task on its node."""
        job, grace = self._job, self._limits.grace_seconds
        spec = task_spec(job.workflow_id, group.group, run.task, self._transport, grace)
        run.host = spec.hosts[run.task.name]
        try:
            run.spec = complete_spec(spec, job.file, self._transport)
            run.begin(State.PREPARING, self._transport.start(run.spec, "prepare", run.log))
        except OSError as error:
            run.end(State.FAILED, None, f"cannot prepare its files: {one_line(error)}")
            self._failed(group, run)

    def _check_tasks(self, group: GroupRun) -> None:
        """Act on the end of processes."""
        preparing = [run for run in group.tasks if run.state == State.PREPARING]
        for run in preparing:
            if code := _exit_code(run):
                self._preparation_failed(group, run, code)
        # With a barrier, no command is started before the files of all tasks are ready.
        is_ready = not group.group.barrier or all(_exit_code(run) is not None for run in preparing if run.is_active)
        for run in group.tasks:
            code = _exit_code(run)
            if code is None or group.ending:
                continue
            if run.state == State.RUNNING:
                self._task_ended(group, run, code)
            elif is_ready:
                self._run(group, run)

    def _preparation_failed(self, group: GroupRun, run: TaskRun, code: int) -> None:
        assert run.spec
        failure = self._transport.failure(run.spec, code)
        if failure and run.task.action(code) == "RESCHEDULE":
            return self._reschedule(group, run, code, failure)
        run.end(State.FAILED, None, failure or _reason(run, code) or f"cannot prepare its files: exit code {code}")
        is_first_start = not any(other.state == State.RUNNING for other in group.tasks)
        self._failed(group, run, is_fatal=group.group.barrier and is_first_start)

    def _run(self, group: GroupRun, run: TaskRun) -> None:
        assert run.spec
        try:
            run.begin(State.RUNNING, self._transport.start(run.spec, "run", run.log))
        except OSError as error:
            run.end(State.FAILED, None, f"cannot start it: {one_line(error)}")
            self._failed(group, run)

    def _task_ended(self, group: GroupRun, run: TaskRun, code: int) -> None:
        self._kill(run)
        if reason := _reason(run, code):
            run.end(State.FAILED, None, reason)
            return self._failed(group, run)
        assert run.spec
        cause = self._transport.failure(run.spec, code) or f"exit code {code}"
        match run.task.action(code):
            case "COMPLETE":
                run.end(State.COMPLETED, code)
                if run is group.lead:
                    self._end(group, State.COMPLETED, "the lead has completed", _FINISH_SECONDS)
            case "RESCHEDULE":
                self._reschedule(group, run, code, cause)
            case _:
                run.end(State.FAILED, code, cause)
                self._failed(group, run)

    def _failed(self, group: GroupRun, run: TaskRun, is_fatal: bool = False) -> None:
        if run is group.lead:
            self._end(group, State.FAILED, "the lead has failed")
        elif is_fatal or not group.group.ignoreNonleadStatus:
            self._end(group, State.FAILED, f"{run.task.name} has failed")

    def _reschedule(self, group: GroupRun, run: TaskRun, code: int, cause: str) -> None:
        limit = self._limits.max_reschedules
        if run.restarts >= limit:
            name = f"{self._job.record.engine}.max_reschedules"
            run.end(State.FAILED, code, f"{cause}, after {counted(limit, 'restart')} ({name})")
            return self._failed(group, run)
        run.restarts += 1
        run.end(State.WAITING, code, f"{cause}: it is started again")
        if run is group.lead or not group.group.ignoreNonleadStatus:
            self._end(group, State.RUNNING, f"{run.task.name} is started again")
        else:
            self._prepare(group, run)

    def _end(self, group: GroupRun, result: State, reason: str, wait: float = 0.0) -> None:
        """Begin to end all processes of a group."""
        if group.ending is None:
            begin = time.monotonic() + wait
            group.ending = Ending(result, reason, begin, begin + self._limits.grace_seconds + _KILL_SECONDS)

    def _continue_ending(self, group: GroupRun) -> None:
        ending, now = group.ending, time.monotonic()
        assert ending
        if not ending.terminated and now >= ending.terminate_at:
            ending.terminated = True
            for run in group.active:
                if run.process and run.spec and run.process.poll() is None:
                    self._transport.terminate(run.process, run.spec)
        for run in group.active:
            if _exit_code(run) is not None or now >= ending.kill_at:
                self._end_task(run, ending)
        if group.active:
            return
        group.ending = None
        self._transport.release(group.group)
        if ending.result == State.RUNNING:
            group.state = State.WAITING
            return
        group.state = ending.result
        for run in group.tasks:
            if run.state in (State.WAITING, State.RUNNING):
                run.end(State.STOPPED, run.exit_code, ending.reason)

    def _end_task(self, run: TaskRun, ending: Ending) -> None:
        """Note the end of a task whose group is being ended."""
        self._kill(run)
        code = _exit_code(run) or 0
        if run.state == State.RUNNING and (reason := _reason(run, code)):
            run.end(State.FAILED, None, reason)
        elif run.state == State.RUNNING and not ending.terminated and run.task.action(code) == "COMPLETE":
            run.end(State.COMPLETED, code)
        else:
            run.end(State.STOPPED, code, ending.reason)


def _exit_code(run: TaskRun) -> int | None:
    """Return the exit code of the process of a task, or None if it has none that has ended."""
    code = run.process.poll() if run.process else None
    return code if code is None or code >= 0 else 128 - code


def _reason(run: TaskRun, code: int) -> str:
    """Return the reason that the task runner gives for a failure that is not one of the command."""
    line = last_line(run.log) if code == STORAGE_CODE else ""
    return line.removeprefix("paceline: ") if line.startswith("paceline: ") else ""
