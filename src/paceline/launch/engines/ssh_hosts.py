"""Hosts of the engine ssh: find out what they have, copy files to them, and choose those of a task."""

import shlex
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pydantic import ValidationError

from paceline import __version__
from paceline.errors import UserError
from paceline.launch.engines.host_facts import HostFacts
from paceline.launch.engines.resources import Amounts, task_needs
from paceline.launch.engines.ssh_commands import LOST_CODE, SshCommands
from paceline.launch.spec import Group, Task, Workflow

_QUERY_SECONDS = 120.0
"""Maximum time in which a host answers what it has, s. Counting GPUs imports torch."""


@dataclass
class Host:
    """A host and what runs on it."""

    commands: SshCommands
    have: Amounts = field(default_factory=Amounts)
    gpus: list[str] = field(default_factory=list)
    """Values for CUDA_VISIBLE_DEVICES."""
    needs: dict[str, Amounts] = field(default_factory=dict)
    """Resources that the tasks on the host need, by the name of the task."""
    is_lost: bool = False

    @property
    def name(self) -> str:
        return self.commands.host.name


class Placement:
    """Chooses hosts and GPUs for tasks."""

    def __init__(self, hosts: list[Host], workflow: Workflow, tasks_per_host: int, oversubscribe: bool):
        self.hosts, self._workflow = hosts, workflow
        self._tasks_per_host, self._oversubscribe = tasks_per_host, oversubscribe
        self._host_of = dict[str, Host]()
        """Host of each task; the last one if the task has ended."""
        self._gpus_of = dict[str, list[str]]()

    def host(self, task: str) -> Host:
        return self._host_of[task]

    def gpus(self, task: Task) -> list[str] | None:
        """Return the GPUs of a task, or None if it does not state how many it needs."""
        return None if self._workflow.resource(task).gpu is None else self._gpus_of[task.name]

    def reserve(self, group: Group) -> bool:
        """Give each task of a group a host. Return False if there are not enough free ones."""
        for task in group.tasks:
            if not self._place(task, self._candidates(task)):
                self.release(group)
                return False
        return True

    def release(self, group: Group) -> None:
        for task in group.tasks:
            for host in self.hosts:
                host.needs.pop(task.name, None)

    def move(self, task: Task) -> None:
        """Give a task whose host is lost another one, if one is free."""
        self.host(task.name).needs.pop(task.name, None)
        free = [host for host in self._candidates(task) if not host.is_lost]
        self._place(task, free or [self.host(task.name)])

    def check(self, group: Group) -> None:
        """Raise UserError if a group cannot run even if nothing else runs."""
        if self.reserve(group):
            return self.release(group)
        names = ", ".join(host.name for host in self.hosts)
        if not self._oversubscribe and len(group.tasks) > len(self.hosts) * self._tasks_per_host:
            raise UserError(
                f"the group {group.name} has {len(group.tasks)} tasks for the hosts {names}, with "
                f"ssh.tasks_per_host {self._tasks_per_host}; add hosts to the profile, increase tasks_per_host, or add "
                "--oversubscribe"
            )
        needs = "; ".join(f"{task.name}: {task_needs(task, self._workflow)}" for task in group.tasks)
        have = "; ".join(f"{host.name}: {host.have}" for host in self.hosts)
        raise UserError(
            f"the tasks of {group.name} need more than the hosts have that nodesExcluded allows; request less in "
            f"resources, or add --oversubscribe\n  needed: {needs}\n  hosts: {have}"
        )

    def _candidates(self, task: Task) -> list[Host]:
        """Return the hosts that can run a task, the best first: hosts that are not lost, have fewer tasks, and have the
        task's inputs."""
        need, excluded = task_needs(task, self._workflow), self._workflow.resource(task).nodesExcluded
        inputs = [self._host_of[given.task].name for given in task.inputs if given.task in self._host_of]
        found = [
            host
            for host in self.hosts
            if host.name not in excluded and (self._oversubscribe or self._has_room(host, need))
        ]
        return sorted(found, key=lambda host: (host.is_lost, len(host.needs), -inputs.count(host.name)))

    def _has_room(self, host: Host, need: Amounts) -> bool:
        return len(host.needs) < self._tasks_per_host and sum(host.needs.values(), need).fits(host.have)

    def _place(self, task: Task, candidates: list[Host]) -> bool:
        for host in candidates[:1]:
            # GPUs that no other task on the host has come first.
            taken = [gpu for name in host.needs for gpu in self._gpus_of[name]]
            order = sorted(host.gpus, key=taken.count)
            self._gpus_of[task.name] = order[: self._workflow.resource(task).gpu or 0]
            self._host_of[task.name] = host
            host.needs[task.name] = task_needs(task, self._workflow)
        return bool(candidates)


