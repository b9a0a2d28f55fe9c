"""Hand a workflow file to OSMO's command `osmo`."""

import json
import shlex

from rich.console import Console
from rich.markup import escape

from paceline.errors import UserError
from paceline.launch.engines.engine import LaunchOptions
from paceline.launch.engines.job_control import tensorboard_task
from paceline.launch.engines.programs import call, output
from paceline.launch.engines.support import tasks_of, unsupported_datasets
from paceline.launch.engines.task_run import Job
from paceline.launch.job_record import JobRecord, new_job
from paceline.launch.profile import Profile
from paceline.launch.workflow import WorkflowFile


def describe(file: WorkflowFile, profile: Profile) -> str:
    """Return the command and the file, which is submitted as it is."""
    _check(file)
    return f"# {shlex.join(_submit(file, profile))}\n{file.path.read_text().rstrip()}"


def launch(file: WorkflowFile, profile: Profile, console: Console, options: LaunchOptions) -> int:
    """Submit a workflow; with `follow`, print its output until it has ended."""
    _check(file)
    answer = output(_submit(file, profile))
    try:
        workflow = str(json.loads(answer)["name"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"osmo has not printed the ID of the workflow: {answer.strip()[:200]!r}") from None
    directory = profile.storage_root.absolute() / "jobs" / new_job(profile.storage_root, file.workflow)
    record = Job(file, directory, "osmo").record
    record.handles = {"workflow": workflow}
    record.save()
    console.print(escape(f"Job {record.workflow_id} is the OSMO workflow {workflow}"))
    return logs(record, None, True) if options.follow else 0


def status(job: JobRecord, console: Console) -> int:
    return call(["osmo", "workflow", "query", job.handles["workflow"]])


def logs(job: JobRecord, task: str | None, follow: bool) -> int:
    """Print the output. OSMO's command follows a workflow that runs, also without `follow`."""
    if task is not None:
        job.check_task(task)
    return call(["osmo", "workflow", "logs", job.handles["workflow"], *(["--task", task] if task else [])])


def cancel(job: JobRecord) -> int:
    return call(["osmo", "workflow", "cancel", job.handles["workflow"]])


def tensorboard(job: JobRecord) -> int:
    task, port = tensorboard_task(job)
    print(f"http://127.0.0.1:{port} until Ctrl-C", flush=True)
    return call(["osmo", "workflow", "port-forward", job.handles["workflow"], task, "--port", str(port)])


def _check(file: WorkflowFile) -> None:
    """Raise UserError for datasets, which OSMO no longer has."""
    for task in tasks_of(file.workflow):
        for key, reason in unsupported_datasets(task):
            raise UserError(f"{file.path}: task {task.name}: the engine osmo does not support {key}: {reason}")


def _submit(file: WorkflowFile, profile: Profile) -> list[str]:
    pool = ["--pool", profile.osmo.pool] if profile.osmo.pool else []
    values = ["--set", *file.set_values] if file.set_values else []
    strings = ["--set-string", *file.set_strings] if file.set_strings else []
    return ["osmo", "workflow", "submit", str(file.path), "--format-type", "json", *pool, *values, *strings]
