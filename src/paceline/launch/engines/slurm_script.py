"""Batch scripts of Slurm: one job per group of a workflow."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError, unknown
from paceline.launch.engines.support import environment
from paceline.launch.profile import Profile
from paceline.launch.spec import Group, Resource, Workflow, size_bytes
from paceline.launch.workflow import WorkflowFile, group_by_task, ordered_groups, upstream


@dataclass(frozen=True)
class BatchJob:
    """The Slurm job of a group."""

    group: str
    upstream: tuple[str, ...]
    """Groups that must complete before this one starts."""
    path: Path
    script: str

    def command(self, ids: dict[str, str]) -> list[str]:
        """Return the command that submits the job. `ids` holds the job IDs of the groups that come before it."""
        before = ":".join(ids[name] for name in self.upstream)
        dependency = [f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes"] if before else []
        return ["sbatch", "--parsable", "--export=ALL", *dependency, str(self.path)]


def batch_jobs(file: WorkflowFile, profile: Profile, directory: Path) -> list[BatchJob]:
    """Return the jobs of a workflow, each after those that it depends on. `directory` is the directory of the job on
    the shared file system. Raise UserError, with the name of the key, for what Slurm cannot do."""
    workflow = file.workflow
    group_of, jobs = group_by_task(workflow), list[BatchJob]()
    try:
        _check_workflow(workflow, profile)
        for group in ordered_groups(workflow):
            script, path = _script(group, workflow, profile, directory), directory / f"{group.name}.sbatch"
            jobs.append(BatchJob(group.name, tuple(sorted(upstream(group, group_of))), path, script))
    except UserError as error:
        raise UserError(f"{file.path}: {error}") from None
    return jobs


def slurm_log(directory: Path, group: str) -> Path:
    """Return the file with the messages of Slurm and of the coordinator of a group."""
    return directory / f"{group}.slurm.log"


def _check_workflow(workflow: Workflow, profile: Profile) -> None:
    if workflow.timeout.queue_timeout is not None:
        raise UserError(
            "timeout.queue_timeout: Slurm has no limit of the time that a job waits; remove it, and end a job that "
            "waits with paceline cancel"
        )
    if workflow.pool and workflow.pool not in profile.slurm.pools:
        problem = unknown("pool", workflow.pool, profile.slurm.pools)
        raise UserError(f"pool: {problem}; slurm.pools of the profile assigns a partition to each")


def _script(group: Group, workflow: Workflow, profile: Profile, directory: Path) -> str:
    options = list(_options(group, workflow, profile, directory))
    for option in options:
        if not option.isprintable():
            raise UserError(f"the option {option!r} of sbatch must be one line of printable characters")
    python = environment(profile).absolute() / "bin" / "python"
    command = [str(python), "-P", "-m", "paceline.launch.engines.slurm_group", str(directory), group.name]
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options), f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"


def _options(group: Group, workflow: Workflow, profile: Profile, directory: Path) -> Iterator[str]:
    settings, resource = profile.slurm, _resource(group, workflow)
    yield f"--job-name={directory.name}.{group.name}"
    values = {
        "partition": settings.pools[workflow.pool] if workflow.pool else settings.partition,
        "account": settings.account,
        "qos": settings.qos,
    }
    yield from (f"--{name}={value}" for name, value in values.items() if value)
    yield f"--nodes={len(group.tasks)}"
    yield "--ntasks-per-node=1"
    yield from _resource_options(resource, profile)
    if seconds := _time_limit(workflow, profile):
        yield f"--time={_duration(seconds)}"
    yield f"--signal=B:USR1@{settings.signal_seconds}"
    yield "--requeue"
    yield "--open-mode=append"
    # Slurm replaces patterns such as %j in the path.
    yield f"--output={str(slurm_log(directory, group.name)).replace('%', '%%')}"
    if workflow.labels:
        yield f"--comment={','.join(f'{name}={value}' for name, value in workflow.labels.items())}"
    yield from settings.options


def _resource(group: Group, workflow: Workflow) -> Resource:
    """Return the resources of each node of a group."""
    resource = workflow.resource(group.lead)
    for task in group.tasks:
        if workflow.resource(task) != resource:
            raise UserError(
                f"resources: the tasks {group.lead.name} and {task.name} of the group {group.name} differ; on Slurm "
                "all nodes of a job are equal: use one resource, or put the tasks into different groups"
            )
    return resource


def _resource_options(resource: Resource, profile: Profile) -> Iterator[str]:
    settings = profile.slurm
    if resource.cpu:
        yield f"--cpus-per-task={math.ceil(resource.cpu)}"
    if resource.gpu:
        yield settings.gpu_option.replace("{gpu}", str(resource.gpu))
    if resource.memory:
        yield f"--mem={_mebibytes(resource.memory)}M"
    if resource.storage and settings.tmp:
        yield f"--tmp={_mebibytes(resource.storage)}M"
    constraints = [settings.constraint] if settings.constraint else []
    if resource.platform:
        if resource.platform not in settings.platforms:
            problem = unknown("platform", resource.platform, settings.platforms)
            raise UserError(
                f"resources.platform: {problem}; slurm.platforms of the profile assigns a constraint to each"
            )
        constraints.append(settings.platforms[resource.platform])
    if constraints:
        yield f"--constraint={'&'.join(constraints)}"
    if resource.nodesExcluded:
        yield f"--exclude={','.join(resource.nodesExcluded)}"


def _time_limit(workflow: Workflow, profile: Profile) -> float | None:
    """Return the time limit of a job, s. The coordinator ends a group at exec_timeout itself; Slurm's limit comes later
    and is never above that of the site, at which the job is requeued."""
    settings, limit = profile.slurm, workflow.timeout.exec_timeout
    limits = [settings.time] if settings.time is not None else []
    if limit is not None:
        # The signal may come up to 60 s early.
        limits.append(limit + settings.grace_seconds + settings.signal_seconds + 60)
    return min(limits, default=None)


def _duration(seconds: float) -> str:
    """Return a time in the format of Slurm, which counts whole minutes."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _mebibytes(size: str) -> int:
    return math.ceil(size_bytes(size) / 2**20)
