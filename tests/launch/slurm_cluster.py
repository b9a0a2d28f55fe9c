"""A Slurm cluster on one machine: munged, slurmctld and one slurmd per network namespace."""

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.namespaces import Node, network
from tests.waiting import until

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
"""States in which a job stays. A job that is requeued passes through some of them."""

# All times are short: a node that does not answer for SlurmdTimeout is down, and its jobs are requeued.
_CONFIGURATION = """\
ClusterName=paceline
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdTimeout=5
MessageTimeout=2
TCPTimeout=1
SlurmdParameters=config_overrides
KillWait=10
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs=4 RealMemory=16000 TmpDisk=100000
PartitionName=train Nodes=ALL Default=YES MaxTime=10 PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=10 PriorityTier=2 PreemptMode=OFF
"""


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster with the partitions `train` (default) and `urgent`, whose jobs preempt those of `train`.

    Rules for a batch script that trains, which the engine slurm follows:

    - `--requeue` lets Slurm requeue the job after the loss of a node, if the job still runs when Slurm detects the
      loss, after SlurmdTimeout (300 s by default). With `--max-restarts` above 0 it does: the agents that are left
      wait for the rendezvous for 600 s. Without restarts, srun waits for the lost node only for the time of `--wait`.
    - `--open-mode=append` keeps the output of earlier starts.
    - The rendezvous ID contains SLURM_RESTART_COUNT, which is not set at the first start. Otherwise an agent on a node
      that was cut off could join the rendezvous of the requeued job.
    - `srun --kill-on-bad-exit=0 --wait=60`: agents end at different times after a signal. With --kill-on-bad-exit=1,
      the end of the first one terminates the others, possibly while the main rank saves its checkpoint.
    - `scontrol requeue` and `scancel` send SIGTERM to the steps and to the batch script, and SIGKILL after KillWait.
      After the first, Slurm requeues the job. A script without a trap of SIGTERM ends at once; the steps have their
      time nevertheless.
    - Preemption sends SIGTERM to the steps only. srun then ends with a code other than 0 (1 or 143), and the job is
      FAILED if the script ends with it before GraceTime is over. The script must run `scontrol requeue` itself. It
      recognizes preemption by PreemptTime of `scontrol show job`.
    - `--signal=B:USR1@SECONDS` sends SIGUSR1 to the batch script before the time limit. The script then signals
      the steps with `scancel --signal=TERM` and requeues the job. srun must run in the background, because bash runs a
      trap only after a foreground command has ended.
    - The script may run `scontrol requeue` only while its JobState is RUNNING: otherwise it restarts a job that was
      canceled. No exit code requeues a job, unless the site sets RequeueExit.
    - SIGTERM to srun kills its step at once. The end of srun's standard input reaches the step, so that it can end in
      its own time. srun exits with 0 if the node of its step is lost.
    - With proctrack/linuxproc, as here, all processes of a step receive SIGTERM, with proctrack/cgroup only the first.
    - A requeued job starts after cred_expire of AuthInfo at the earliest: 120 s by default, 5 s here. It has the same
      ID and script. `paceline train --run-dir DIR` continues its run, and exits with 0 if the run has completed.
    """

    folder: Path
    nodes: list[Node]
    """Nodes that run jobs. Their names are the names in Slurm."""
    controller: Node

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands where slurmctld runs, and return its output."""
        return self.controller.call(*command, **self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Slurm's commands find the cluster. They work only on its nodes."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(self, *argv: str) -> str:
        """Submit a job with the arguments of sbatch and return its ID."""
        return self.call("sbatch", "--parsable", *argv).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        line = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def cancel(self, job: str) -> None:
        self.call("scancel", job)

    def wait(self, condition: Callable[[], object], seconds: float) -> None:
        """Wait until `condition` is true. Fail with the logs of Slurm if it is not within this time."""
        until(condition, seconds, self._report)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def node_states(self) -> list[str]:
        return self.call("sinfo", "--noheader", "--Node", "--partition=train", "--format=%T").split()

    def wait_until_idle(self, seconds: float = 30.0) -> None:
        """Wait until all nodes are in service and run nothing."""
        self.wait(lambda: set(self.node_states()) == {"idle"}, seconds)

    def job_processes(self) -> list[int]:
        """Return the processes of jobs on all nodes: everything except slurmd."""
        daemons = {process.pid for node in self.nodes for process in node.started}
        return [pid for node in self.nodes for pid in node.processes() if pid not in daemons]

    def _report(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log}\n{log.read_text()[-3000:]}" for log in logs)


@contextmanager
def slurm_cluster(count: int) -> Iterator[SlurmCluster]:
    """Start a cluster of `count` nodes. At the end no process, namespace or file of it is left."""
    with tempfile.TemporaryDirectory(prefix="paceline_slurm_") as name, network(count + 1) as nodes:
        folder = Path(name)
        cluster = SlurmCluster(folder, nodes[:-1], nodes[-1])
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        names = ",".join(node.name for node in cluster.nodes)
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(folder=folder, controller=cluster.controller.name, nodes=names)
        )
        # Slurm's default is cgroup/v2 where it is mounted too, which a container may not write.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        _start(cluster)
        yield cluster


def _start(cluster: SlurmCluster) -> None:
    folder, configuration = cluster.folder, str(cluster.folder / "slurm.conf")
    munge = {name: str(folder / f"munge.{name}") for name in ("socket", "pid", "seed")}
    files = [f"--socket={munge['socket']}", f"--pid-file={munge['pid']}", f"--seed-file={munge['seed']}"]
    files += [f"--key-file={folder / 'munge.key'}", f"--log-file={folder / 'munge.log'}"]
    # Only this user may enter the folder, which munged would refuse.
    cluster.controller.start("munged", "--foreground", "--force", *files, output=folder / "munged.log")
    cluster.wait(Path(munge["socket"]).exists, 10.0)
    controller = ["slurmctld", "-D", "-i", "-f", configuration]
    cluster.controller.start(*controller, output=folder / "slurmctld.log", **cluster.environment)
    for node in cluster.nodes:
        daemon = ["slurmd", "-D", "-f", configuration]
        node.start(*daemon, output=folder / f"{node.name}.log", **cluster.environment)
    cluster.wait(lambda: "running" in (folder / "slurmctld.log").read_text().lower(), 20.0)
    cluster.wait_until_idle()
