"""Status, logs and end of a job whose coordinator is a process of this machine."""

import os
import signal
import socket
import time

import psutil
from rich.console import Console
from rich.markup import escape

from paceline.errors import UserError
from paceline.launch.engines.report import LogPrinter, Report
from paceline.launch.job_record import JobRecord, read_record

_POLL_SECONDS = 0.2


def record_process(job: JobRecord) -> None:
    """Record that this process coordinates the job."""
    job.host, job.pid = socket.gethostname(), os.getpid()
    job.pid_created = psutil.Process().create_time()


def coordinator(job: JobRecord) -> psutil.Process | None:
    """Return the process that coordinates a job, or None if it has ended. Raise UserError if it is on another host."""
    if job.pid is None or job.status != "running":
        return None
    if job.host != socket.gethostname():
        raise UserError(f"the job {job.workflow_id} was launched on {job.host}: run the command there")
    try:
        process = psutil.Process(job.pid)
        is_same = process.create_time() == job.pid_created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return None
    return process if is_same else None


def print_status(job: JobRecord, console: Console) -> int:
    report = Report(job, console)
    is_lost = job.status == "running" and coordinator(job) is None
    reason = "; the process that ran it was killed, and its tasks were stopped" if is_lost else ""
    status = "lost" if is_lost else job.status
    console.print(escape(f"Job {job.workflow_id} on {job.engine}: {status}{reason}; logs: {job.directory}/TASK.log"))
    console.print(report.table())
    if job.status != "running":
        report.print_failures()
    return 0


def print_logs(job: JobRecord, task: str | None, follow: bool) -> int:
    if task is not None:
        job.check_task(task)
    printer = LogPrinter(job, [task] if task else [*job.tasks])
    while follow and coordinator(job):
        printer.print_new()
        time.sleep(_POLL_SECONDS)
        job = read_record(job.directory)
    printer.print_new(is_last=True)
    return 0


def stop_coordinator(job: JobRecord) -> int:
    """Stop a job by SIGTERM to its coordinator, which stops all tasks. Wait for the end."""
    process = coordinator(job)
    if process is None:
        print(f"The job {job.workflow_id} has ended before: {read_record(job.directory).status}.")
        return 0
    print(f"Stopping the tasks of {job.workflow_id}.", flush=True)
    process.send_signal(signal.SIGTERM)
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(_POLL_SECONDS)
    print(f"The job {job.workflow_id} has ended: {read_record(job.directory).status}.")
    return 0


def tensorboard_task(job: JobRecord) -> tuple[str, int]:
    """Return the task that serves TensorBoard and its port. Raise UserError if there is none."""
    for name, task in job.tasks.items():
        if task.tensorboard_port is not None:
            return name, task.tensorboard_port
    raise UserError(
        f"no task of {job.workflow_id} serves TensorBoard: give a task the environment variable TENSORBOARD_PORT, or "
        "set tensorboard_port in Paceline's workflow files"
    )


def print_tensorboard(job: JobRecord) -> int:
    """Print the address of TensorBoard on this machine."""
    task, port = tensorboard_task(job)
    print(f"http://127.0.0.1:{port}")
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError as error:
        raise UserError(
            f"TensorBoard of {job.workflow_id} does not answer on port {port}: {error}; see {job.log(task)}"
        ) from None
    return 0
