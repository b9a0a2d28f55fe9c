"""Run a workflow on hosts over SSH. OpenSSH's client starts the task runner on the host of a task.

The connection to a host stays open while the task runs. The host ends the task by itself when the connection ends or is
lost. Therefore no process remains on a host, also if this machine or the network fails.
"""

import os
import shlex
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline.errors import UserError
from paceline.launch.engines import processes
from paceline.launch.engines.coordinator import Phase, coordinate, task_spec
from paceline.launch.engines.engine import LaunchOptions
from paceline.launch.engines.job_control import print_logs, print_status, stop_coordinator, tensorboard_task
from paceline.launch.engines.placement import Host, Placement
from paceline.launch.engines.report import last_line
from paceline.launch.engines.ssh_commands import LOST_CODE, SshCommands
from paceline.launch.engines.ssh_hosts import copy_files, query
from paceline.launch.engines.ssh_task import ENDED
from paceline.launch.engines.support import check_sources, check_supported, environment, heading, notes
from paceline.launch.engines.task_files import TaskSpec
from paceline.launch.engines.task_run import Job
from paceline.launch.engines.tunnel import open_tensorboard
from paceline.launch.job_record import JobRecord, new_job
from paceline.launch.profile import Profile, SshHost
from paceline.launch.spec import Task
from paceline.launch.workflow import WorkflowFile, ordered_groups
from paceline.process.interrupts import cleanup_on_exit

status, logs, cancel = print_status, print_logs, stop_coordinator

_RUNNER = "paceline.launch.engines.ssh_task"
_HONORED = ("nodesExcluded",)
_RETRY_SECONDS = 5
"""Time before a lost host is called again, s."""


def describe(file: WorkflowFile, profile: Profile) -> str:
    """Return the rendered workflow, the commands for all hosts and the specifications that they receive on standard
    input, as for the first job of the workflow. A profile without hosts gets host1, host2, ..."""
    check_supported(file, "ssh", _HONORED)
    workflow = file.workflow
    count = max(len(group.tasks) for group in workflow.task_groups)
    named = profile.ssh.hosts or [SshHost(name=f"host{index}") for index in range(1, count + 1)]
    commands, hosts = _commands(profile, named), [Host(host.name) for host in named]
    job = profile.storage_root.absolute() / "jobs" / f"{workflow.name}-1"
    placement = Placement(hosts, workflow, profile.ssh.tasks_per_host, oversubscribe=True)
    transport = SshTransport(placement, commands, profile, job)
    lines = [file.text.rstrip(), ""]
    for host in commands:
        lines += [shlex.join(host.sync(path)) for path in profile.ssh.sync]
    for group in ordered_groups(workflow):
        placement.check(group)
        placement.reserve(group)
        for task in group.tasks:
            spec = transport.for_host(task_spec(job.name, group, task, transport, profile.ssh.grace_seconds))
            lines.append(heading(workflow, group, task))
            lines += [shlex.join(transport.command(spec, phase)) for phase in ("prepare", "run")]
            lines.append("# Standard input, to which credentials and the contents of localpath files are added:")
            lines.append(f"# {spec.model_dump_json(exclude_defaults=True)}")
        placement.release(group)
    return "\n".join(lines)


def launch(file: WorkflowFile, profile: Profile, console: Console, options: LaunchOptions) -> int:
    """Run a workflow on the hosts of the profile and wait for its end."""
    check_supported(file, "ssh", _HONORED)
    check_sources(file)
    if not profile.ssh.hosts:
        raise UserError("the engine ssh needs hosts; add them to the profile, for example ssh: {hosts: [{name: HOST}]}")
    workflow, commands = file.workflow, _commands(profile, profile.ssh.hosts)
    with cleanup_on_exit(processes.kill):
        copy_files(commands)
        hosts, last_job = query(commands, workflow, lambda line: console.print(escape(line)))
    placement = Placement(hosts, workflow, profile.ssh.tasks_per_host, options.oversubscribe)
    for group in workflow.task_groups:
        placement.check(group)
    directory = profile.storage_root.absolute() / "jobs" / new_job(profile.storage_root, workflow, last_job)
    job = Job(file, directory, "ssh")
    job.record.handles = {host.host.reached_at: shlex.join(host.ssh()) for host in commands}
    for note in notes(file, profile, nodes="the hosts of the profile"):
        console.print(escape(note))
    transport = SshTransport(placement, commands, profile, directory)
    return coordinate(job, transport, profile.ssh, console, options.follow)


def tensorboard(job: JobRecord) -> int:
    """Open a tunnel to the TensorBoard of a job and print its address. The tunnel is open until Ctrl-C."""
    task, port = tensorboard_task(job)
    host = job.tasks[task].host
    if host not in job.handles:
        raise UserError(f"the task {task} of {job.workflow_id} has not started; see paceline status {job.workflow_id}")
    open_tensorboard(shlex.split(job.handles[host]), host, port, job.workflow_id)
    return 0


