"""Submit a workflow to Kubernetes as JobSets, by kubectl."""

import re
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rich.console import Console
from rich.markup import escape

from paceline.errors import UserError, one_line, unknown
from paceline.launch.engines.engine import LaunchOptions
from paceline.launch.engines.job_control import tensorboard_task
from paceline.launch.engines.jobset import INSTANCE, STORAGE_ROOT, needs_runner, render, secret_name, split_mount
from paceline.launch.engines.programs import call, output
from paceline.launch.engines.support import check_supported, tasks_of, unsupported_datasets
from paceline.launch.engines.task_files import check_files
from paceline.launch.engines.task_run import Job
from paceline.launch.job_record import JobRecord, new_job
from paceline.launch.profile import KubernetesSettings, Profile
from paceline.launch.spec import File, Task, Workflow
from paceline.launch.workflow import WorkflowFile, group_by_task, upstream

_MOST_UPSTREAM_GROUPS = 5
"""Largest number of jobs on which a job of a JobSet can depend."""
_POLL_SECONDS = 5.0
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def describe(file: WorkflowFile, profile: Profile) -> str:
    """Return the manifest, as for the first job of the workflow. The contents of a `localpath` have a placeholder."""
    _check(file, profile)

    def placeholder(each: File) -> bytes:
        return f"contents of {each.localpath}".encode()

    comments = "".join(f"# {note}\n" for note in notes(file.workflow))
    return comments + render(file.workflow, profile.kubernetes, f"{file.workflow.name}-1", placeholder).text.rstrip()


def launch(file: WorkflowFile, profile: Profile, console: Console, options: LaunchOptions) -> int:
    """Submit a workflow; with `follow`, wait for its end."""
    _check(file, profile)
    for task in tasks_of(file.workflow):
        check_files(task, file.path.parent, on_host=True)
    for note in notes(file.workflow):
        console.print(escape(note))
    # Users who share a namespace must not give the same ID to their jobs.
    name = f"{file.workflow.name}-{secrets.token_hex(2)}"
    directory = profile.storage_root.absolute() / "jobs"
    directory /= new_job(profile.storage_root, file.workflow.model_copy(update={"name": name}))

    def read(each: File) -> bytes:
        try:
            return (file.path.parent / str(each.localpath)).read_bytes()
        except OSError as error:
            raise UserError(f"localpath {each.localpath}: {one_line(error)}") from None

    manifest = render(file.workflow, profile.kubernetes, directory.name, read)
    (directory / "workflow.yaml").write_text(file.text)
    (directory / "manifest.yaml").write_text(manifest.text)
    record = Job(file, directory, "kubernetes").record
    record.handles = {"namespace": profile.kubernetes.namespace, "instance": manifest.name}
    if profile.kubernetes.context:
        record.handles["context"] = profile.kubernetes.context
    for task, host in manifest.hosts.items():
        record.tasks[task].host = host
    record.save()
    # On the client's side, kubectl apply has a limit of 256 KiB for the files of a task.
    code = call([*_kubectl(record), "apply", "--server-side", "--filename=-"], manifest.text)
    if code:
        raise UserError(
            f"kubectl has failed with exit code {code}; the manifest is {directory / 'manifest.yaml'}, and paceline "
            f"cancel {record.workflow_id} removes what was created"
        )
    console.print(f"Job {escape(record.workflow_id)}; its manifest: {escape(str(directory))}/manifest.yaml")
    jobsets = sum(each["kind"] == "JobSet" for each in manifest.objects)
    return _follow(record, jobsets) if options.follow else 0


def status(job: JobRecord, console: Console) -> int:
    return call([*_kubectl(job), "get", "jobsets,pods", "--output=wide", *_selector(job)])


def logs(job: JobRecord, task: str | None, follow: bool) -> int:
    following = ["--follow"] if follow else []
    if task is None:
        return call([*_kubectl(job), *_all_logs(job), "--tail=-1", *following])
    job.check_task(task)
    return call([*_kubectl(job), "logs", f"job/{_job_name(job, task)}", *following])


def cancel(job: JobRecord) -> int:
    return call([*_kubectl(job), "delete", "jobsets,configmaps", *_selector(job)])


def tensorboard(job: JobRecord) -> int:
    task, port = tensorboard_task(job)
    print(f"http://127.0.0.1:{port} until Ctrl-C", flush=True)
    return call([*_kubectl(job), "port-forward", f"job/{_job_name(job, task)}", str(port)])


def _kubectl(job: JobRecord) -> list[str]:
    context = [f"--context={job.handles['context']}"] if "context" in job.handles else []
    return ["kubectl", *context, f"--namespace={job.handles['namespace']}"]


def _selector(job: JobRecord) -> list[str]:
    return [f"--selector={INSTANCE}={job.handles['instance']}"]


