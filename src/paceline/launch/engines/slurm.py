"""Submit a workflow to Slurm: every group is a job, and every task of the group is a job step on a separate node.

The storage root of the profile must be on a file system that all nodes share. `slurm_script` has the batch scripts and
`slurm_group` what runs in a job.
"""

import base64
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.errors import UserError
from paceline.launch.engines.engine import LaunchOptions
from paceline.launch.engines.job_control import tensorboard_task
from paceline.launch.engines.report import LogPrinter
from paceline.launch.engines.slurm_group import SUBMISSION, Submission, newest_start
from paceline.launch.engines.slurm_script import batch_jobs
from paceline.launch.engines.support import check_host, check_supported, environment, notes, tasks_of
from paceline.launch.engines.task_run import Job
from paceline.launch.engines.tunnel import open_tensorboard
from paceline.launch.job_record import JobRecord, State, new_job
from paceline.launch.profile import Profile
from paceline.launch.spec import File, Group, Workflow
from paceline.launch.workflow import WorkflowFile
from paceline.process.interrupts import EXIT_CODE, Interrupts

_HONORED = ("nodesExcluded", "pool", "platform")
_POLL_SECONDS = 2.0
_CANCEL_SECONDS = 90.0
_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
_ENDED |= {"TIMEOUT", "UNKNOWN"}
"""States in which a job stays. A job that is requeued may pass through some of them."""


def describe(file: WorkflowFile, profile: Profile) -> str:
    """Return the batch scripts and the commands that submit them, as for the first job of the workflow."""
    check_supported(file, "slurm", _HONORED)
    directory = profile.storage_root.absolute() / "jobs" / f"{file.workflow.name}-1"
    jobs = batch_jobs(file, profile, directory)
    ids = {job.group: f"$job{index}" for index, job in enumerate(jobs, 1)}
    scripts = [f"# {job.path}\n{job.script}" for job in jobs]
    commands = [f"{ids[job.group][1:]}=$({_shell_line(job.command(ids))})" for job in jobs]
    return "\n".join([*scripts, *commands])


def _shell_line(command: list[str]) -> str:
    """Return a command in which variables such as $job1 are replaced by the shell."""
    return " ".join(part if "$job" in part else shlex.quote(part) for part in command)


def launch(file: WorkflowFile, profile: Profile, console: Console, options: LaunchOptions) -> int:
    """Submit a workflow; with `follow`, wait for its end. Return 0 if all jobs have completed, and 1 if one has not."""
    check_supported(file, "slurm", _HONORED)
    if options.oversubscribe:
        raise UserError("--oversubscribe: Slurm decides which nodes have the resources of a task; remove the option")
    batch_jobs(file, profile, Path())
    _find_slurm("sbatch")
    check_host(file, profile)
    job = _submit(file, profile)
    for note in notes(file, profile, _HONORED):
        console.print(escape(note))
    if not profile.slurm.tmp and any(file.workflow.resource(task).storage for task in tasks_of(file.workflow)):
        console.print("storage is not requested: slurm.tmp of the profile is false")
    names = ", ".join(f"{group} {number}" for group, number in job.handles.items())
    console.print(escape(f"Job {job.workflow_id}; Slurm jobs: {names}; logs: {job.directory}/TASK.log"))
    return _follow(job, console) if options.follow else 0


def _submit(file: WorkflowFile, profile: Profile) -> JobRecord:
    profile = profile.model_copy(
        update={"storage_root": profile.storage_root.absolute(), "environment": environment(profile).absolute()}
    )
    directory = profile.storage_root / "jobs" / new_job(profile.storage_root, file.workflow)
    record = Job(file, directory, "slurm").record
    submission = Submission(workflow=_with_local_files(file), profile=profile)
    (directory / "workflow.yaml").write_text(file.text)
    (directory / SUBMISSION).write_text(submission.model_dump_json(indent=2))
    with Interrupts(notice="Canceling what was submitted.") as stop:
        try:
            for job in batch_jobs(file, profile, directory):
                job.path.write_text(job.script)
                # Where several clusters are used, the name of the cluster follows the ID.
                record.handles[job.group] = _call(*job.command(record.handles)).strip().partition(";")[0]
                if stop.requested:
                    raise KeyboardInterrupt
        except (UserError, OSError, KeyboardInterrupt):
            if record.handles:
                _call("scancel", *record.handles.values())
            raise
        finally:
            record.save()
    return record