def _commands(profile: Profile, hosts: list[SshHost]) -> list[SshCommands]:
    root, venv = profile.storage_root.absolute(), environment(profile)
    return [SshCommands(host, profile.ssh, host.storage_root or root, host.environment or venv) for host in hosts]


class SshTransport:
    """Starts the task runner on the hosts of tasks."""

    def __init__(self, placement: Placement, commands: list[SshCommands], profile: Profile, job: Path):
        """`job` is the directory of the job on this machine."""
        self.storage_root, self.venv = profile.storage_root.absolute(), environment(profile)
        self.container = profile.container
        self._placement, self._settings, self._job = placement, profile.ssh, job
        self._commands = {each.host.name: each for each in commands}
        self.reserve, self.release, self.variables = placement.reserve, placement.release, placement.variables
        self._inputs = dict[str, _Input]()
        """Standard input of the newest process of each task."""

    def host(self, task: Task) -> str:
        return self._commands_of(task.name).host.reached_at

    def _commands_of(self, task: str) -> SshCommands:
        return self._commands[self._placement.host(task).name]

    def for_host(self, spec: TaskSpec) -> TaskSpec:
        """Return a specification with the directories of the host of the task."""
        commands = self._commands_of(spec.task.name)
        places = {"storage_root": commands.storage_root, "venv": commands.venv}
        return spec.model_copy(update=places | {"silence_seconds": self._settings.lost_seconds})

    def command(self, spec: TaskSpec, phase: Phase) -> list[str]:
        """Return the command line that starts the task runner on the host of a task."""
        commands = self._commands_of(spec.task.name)
        command = commands.python(_RUNNER, phase)
        before = [["sleep", str(_RETRY_SECONDS)]] if self._placement.host(spec.task.name).is_lost else []
        before += self._copies(spec.task, commands) if phase == "prepare" else []
        if not before:
            return command
        script = [f"{shlex.join(part)} </dev/null" for part in before]
        return ["sh", "-c", " && ".join([*script, f"exec {shlex.join(command)}"])]

    def _copies(self, task: Task, target: SshCommands) -> list[list[str]]:
        """Return the commands that copy the outputs of other tasks from their hosts to the host of a task, through the
        directory of the job on this machine."""
        if self._settings.shared_storage:
            return []
        copies = list[list[str]]()
        for name in dict.fromkeys(given.task for given in task.inputs if given.task and not given.is_earlier):
            source = self._commands_of(name)
            if source is not target:
                output, here = Path("jobs") / self._job.name / name / "output", self._job / name / "output"
                copies += [source.pull(source.storage_root / output, here)]
                copies += [target.push(here, target.storage_root / output)]
        return copies

    def start(self, spec: TaskSpec, phase: Phase, log: Path) -> subprocess.Popen[bytes]:
        command = self.command(spec, phase)
        with log.open("ab") as output, self._messages(spec).open("wb") as messages:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=messages, start_new_session=True, bufsize=0
            )
        assert process.stdin
        line = self.for_host(spec).model_dump_json().encode() + b"\n"
        seconds = self._commands_of(spec.task.name).alive_seconds
        self._inputs[spec.task.name] = _Input(os.dup(process.stdin.fileno()), line, seconds)
        process.stdin.close()
        return process

    def terminate(self, process: subprocess.Popen[bytes], spec: TaskSpec) -> None:
        self._inputs[spec.task.name].close()
        if not self._inputs[spec.task.name].is_sent:
            self.kill(process, spec)

    def kill(self, process: subprocess.Popen[bytes], spec: TaskSpec) -> None:
        # The task runner ends the task when the connection ends.
        self._inputs[spec.task.name].close()
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def failure(self, spec: TaskSpec, code: int) -> str:
        message = last_line(self._messages(spec))
        if message.startswith(ENDED):
            return ""
        host = self._placement.host(spec.task.name)
        if code != LOST_CODE:
            return f"cannot run on the host {host.name}: {message or f'exit code {code}'}"
        host.is_lost = True
        if spec.task.action(LOST_CODE) == "RESCHEDULE":
            self._placement.move(spec.task)
        return f"lost the host {host.name}: {message.rstrip('.') or 'the task runner was killed'}"

    def _messages(self, spec: TaskSpec) -> Path:
        """Return the file with the messages of ssh."""
        return self._job / f"{spec.task.name}.ssh.log"


class _Input:
    """Standard input of a task runner on a host: its specification, and then an empty line at regular intervals, which
    shows that this machine is alive."""

    def __init__(self, descriptor: int, line: bytes, seconds: float):
        self._descriptor, self._line, self._seconds = descriptor, line, seconds
        self._closed = threading.Event()
        self.is_sent = False
        """True once the specification is sent, which may wait for the connection."""
        threading.Thread(target=self._send, daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _send(self) -> None:
        try:
            rest = memoryview(self._line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self.is_sent = True
            while not self._closed.wait(self._seconds):
                os.write(self._descriptor, b"\n")
        except OSError:
            pass  # the process has ended
        finally:
            os.close(self._descriptor)
