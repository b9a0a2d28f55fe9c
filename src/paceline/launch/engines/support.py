"""Keys of a workflow file that the engine local refuses, and those that it does not use."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from paceline.errors import UserError
from paceline.launch.engines.task_files import check_files
from paceline.launch.profile import Profile
from paceline.launch.spec import Dataset, Task
from paceline.launch.workflow import WorkflowFile


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
    found = list[str]()
    if profile.container is None:
        images = dict.fromkeys(task.image for group in workflow.task_groups for task in group.tasks)
        found.append(f"image {', '.join(images)} is not used: tasks run in the environment {environment(profile)}")
    resources = workflow.resources.values()
    for key in ("platform", "nodesExcluded", "topology"):
        if any(getattr(resource, key) for resource in resources):
            found.append(f"{key} is not used: all tasks run on this machine")
    if workflow.pool:
        found.append(f"pool {workflow.pool} is not used: all tasks run on this machine")
    if any(task.downloadType or task.cacheSize for group in workflow.task_groups for task in group.tasks):
        found.append("downloadType and cacheSize are not used: inputs are copied")
    return found


def environment(profile: Profile) -> Path:
    """Return the virtual environment of the tasks."""
    return profile.environment or Path(sys.prefix)


def check_host(file: WorkflowFile, profile: Profile) -> None:
    """Raise UserError if this machine lacks a file, a credential or the environment of the tasks."""
    for task in (task for group in file.workflow.task_groups for task in group.tasks):
        check_files(task, file.path.parent, on_host=True)
        for variables in task.credentials.values():
            for name in variables:
                if name not in os.environ:
                    raise UserError(f"task {task.name}: credentials: set the environment variable {name}")
    if not (environment(profile) / "bin").is_dir():
        raise UserError(f"the environment {environment(profile)} of the profile has no directory bin")
