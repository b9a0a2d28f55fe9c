"""Run a workflow on this machine: every task is a process with a private directory."""

import os
import shlex
import time
from contextlib import nullcontext

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from paceline.errors import one_line
from paceline.launch.engines import processes
from paceline.launch.engines.report import Report
from paceline.launch.engines.resources import available, check_fits, needed, visible_gpus
from paceline.launch.engines.support import check_host, check_supported, environment, notes
from paceline.launch.engines.task_run import Ending, GroupRun, Job, State, TaskRun, new_job
from paceline.launch.profile import Profile
from paceline.launch.workflow import WorkflowFile
from paceline.process.interrupts import EXIT_CODE, Interrupts

_POLL_SECONDS = 0.1
_FINISH_SECONDS = 2.0
"""Time that the other tasks of a group have to end by themselves after the lead has completed, s."""


def describe(file: WorkflowFile, profile: Profile) -> str:
    """Return the commands of all tasks as text, as `run` would start them for the first job of the workflow."""
    check_supported(file)
    job = Job(file, profile, f"{file.workflow.name}-1")
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
    check_host(file, profile)
    engine = _Engine(file, profile, console, oversubscribe)
    processes.adopt_orphans()
    with Interrupts(notice="Stopping all tasks. Press Ctrl-C again to kill them.", before_exit=processes.kill) as stop:
        try:
            return engine.run(stop)
        finally:
            processes.kill()


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
        self._job = Job(file, profile, new_job(profile.storage_root, workflow))
        (self._job.directory / "workflow.yaml").write_text(file.text)
        self._report = Report(self._job, console)

    def run(self, stop: Interrupts) -> int:
        for note in notes(self._file, self._profile):
            self._console.print(escape(note))
        self._console.print(f"Job {self._job.workflow_id}; logs: {escape(str(self._job.directory))}/TASK.log")
        live = Live(get_renderable=self._report.table, console=self._console, refresh_per_second=2, transient=True)
        with live if self._console.is_terminal else nullcontext():
            while any(group.state in (State.WAITING, State.RUNNING) for group in self._job.groups):
                for group in self._job.groups:
                    self._step(group, stop.requested)
                if not self._console.is_terminal:
                    self._report.print_changes()
                time.sleep(_POLL_SECONDS)
        self._console.print(self._report.table())
        self._report.print_failures()
        self._report.write_result(stop.requested)
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
        programs = environment(self._profile) / "bin"
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
