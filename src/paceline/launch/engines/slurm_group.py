"""Run one group of a workflow as a Slurm job: `python -m paceline.launch.engines.slurm_group DIRECTORY GROUP`.

The batch script runs it on the first node of the job. It starts every task as a job step on a separate node, and
requeues the job

- before the time limit, which SIGUSR1 announces,
- after preemption, which Slurm announces to the steps only, and
- if the exit action of the lead is RESCHEDULE.

Slurm requeues the job itself after the loss of a node.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console

from paceline.launch.engines import processes
from paceline.launch.engines.coordinator import Phase, coordinate
from paceline.launch.engines.slurm_script import slurm_log
from paceline.launch.engines.support import environment
from paceline.launch.engines.task_files import TaskFiles, TaskSpec
from paceline.launch.engines.task_run import Job
from paceline.launch.job_record import RECORD, JobRecord
from paceline.launch.profile import Profile
from paceline.launch.spec import Group, Task, Workflow
from paceline.launch.workflow import WorkflowFile

SUBMISSION = "submission.json"
_WIDTH = 120


class Submission(BaseModel):
    """Workflow and profile of a launch for its Slurm jobs: submission.json in the directory of the job. It has no
    credentials, because Slurm passes environment variables to its jobs."""

    workflow: Workflow
    profile: Profile


class StartRecord(JobRecord):
    """Record of one start of a group. Every start has its own directory, starts/GROUP.N in the directory of the job, so
    that a process on a node that was cut off cannot change the record of a later start."""

    seconds: float = 0.0
    """Run time of the earlier starts that were requeued by this program, s."""

    def log(self, task: str) -> Path:
        return self.directory.parents[1] / f"{task}.log"


def newest_start(directory: Path, group: str) -> StartRecord | None:
    """Return the record of the newest start of a group, or None if it has not started."""
    numbers = [int(path.parent.name.rpartition(".")[2]) for path in directory.glob(f"starts/{group}.*/{RECORD}")]
    if not numbers:
        return None
    start = directory / "starts" / f"{group}.{max(numbers)}"
    record = StartRecord.model_validate_json((start / RECORD).read_bytes())
    record.directory = start
    return record


class RequeueError(Exception):
    """The group is started again by a requeue of its Slurm job."""


class SlurmTransport:
    """Starts the task runner as a step of this Slurm job, on the node of the task."""

    def __init__(self, job: Job, profile: Profile, nodes: list[str]):
        self.storage_root, self.venv = profile.storage_root, environment(profile)
        self.container = profile.container
        group, self._workflow = job.groups[0].group, job.workflow
        self._messages = slurm_log(job.directory, group.name)
        # The lead runs on the first node, together with this process: if it is lost, Slurm requeues the job.
        tasks = sorted(group.tasks, key=lambda task: task is not group.lead)
        self._hosts = {task.name: node for task, node in zip(tasks, nodes, strict=True)}
        self._is_reserved = False
        # With this plugin, Slurm sends SIGTERM to all processes of a step; with others, to the task runner only.
        self._forward_sigterm = "proctrack/linuxproc" not in _call("scontrol", "show", "config")

    def reserve(self, group: Group) -> bool:
        if self._is_reserved:
            raise RequeueError
        self._is_reserved = True
        return True

    def release(self, group: Group) -> None:
        pass

    def host(self, task: Task) -> str:
        return self._hosts[task.name]

    def variables(self, task: Task) -> dict[str, str]:
        # Slurm sets the variable in steps of jobs that request GPUs.
        return {"CUDA_VISIBLE_DEVICES": ""} if self._workflow.resource(task).gpu == 0 else {}

    def start(self, spec: TaskSpec, phase: Phase, log: Path) -> subprocess.Popen[bytes]:
        command = ["srun", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1"]
        command += [f"--nodelist={self._hosts[spec.task.name]}", f"--job-name={spec.task.name}.{phase}"]
        if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
            command += [f"--cpus-per-task={cpus}"]
        # Messages of srun go elsewhere: the last line of the task's log may be the reason of a failure.
        command += ["--open-mode=append", f"--output={str(log).replace('%', '%%')}"]
        command += [str(self.venv / "bin" / "python"), "-P", "-m", "paceline.launch.task_runner", phase]
        spec = spec.model_copy(update={"forward_sigterm": self._forward_sigterm})
        return processes.start(command, spec.model_dump_json().encode(), self._messages, dict(os.environ))

    def terminate(self, process: subprocess.Popen[bytes], spec: TaskSpec) -> None:
        # SIGTERM to srun would kill the step at once. The end of its input stops the task with a grace period.
        with suppress(OSError):
            if process.stdin:
                process.stdin.close()

    def failure(self, spec: TaskSpec, code: int) -> str:
        return ""

    def kill(self, process: subprocess.Popen[bytes], spec: TaskSpec) -> None:
        # srun kills all processes of the step, and ends after KillWait if the node does not answer.
        process.terminate()
        process.wait()
        TaskFiles(spec).remove_secrets()


class SlurmJob:
    """The Slurm job in which this process runs."""

    def __init__(self) -> None:
        self.id = os.environ["SLURM_JOB_ID"]
        self.requeues = int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    def nodes(self) -> list[str]:
        return _call("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()

    def facts(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`. It is empty if Slurm does not answer."""
        with suppress(OSError, subprocess.SubprocessError):
            return dict(re.findall(r"(\w+)=(\S*)", _call("scontrol", "--oneliner", "show", "job", self.id)))
        return {}

    def is_this_start(self, facts: dict[str, str]) -> bool:
        """Return whether the job still runs, and was not requeued since this process was started."""
        return facts.get("JobState") == "RUNNING" and facts.get("Restarts") == str(self.requeues)

    def requeue(self) -> None:
        """Requeue the job. Slurm then ends this process."""
        _call("scontrol", "requeue", self.id)