def _all_logs(job: JobRecord) -> list[str]:
    return ["logs", *_selector(job), "--prefix", f"--max-log-requests={len(job.tasks)}"]


def _job_name(job: JobRecord, task: str) -> str:
    """Return the name of a task's Job. The pod of index 0 has the host name JOB-0.SUBDOMAIN."""
    return job.tasks[task].host.partition(".")[0].removesuffix("-0")


def _follow(job: JobRecord, jobsets: int) -> int:
    """Print the output of the tasks until all JobSets have ended. Return 0 if they have completed, otherwise 1."""
    states = [*_kubectl(job), "get", "jobsets", *_selector(job), "--output=jsonpath={.items[*].status.terminalState}"]
    since = time.time()
    while len(ended := output(states).split()) < jobsets:
        # The command ends when all pods that exist have ended; pods that are started again are found by the next one.
        begin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
        call([*_kubectl(job), *_all_logs(job), "--follow", f"--since-time={begin}"], stderr=subprocess.DEVNULL)
        since = time.time()
        time.sleep(_POLL_SECONDS)
    print(f"Job {job.workflow_id}: {', '.join(ended)}")
    return 0 if set(ended) == {"Completed"} else 1


def notes(workflow: Workflow) -> list[str]:
    """Return what the images must contain, and what is not used although the file has it, one line each."""
    tasks = tasks_of(workflow)
    found = list[str]()
    if runner := [task.name for task in tasks if needs_runner(task)]:
        found.append(f"the image of {', '.join(runner)} must contain Paceline, which copies inputs and outputs")
    if any(task.downloadType or task.cacheSize for task in tasks):
        found.append("downloadType and cacheSize are not used: inputs are copied")
    return found


def _check(file: WorkflowFile, profile: Profile) -> None:
    """Raise UserError, with the name of the key, if the workflow needs something that this engine does not have."""
    workflow = file.workflow
    for key, reason in _unsupported(workflow):
        raise UserError(f"{file.path}: the engine kubernetes does not support {key}: {reason}")
    for task in tasks_of(workflow):
        for key, reason in _unsupported_in_task(task, workflow, profile.kubernetes):
            raise UserError(f"{file.path}: task {task.name}: the engine kubernetes does not support {key}: {reason}")
    check_supported(file, "kubernetes", honored=("nodesExcluded", "volumeMounts", "privileged"))


def _unsupported(workflow: Workflow) -> Iterator[tuple[str, str]]:
    if workflow.pool:
        yield "pool", "remove it; kubernetes.namespace and kubernetes.node_selector of the profile choose the nodes"
    if workflow.timeout.queue_timeout is not None and workflow.timeout.exec_timeout is None:
        yield "timeout.queue_timeout", "add exec_timeout; only the sum of both is a limit of Kubernetes"
    groups = group_by_task(workflow)
    for group in workflow.task_groups:
        if len(upstream(group, groups)) > _MOST_UPSTREAM_GROUPS:
            yield "inputs", f"{group.name} needs the outputs of more than {_MOST_UPSTREAM_GROUPS} groups"


def _unsupported_in_task(task: Task, workflow: Workflow, settings: KubernetesSettings) -> Iterator[tuple[str, str]]:
    yield from unsupported_datasets(task)
    for place in (*task.inputs, *task.outputs, *task.checkpoint):
        if place.url and place.url.startswith("file:"):
            path = Path(unquote(urlsplit(place.url).path))
            if not settings.storage_claim or not path.is_relative_to(STORAGE_ROOT) or ".." in path.parts:
                place = f"a directory in {STORAGE_ROOT} with kubernetes.storage_claim"
                yield "file:// URLs", f"the nodes share no directory; use s3://BUCKET/PATH, or {place}"
    if any(given.task for given in task.inputs) and not settings.storage_claim:
        yield "inputs.task", "set kubernetes.storage_claim in the profile, so that the pods share their outputs"
    if task.action(0) != "COMPLETE":
        yield "exitActions", "exit code 0 always completes a task; use another one"
    for name in task.credentials:
        if not _OBJECT_NAME.fullmatch(secret_name(name)):
            yield f"credentials.{name}", "the name of a Secret has letters, digits, - and . only"
    for mount in task.volumeMounts:
        if not all(Path(path).is_absolute() for path in split_mount(mount)[:2]):
            yield "volumeMounts", f"{mount[:80]!r} must be SOURCE or SOURCE:TARGET with absolute paths"
    for each in task.files:
        if ":" in each.path:
            yield "files.path", f"{each.path[:80]!r} must not contain a colon"
    platform = workflow.resource(task).platform
    if platform and platform not in settings.platforms:
        known = unknown("platform", platform, settings.platforms)
        yield "platform", f"{known}; kubernetes.platforms of the profile lists them"
