"""Hosts of the engine ssh: find out what they have, and copy files to them."""

import shlex
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from paceline import __version__
from paceline.errors import UserError
from paceline.launch.engines.host_facts import HostFacts
from paceline.launch.engines.placement import Host
from paceline.launch.engines.resources import Amounts
from paceline.launch.engines.ssh_commands import LOST_CODE, SshCommands
from paceline.launch.spec import Workflow

_QUERY_SECONDS = 120.0
"""Maximum time in which a host answers what it has, s. Counting GPUs imports torch."""


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
        found.append(Host(commands.host.name, have, gpus))
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