def _with_local_files(file: WorkflowFile) -> Workflow:
    """Return the workflow with the contents of the files that are on this host only."""

    def given(each: File) -> File:
        if each.localpath is None:
            return each
        contents = base64.b64encode((file.path.parent / each.localpath).read_bytes()).decode()
        return File(path=each.path, contents=contents, base64=True)

    def group(each: Group) -> Group:
        tasks = [task.model_copy(update={"files": [given(one) for one in task.files]}) for task in each.tasks]
        return each.model_copy(update={"tasks": tasks})

    groups = [group(each) for each in file.workflow.task_groups]
    return file.workflow.model_copy(update={"tasks": [], "groups": groups})


@dataclass(frozen=True)
class _Facts:
    """State of a job as Slurm reports it."""

    state: str = "UNKNOWN"
    time: str = ""
    nodes: str = ""
    requeues: str = ""
    reason: str = "Slurm has no record of the job"


def _facts(job: JobRecord) -> dict[str, _Facts]:
    """Return the facts about the Slurm jobs, by group."""
    ids, found = _ids(job), dict[str, _Facts]()
    columns = ("JobID", "State", "TimeUsed", "NodeList", "RestartCnt", "Reason")
    query = f"--Format={','.join(f'{name}:|' for name in columns)}"
    queue = _lines("squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", query)
    for number, state, used, nodes, requeues, reason, _ in (line.split("|") for line in queue):
        found[number] = _Facts(state, used, nodes, requeues, reason if reason != "None" else "")
    if missing := [number for number in ids if number not in found]:
        # squeue forgets a job some minutes after its end.
        query = ("--noheader", "--allocations", "--parsable2", "--format=JobIDRaw,State,Elapsed,NodeList")
        for line in _lines("sacct", *query, f"--jobs={','.join(missing)}"):
            number, state, elapsed, nodes = line.split("|")
            found[number] = _Facts(state.split()[0], elapsed, nodes, "", "")
    return {group: found.get(number, _Facts()) for group, number in job.handles.items()}


def _ids(job: JobRecord) -> list[str]:
    """Return the IDs of the Slurm jobs. Raise UserError if a group was not submitted."""
    if missing := {task.group for task in job.tasks.values()} - job.handles.keys():
        names = ", ".join(sorted(missing))
        raise UserError(f"Slurm has refused the groups {names} of {job.workflow_id}, and nothing of it runs")
    return [*job.handles.values()]


def status(job: JobRecord, console: Console) -> int:
    """Print the state of the Slurm jobs and of their tasks."""
    facts = _facts(job)
    columns = ("task", "Slurm job", "state", "node", "task state", "exit code", "time", "requeues")
    table, reasons = Table(*columns, box=None, header_style="bold"), list[str]()
    for name, waiting in job.tasks.items():
        start, fact = newest_start(job.directory, waiting.group), facts[waiting.group]
        task = start.tasks[name] if start and fact.state != "PENDING" else waiting
        code = "" if task.exit_code is None else str(task.exit_code)
        values = (job.handles[waiting.group], fact.state, task.host, task.state, code, fact.time, fact.requeues)
        table.add_row(*map(Text, (name + " (lead)" * task.lead, *values)))
        if reason := task.reason or fact.reason:
            reasons.append(f"{name}: {reason}")
    console.print(table)
    for reason in reasons:
        console.print(escape(reason))
    return 0