def is_preempted(facts: dict[str, str]) -> bool:
    """Return whether a job was preempted in its current start, given the fields of `scontrol show job`."""
    preempted = facts.get("PreemptTime", "None")
    return preempted[:1].isdigit() and preempted >= facts["StartTime"]


def run_group(directory: Path, name: str, slurm: SlurmJob, console: Console) -> int:
    """Run a group and wait for its end. Return the exit code of the job."""
    submission = Submission.model_validate_json((directory / SUBMISSION).read_bytes())
    profile, before = submission.profile, newest_start(directory, name)
    used = before.seconds if before else 0.0
    job = _job(directory, name, _with_remaining_time(submission.workflow, used))
    restarts = {task: before.tasks[task].restarts if before else 0 for task in job.tasks}
    for task, run in job.tasks.items():
        run.restarts = restarts[task]
    start = directory / "starts" / f"{name}.{slurm.requeues}"
    start.mkdir(parents=True, exist_ok=True)
    job.record = record = StartRecord(**dict(job.record), seconds=used)
    record.directory, record.handles = start, {name: slurm.id}
    transport = SlurmTransport(job, profile, slurm.nodes())
    reasons, began = list[str](), time.monotonic()

    def stop_before_limit(*_: object) -> None:
        reasons.append("the time limit is near")
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR1, stop_before_limit)
    try:
        code = coordinate(job, transport, profile.slurm, console)
    except RequeueError:
        code = 1
        reasons.append("the lead is started again")
    facts = slurm.facts() if code else {}
    if is_preempted(facts):
        reasons.append("the job was preempted")
        for task, run in job.tasks.items():
            run.restarts = restarts[task]
    if reasons and slurm.is_this_start(facts):
        record.seconds = used + time.monotonic() - began
        record.save()
        console.print(f"Requeue: {', '.join(reasons)}.")
        slurm.requeue()
    return code


def _job(directory: Path, name: str, workflow: Workflow) -> Job:
    file = directory / "workflow.yaml"
    group = next(group for group in workflow.task_groups if group.name == name)
    return Job(WorkflowFile(file, workflow, file.read_text()), directory, "slurm", [group])


def _with_remaining_time(workflow: Workflow, used: float) -> Workflow:
    limit = workflow.timeout.exec_timeout
    if limit is None:
        return workflow
    timeout = workflow.timeout.model_copy(update={"exec_timeout": max(0.0, limit - used)})
    return workflow.model_copy(update={"timeout": timeout})


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60.0).stdout


if __name__ == "__main__":
    sys.exit(run_group(Path(sys.argv[1]), sys.argv[2], SlurmJob(), Console(width=_WIDTH)))
