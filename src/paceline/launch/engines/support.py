"""Keys of a workflow file that engines refuse, and those that they do not use."""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.errors import UserError
from paceline.launch.engines.task_files import check_files, secret_mounts, secret_variable
from paceline.launch.profile import Profile
from paceline.launch.spec import Dataset, Group, Task, Workflow
from paceline.launch.template import TOKEN
from paceline.launch.workflow import WorkflowFile, group_by_task, upstream
from paceline.run.storage import check_installed, check_url


def check_supported(file: WorkflowFile, engine: str, honored: Iterable[str] = ()) -> None:
    """Raise UserError, with the name of the key, if the workflow needs something that the engine does not have. This
    depends on the file only. `honored` are keys that the engine honors, though most engines do not."""
    problems = [(key, reason) for key, reason in _unsupported_resources(file.workflow) if key not in honored]
    for key, reason in problems:
        raise UserError(f"{file.path}: the engine {engine} does not support {key}: {reason}")
    for task in tasks_of(file.workflow):
        for key, reason in _unsupported(task):
            if key not in honored:
                raise UserError(f"{file.path}: task {task.name}: the engine {engine} does not support {key}: {reason}")
        for key, url in _urls(task):
            try:
                check_url(url)
            except UserError as error:
                raise UserError(f"{file.path}: task {task.name}: {key}: {error}") from None
        check_files(task, file.path.parent, on_host=False)


def tasks_of(workflow: Workflow) -> list[Task]:
    return [task for group in workflow.task_groups for task in group.tasks]


def heading(workflow: Workflow, group: Group, task: Task) -> str:
    """Return the line of a dry run that stands above the commands of a task."""
    names = sorted(upstream(group, group_by_task(workflow)))
    waits = f" after {', '.join(names)}" if names else ""
    lead = " (lead)" if task is group.lead and len(group.tasks) > 1 else ""
    return f"# {group.name}{waits}: {task.name}{lead}"


def _urls(task: Task) -> Iterator[tuple[str, str]]:
    """Yield the URLs of a task and the keys they belong to. Tokens such as {{workflow_id}} are replaced by their
    names."""
    for key, places in (("inputs", task.inputs), ("outputs", task.outputs), ("checkpoint", task.checkpoint)):
        yield from ((key, TOKEN.sub(r"\1", place.url)) for place in places if place.url is not None)


def _unsupported_resources(workflow: Workflow) -> Iterator[tuple[str, str]]:
    for key in ("nodesExcluded", "topology"):
        if any(getattr(resource, key) for resource in workflow.resources.values()):
            yield key, "the engine does not choose among nodes; remove it from resources"


def _unsupported(task: Task) -> Iterator[tuple[str, str]]:
    stored = [output.dataset or output.update_dataset for output in task.outputs]
    for dataset in filter(None, (*(given.dataset for given in task.inputs), *stored)):
        yield from _unsupported_dataset(dataset)
        if dataset in stored and ":" in dataset.name:
            yield "dataset.name", f"{dataset.name[:80]!r}: an output becomes the next version; remove the version"
    if task.kpis:
        yield "kpis", "remove it"
    if task.volumeMounts:
        yield "volumeMounts", "tasks run without a container; use the paths of this machine"
    if task.privileged:
        yield "privileged", "tasks run with the rights of the user; remove it"
    for name, directory in secret_mounts(task).items():
        if not directory.startswith("/") or not re.fullmatch(r"[\w.-]*\w", name):
            yield f"credentials.{name}", f"{directory[:80]!r} must be an absolute path, or a mapping of variables"


def unsupported_datasets(task: Task) -> Iterator[tuple[str, str]]:
    """Yield keys and remedies, for an engine without datasets."""
    if any(given.dataset for given in task.inputs):
        yield "inputs.dataset", "use url: s3://BUCKET/PATH"
    if any(output.dataset or output.update_dataset for output in task.outputs):
        yield "outputs.dataset", "use url: s3://BUCKET/PATH"


def _unsupported_dataset(dataset: Dataset) -> Iterator[tuple[str, str]]:
    for key in ("paths", "metadata", "labels", "localpath"):
        if getattr(dataset, key):
            yield f"dataset.{key}", "remove it"
    for key, value in (("name", dataset.name), ("path", dataset.path)):
        if ".." in Path(value).parts or value.startswith("/") or "\0" in value:
            yield f"dataset.{key}", f"{value[:80]!r} must be a relative path without .."


def notes(file: WorkflowFile, profile: Profile, honored: Iterable[str] = (), nodes: str = "this machine") -> list[str]:
    """Return what the engine does not use although the file has it, one line each. `honored` are keys that the engine
    honors, though most engines do not. `nodes` says where tasks run."""
    workflow = file.workflow
    found = list[str]()
    if profile.container is None:
        images = dict.fromkeys(task.image for task in tasks_of(workflow))
        found.append(f"image {', '.join(images)} is not used: tasks run in the environment {environment(profile)}")
    platforms = dict.fromkeys(resource.platform for resource in workflow.resources.values() if resource.platform)
    for key, names in (("pool", [workflow.pool] if workflow.pool else []), ("platform", platforms)):
        if names and key not in honored:
            found.append(f"{key} {', '.join(names)} is not used: all tasks run on {nodes}")
    if any(task.downloadType or task.cacheSize for task in tasks_of(workflow)):
        found.append("downloadType and cacheSize are not used: inputs are downloaded before a task starts")
    return found


def environment(profile: Profile) -> Path:
    """Return the virtual environment of the tasks."""
    return profile.environment or Path(sys.prefix)


def check_host(file: WorkflowFile, profile: Profile) -> None:
    """Raise UserError if this machine lacks a file, a credential, a package for a URL, or the environment of the
    tasks."""
    check_sources(file)
    for task in tasks_of(file.workflow):
        for _, url in _urls(task):
            check_installed(url)
    if not (environment(profile) / "bin").is_dir():
        raise UserError(f"the environment {environment(profile)} of the profile has no directory bin")


def check_sources(file: WorkflowFile) -> None:
    """Raise UserError if this machine lacks a file or a credential that is sent to the tasks."""
    for task in tasks_of(file.workflow):
        check_files(task, file.path.parent, on_host=True)
        names = [name for given in task.credentials.values() if isinstance(given, dict) for name in given]
        for name in (*names, *map(secret_variable, secret_mounts(task))):
            if name not in os.environ:
                raise UserError(f"task {task.name}: credentials: set the environment variable {name}")
