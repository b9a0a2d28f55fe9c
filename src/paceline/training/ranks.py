"""The ranks of a run: check that they agree, and print them before the first iteration."""

import hashlib
import inspect
import os
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from paceline.device.gpus import gpu_uuid
from paceline.distributed.group import Group, differences
from paceline.errors import UserError, counted
from paceline.learners.settings import Settings
from paceline.run.config import TrainConfig
from paceline.run.versions import versions
from paceline.tasks import registry
from paceline.training.build import engine_of
from paceline.training.plan import Plan


class Member(NamedTuple):
    """One rank, as the header shows it."""

    host: str
    device: str
    gpu: str
    """UUID of the GPU; empty on a CPU."""
    num_envs: int


def check_ranks_agree(config: TrainConfig, group: Group, num_envs: int) -> list[Member]:
    """Return all ranks. Raise UserError on all of them if versions, settings or code differ."""
    device = group.rank.device
    gpu = gpu_uuid(device) if device.type == "cuda" else ""
    member = Member(group.rank.host, describe_device(device), gpu, num_envs)
    members, fingerprints = zip(*group.all_gather((member, _fingerprint(config))), strict=True)
    differing = differences(fingerprints)
    if differing:
        index, name, value, main_value = differing[0]
        more = f" ({counted(len(differing) - 1, 'more difference')})" if len(differing) > 1 else ""
        raise UserError(
            f"rank {index} on {members[index].host} has {name} {value}, the main rank on {members[0].host} "
            f"has {main_value}: all ranks need the same{more}",
            reported=True,
        )
    return list(members)


def _fingerprint(config: TrainConfig) -> dict[str, str]:
    """Return the values that must be equal on all ranks of a run, by name: versions, settings and code."""
    found = {f"version of {package}": number for package, number in versions().items()}
    found |= {f"setting {name}": str(value) for name, value in config.by_name().items()}
    package = Path(__file__).parents[1]
    found["code of paceline"] = _digest(sorted((*package.rglob("*.py"), *package.rglob("*.xml"))))
    robot = config.env.get("robot")
    # An option of another package's task may have this name and another meaning.
    if isinstance(robot, str) and os.path.isfile(robot):
        # Files that it includes are not covered.
        found["file of --env.robot"] = _digest([Path(robot)])
    found[f"code of task {config.task}"] = _digest([Path(inspect.getfile(registry.find(config.task).task))])
    return found


def _digest(files: list[Path]) -> str:
    content = b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)
    return hashlib.sha256(content).hexdigest()[:12]


def print_header(
    console: Console, config: TrainConfig, settings: Settings, group: Group, plan: Plan, members: list[Member]
) -> None:
    """Print the task, the ranks and the size of an update."""
    total_envs = sum(member.num_envs for member in members)
    device, steps = group.rank.device, total_envs * settings.horizon
    where = counted(len(members), "rank") if group.is_distributed else describe_device(device)
    since = f", from iteration {plan.iteration}" if plan.iteration else ""
    restart = f", restart {plan.restarts}" if plan.restarts else ""
    lines = [
        f"[bold]{config.task}[/]: {counted(total_envs, 'env')} on {where}, engine {engine_of(config, device)}, "
        f"{config.learner}, seed {config.seed}",
        f"{counted(config.max_iterations, 'iteration')} of {counted(f'{steps:,}', 'env step')}{since}{restart} -> "
        f"[bold]{escape(str(plan.run.path))}[/]",
    ]
    if group.is_distributed:
        lines += _describe_ranks(members)
        samples = counted(f"{steps // settings.minibatches:,}", "sample")
        lines.append(f"  {samples} of all ranks per minibatch, over {group.backend}")
        if config.sync != "every-minibatch":
            period = f"{config.sync_every} iterations" if (config.sync_every or 1) > 1 else "iteration"
            lines.append(f"  each rank updates with its own samples; parameters are averaged every {period}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _describe_ranks(members: list[Member]) -> list[str]:
    """Return one line for each sequence of ranks that differ only in their GPU."""
    lines, first = [], 0
    for member, similar in groupby(members, key=lambda member: member._replace(gpu="")):
        gpus = [other.gpu for other in similar]
        last = first + len(gpus) - 1
        ranks, each = (f"rank {first}", "") if last == first else (f"ranks {first} to {last}", " each")
        is_shared = gpus[0] and len(set(gpus)) < len(gpus)
        shared = ", sharing a GPU: gradients go over gloo, slower than nccl" if is_shared else ""
        lines.append(f"  {ranks} on {member.host}: {member.device}, {counted(member.num_envs, 'env')}{each}{shared}")
        first = last + 1
    return lines


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
