"""Identify the launch that a worker belongs to.

A restarted worker continues the run that its own launch began, and only that run. The name that the user gives a launch
(`--rdzv_id`) does not identify it, because names are reused. The elastic agents, which start the workers, identify it.
"""

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LaunchRecord:
    """The launch of one worker or, merged, of all workers. Its fields are entries of result.json."""

    launch: str | None = None
    """Name of the elastic launch (`--rdzv_id`), for information only."""
    agents: tuple[str, ...] = ()
    """Elastic agents, each as host, machine, process ID and start time of the process."""
    job: str | None = None
    """Job ID, which the scheduler keeps when it requeues the job."""
    requeues: int = 0
    """Number of times the scheduler has requeued the job."""

    def began(self, result: dict[str, Any]) -> bool:
        """Return whether one of these agents has already trained the run whose result.json is `result`."""
        agents = result.get("agents")
        return isinstance(agents, list) and not set(self.agents).isdisjoint(map(str, agents))

    def was_requeued_from(self, result: dict[str, Any]) -> bool:
        """Return whether this job, before the scheduler requeued it, trained the run whose result.json is `result`."""
        before = result.get("requeues")
        return self.job is not None and result.get("job") == self.job and before in range(self.requeues)


def this_launch() -> LaunchRecord:
    """Return the record of this process, from the environment variables of torch's elastic launcher and of Slurm."""
    launch, job = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("SLURM_JOB_ID")
    cluster, requeues = os.environ.get("SLURM_CLUSTER_NAME", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    return LaunchRecord(
        launch,
        agents=() if launch is None else (_parent_process(),),
        job=None if job is None else f"slurm {cluster} {job}",
        requeues=int(requeues) if requeues.isdecimal() else 0,
    )


def merged(records: Sequence[LaunchRecord]) -> LaunchRecord:
    """Return the record of all workers from the record of each. The first record is that of the main rank."""
    return replace(records[0], agents=tuple(sorted({agent for record in records for agent in record.agents})))


def machine_id() -> str:
    """Return an identifier of this boot of the machine and of the PID namespace, in which process IDs are unique."""
    if sys.platform != "linux":
        return "unknown"
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def _parent_process() -> str:
    pid, started = os.getppid(), ""
    # Only Linux has the file, and not for a parent outside of this container.
    with suppress(OSError):
        # Process IDs are reused; the start time in clock ticks since boot is field 22 of the file.
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return f"{socket.gethostname()} {machine_id()} {pid} {started}"