def copy_files(hosts: list[SshCommands]) -> None:
    """Copy the paths of `ssh.sync` to all hosts. Raise UserError."""
    calls = [(host, host.sync(path)) for host in hosts for path in host.settings.sync]
    for host, command, done in _call_all(calls, None):
        if done.returncode:
            # The last line of rsync only says that there was an error.
            reason = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            raise UserError(f"ssh.sync: cannot copy to the host {host.host.name}: {reason}\n  {shlex.join(command)}")


def query(hosts: list[SshCommands], workflow: Workflow, report: Callable[[str], None]) -> tuple[list[Host], int]:
    """Return the hosts that can be reached, with what they have, and the highest number of a job of the workflow on
    them. `report` receives a line for each other host. Raise UserError if there is none."""
    needs_gpus = any(workflow.resource(task).gpu for group in workflow.task_groups for task in group.tasks)
    found, last_job, problems = list[Host](), 0, list[str]()
    calls = list[tuple[SshCommands, list[str]]]()
    for host in hosts:
        counts = ["--gpus"] if needs_gpus and host.host.gpus is None else []
        arguments = [str(host.storage_root), workflow.name, *counts]
        calls.append((host, host.python("paceline.launch.engines.host_facts", *arguments)))
    for commands, _, done in _call_all(calls, _QUERY_SECONDS):
        try:
            facts = HostFacts.model_validate_json(_last(done.stdout))
        except ValidationError:
            problems.append(_problem(commands, done))
            continue
        if facts.version != __version__:
            report(f"host {commands.host.name} has Paceline {facts.version}, this machine {__version__}")
        count = commands.host.gpus
        gpus = facts.gpus if count is None else [str(index) for index in range(count)]
        have = Amounts(facts.have.cpu, len(gpus), facts.have.memory, facts.have.storage)
        found.append(Host(commands, have, gpus))
        last_job = max(last_job, facts.last_job)
    if not found:
        raise UserError("no host can be used\n  " + "\n  ".join(problems))
    for problem in problems:
        report(f"{problem}; this host is not used")
    return found, last_job


def _problem(host: SshCommands, done: subprocess.CompletedProcess[str]) -> str:
    """Return why a host does not answer."""
    reason = _last(done.stderr) or f"exit code {done.returncode}"
    if done.returncode != LOST_CODE:
        return f"the host {host.host.name} cannot run Paceline in the environment {host.venv}: {reason}"
    return f"cannot connect to the host {host.host.name}: {reason}; try: {shlex.join([*host.ssh(), 'true'])}"


Call = tuple[SshCommands, list[str]]
Called = tuple[SshCommands, list[str], subprocess.CompletedProcess[str]]


def _call_all(calls: list[Call], seconds: float | None) -> Iterable[Called]:
    """Run commands at the same time, and return them with their results in the same order."""

    def call(command: list[str]) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "errors": "replace", "stdin": subprocess.DEVNULL}
        try:
            return subprocess.run(command, timeout=seconds, **options)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, LOST_CODE, "", f"no answer within {seconds} s")
        except OSError as error:
            raise UserError(f"cannot run {command[0]}: {error.strerror}; install it on this machine") from None

    with ThreadPoolExecutor(max_workers=max(1, len(calls))) as pool:
        results = pool.map(call, [command for _, command in calls])
        return [(host, command, done) for (host, command), done in zip(calls, results, strict=True)]


def _last(text: str) -> str:
    """Return the last line of a text."""
    return (text.strip().splitlines() or [""])[-1][:1000]
