"""What a run prints before its first iteration."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from paceline.device.gpus import gpu_uuid
from paceline.distributed.group import Group
from paceline.learners.settings import Settings
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.training.build import engine_of
from paceline.training.plan import Plan, Start


class Member(NamedTuple):
    """One rank, as the header shows it."""

    host: str
    device: str
    gpu: str
    """UUID of the GPU; empty on a CPU."""
    cores: int
    num_envs: int


def this_member(group: Group, num_envs: int) -> Member:
    device = group.rank.device
    gpu = gpu_uuid(device) if device.type == "cuda" else ""
    return Member(group.rank.host, describe_device(device), gpu, group.rank.cores, num_envs)


def print_header(
    console: Console,
    config: TrainConfig,
    settings: Settings,
    group: Group,
    plan: Plan,
    start: Start,
    members: list[Member],
    run: RunDir,
) -> None:
    """Print the task, the ranks and the size of an update."""
    device, steps = group.rank.device, start.total_envs * settings.horizon
    where = describe_device(device) if group.alone else f"{len(members)} rank{'s' if len(members) > 1 else ''}"
    since = f", from iteration {start.iteration}" if start.iteration else ""
    restart = f", restart {plan.restarts}" if plan.restarts else ""
    lines = [
        f"[bold]{config.task}[/]: {start.total_envs} envs on {where}, engine {engine_of(config, device)}, "
        f"{config.learner}, seed {config.seed}",
        f"{config.max_iterations} iterations of {steps:,} env steps{since}{restart} -> "
        f"[bold]{escape(str(run.path))}[/]",
    ]
    if not group.alone:
        lines += _describe_ranks(members)
        lines.append(f"  {steps // settings.minibatches:,} samples of all ranks per minibatch, over {group.backend}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _describe_ranks(members: list[Member]) -> list[str]:
    """Return one line for each sequence of equal ranks."""
    lines, first = [], 0
    for index in range(1, len(members) + 1):
        member = members[first]
        if index < len(members) and members[index]._replace(gpu="") == member._replace(gpu=""):
            continue
        count = index - first
        ranks = f"rank {first}" if count == 1 else f"ranks {first} to {index - 1}"
        gpus = [m.gpu for m in members[first:index] if m.gpu]
        shared = ", sharing a GPU: gradients go over gloo, slower than nccl" if len(set(gpus)) < len(gpus) else ""
        each = " each" if count > 1 else ""
        lines.append(f"  {ranks} on {member.host}: {member.device}, {member.num_envs} envs{each}{shared}")
        first = index
    return lines


@contextmanager
def print_compilation(engine: str, consoles: list[Console]) -> Iterator[None]:
    """Print what is compiled while the envs and the learner are built, and how long it took. The C engine compiles
    nothing."""
    if engine != "warp":
        yield
        return
    started = time.monotonic()
    for console in consoles:
        console.print("Compiling MuJoCo Warp's kernels for this model: up to two minutes, once for each cache.")
    yield
    for console in consoles:
        console.print(
            f"Envs and networks built in {time.monotonic() - started:.0f} s. The first iteration compiles the policy "
            "and the update, the second records their CUDA graphs.",
            soft_wrap=True,
        )


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