def logs(job: JobRecord, task: str | None, follow: bool) -> int:
    """Print the output of a task, or of all tasks, which is in the shared directory of the job."""
    if task is not None:
        job.check_task(task)
    printer = LogPrinter(job, [task] if task else [*job.tasks])
    if follow:
        for _ in _poll(job):
            printer.print_new()
    printer.print_new(is_last=True)
    return 0


def cancel(job: JobRecord) -> int:
    """Cancel all Slurm jobs and wait until they have ended."""
    ids = _ids(job)
    print(f"Canceling the Slurm jobs {', '.join(ids)} of {job.workflow_id}.", flush=True)
    _call("scancel", *ids)
    deadline = time.monotonic() + _CANCEL_SECONDS
    for facts in _poll(job):
        if time.monotonic() > deadline:
            states = ", ".join(f"{job.handles[group]} {fact.state}" for group, fact in facts.items())
            raise UserError(f"Slurm has not ended the jobs within {_CANCEL_SECONDS:g} s: {states}; see squeue")
    print(f"The job {job.workflow_id} has ended.")
    return 0


def tensorboard(job: JobRecord) -> int:
    """Open a tunnel to the TensorBoard of a job and print its address. The site must allow ssh to nodes of own jobs."""
    name, port = tensorboard_task(job)
    start = newest_start(job.directory, job.tasks[name].group)
    if start is None or start.tasks[name].state != State.RUNNING:
        raise UserError(f"the task {name} of {job.workflow_id} does not run; see paceline status {job.workflow_id}")
    open_tensorboard(["ssh", start.tasks[name].host], start.tasks[name].host, port, job.workflow_id)
    return 0


def _follow(job: JobRecord, console: Console) -> int:
    """Print the output of the tasks and the states of the Slurm jobs until their end."""
    printer, shown = LogPrinter(job, [*job.tasks]), dict[str, str]()
    with Interrupts(notice=f"The job continues. End it with paceline cancel {job.workflow_id}.") as stop:
        for facts in _poll(job):
            for group, fact in facts.items():
                line = " ".join((fact.state, fact.nodes or fact.reason))
                if line != shown.get(group):
                    shown[group] = line
                    console.print(escape(f"{group}, Slurm job {job.handles[group]}: {line}"))
            printer.print_new()
            if stop.requested:
                return EXIT_CODE
    printer.print_new(is_last=True)
    facts = _facts(job)
    status(job, console)
    return 0 if all(_has_completed(job, group, fact) for group, fact in facts.items()) else 1


def _has_completed(job: JobRecord, group: str, fact: _Facts) -> bool:
    if fact.state != "UNKNOWN":
        return fact.state == "COMPLETED"
    start = newest_start(job.directory, group)
    return start is not None and start.status == "completed"


def _poll(job: JobRecord) -> Iterator[dict[str, _Facts]]:
    """Yield the facts about the Slurm jobs again and again until all jobs have ended."""
    was_ended = False
    while True:
        facts = _facts(job)
        yield facts
        states = {fact.state for fact in facts.values()}
        # A job that is requeued may be in the state of a failed one for a moment.
        if states <= {"COMPLETED", "CANCELLED"} or (was_ended and states <= _ENDED):
            return
        was_ended = states <= _ENDED
        time.sleep(_POLL_SECONDS)


def _find_slurm(program: str) -> None:
    if shutil.which(program) is None:
        raise UserError(
            f"{program} is not in PATH: run this on a machine that submits jobs to Slurm; --dry-run works everywhere"
        )


def _call(*command: str) -> str:
    """Run a program of Slurm and return its output. Raise UserError. Ctrl-C does not reach the program: a job may be
    submitted although its ID is not printed."""
    _find_slurm(command[0])
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise UserError(f"{shlex.join(command)}: exit code {done.returncode}: {' '.join(done.stderr.split())[:500]}")
    return done.stdout


def _lines(*command: str) -> list[str]:
    """Run a program that lists jobs and return its lines, none if it does not know the jobs."""
    try:
        return _call(*command).splitlines()
    except UserError as error:
        if "Invalid job id" in str(error) or "accounting storage is disabled" in str(error):
            return []
        raise
