"""CPUs, GPUs, memory and disk space that tasks need and that this machine has."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.errors import UserError
from paceline.launch.spec import Group, Task, Workflow, size_bytes

_UNITS = (("CPUs", 1), ("GPUs", 1), ("GiB of memory", 2**30), ("GiB of disk space", 2**30))
"""Name and size of the unit in which each amount is printed."""


@dataclass(frozen=True)
class Amounts:
    cpu: float = 0.0
    gpu: float = 0.0
    memory: float = 0.0
    """Bytes."""
    storage: float = 0.0
    """Bytes."""

    def __add__(self, other: "Amounts") -> "Amounts":
        return Amounts(*(mine + theirs for mine, theirs in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[float, ...]:
        return self.cpu, self.gpu, self.memory, self.storage

    def __str__(self) -> str:
        parts = zip(self.values(), _UNITS, strict=True)
        return ", ".join(f"{value / unit:.4g} {name}" for value, (name, unit) in parts if value)

    def fits(self, available: "Amounts") -> bool:
        # The sum of several amounts depends on their order.
        return all(need <= have * (1 + 1e-9) for need, have in zip(self.values(), available.values(), strict=True))


def task_needs(task: Task, workflow: Workflow) -> Amounts:
    """Return what a task needs."""
    resource = workflow.resource(task)
    memory, storage = (size_bytes(size) if size else 0.0 for size in (resource.memory, resource.storage))
    return Amounts(resource.cpu or 0.0, resource.gpu or 0.0, memory, storage)


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine as values for CUDA_VISIBLE_DEVICES."""
    # torch takes seconds to import and is needed only if the workflow requests GPUs.
    from paceline.device.gpus import gpu_count

    count, visible = gpu_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in visible.split(",")][:count] if visible else [str(index) for index in range(count)]


def available(storage_root: Path, gpus: list[str]) -> Amounts:
    """Return what this machine has."""
    while not storage_root.exists():
        storage_root = storage_root.parent
    disk = shutil.disk_usage(storage_root).free
    return Amounts(len(os.sched_getaffinity(0)), len(gpus), psutil.virtual_memory().total, disk)


def check_fits(group: Group, workflow: Workflow, have: Amounts) -> None:
    """Raise UserError if the tasks of a group together need more than this machine has."""
    need = sum((task_needs(task, workflow) for task in group.tasks), Amounts())
    for (name, unit), need_value, have_value in zip(_UNITS, need.values(), have.values(), strict=True):
        if need_value > have_value:
            raise UserError(
                f"the tasks of {group.name} need {need_value / unit:.4g} {name} at the same time, this machine has "
                f"{have_value / unit:.4g}; request less in resources, or add --oversubscribe"
            )
