"""Workflows on two hosts with OpenSSH's server, launched from a third one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.run import checkpoint
from tests.distributed.namespaces import Node
from tests.launch.sshd import SshHosts, ssh_hosts
from tests.launch.test_local_engine import group, task, workflow
from tests.waiting import until

pytestmark = pytest.mark.root

WORKFLOWS = Path(__file__).parents[2] / "workflows"
SECONDS = 90.0
LOST_SECONDS = 20.0


@pytest.fixture(scope="module")
def running_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts"), 2, OMP_NUM_THREADS="1") as hosts:
        yield hosts


@dataclass
class Site:
    """The hosts, and the directory of one test."""

    hosts: SshHosts
    folder: Path

    @property
    def nodes(self) -> list[Node]:
        return self.hosts.nodes

    @property
    def printed(self) -> str:
        return (self.folder / "printed").read_text()

    def profile(self, hosts: list[dict[str, Any]] | None = None, **settings: Any) -> None:
        """Write the profile."""
        named = [{"name": node.name} for node in self.nodes] if hosts is None else hosts
        ssh = {"hosts": named, "options": ["-F", str(self.hosts.config)], "grace_seconds": 5} | settings
        text = yaml.safe_dump({"storage_root": str(self.folder), "ssh": ssh})
        (self.folder / "profile.yaml").write_text(text)

    def start(self, file: str | Path, *argv: str, **environment: str) -> subprocess.Popen[bytes]:
        """Begin to launch a file or the text of a file."""
        if isinstance(file, str):
            (self.folder / "file.yaml").write_text(file)
            file = self.folder / "file.yaml"
        command = ["launch", str(file), "--on", "ssh", "--profile", str(self.folder / "profile.yaml"), *argv]
        output = self.folder / "printed"
        return self.hosts.caller.start(sys.executable, "-m", "paceline", *command, output=output, **environment)

    def launch(self, file: str | Path, *argv: str, **environment: str) -> int:
        return self.ended(self.start(file, *argv, **environment))

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        until(lambda: process.poll() is not None, SECONDS, self.report)
        return process.returncode

    def report(self) -> str:
        return "\n".join(f"{log}\n{log.read_text()[-3000:]}" for log in [self.folder / "printed", *self.logs()])

    def logs(self) -> list[Path]:
        return sorted((self.folder / "jobs").glob("*/*.log"))

    def log(self, name: str) -> str:
        return next((self.folder / "jobs").glob(f"*/{name}.log")).read_text()

    def tasks(self) -> dict[str, Any]:
        return json.loads(next((self.folder / "jobs").glob("*/result.json")).read_text())["tasks"]

    def states(self) -> dict[str, tuple[str, int | None]]:
        return {name: (found["state"], found["exit_code"]) for name, found in self.tasks().items()}

    def processes(self) -> list[str]:
        """Return the processes on the hosts, except those of OpenSSH's server."""
        lines = [command_line(pid) for node in self.nodes for pid in node.processes()]
        return [line for line in lines if line and "sshd" not in line.split()[0]]

    def call(self, command: str, *argv: str) -> str:
        """Run another command of paceline on the launching machine."""
        options = ["--profile", str(self.folder / "profile.yaml")]
        return self.hosts.caller.call(sys.executable, "-m", "paceline", command, "test-1", *argv, *options)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.fixture
def site(running_hosts: SshHosts, tmp_path: Path) -> Iterator[Site]:
    found = Site(running_hosts, tmp_path)
    found.profile()
    yield found
    running_hosts.caller.kill_all()
    for node in running_hosts.nodes:
        node.reconnect()
    until(lambda: not found.processes(), 30.0)


def test_tasks_run_on_different_hosts(site: Site):
    lead = task("lead", "hostname; echo {{host:lead}} {{host:worker}}; sleep 1", "lead: true")
    assert site.launch(group(lead, task("worker", "hostname; exit 3"))) == 0, site.report()
    assert site.log("lead") == "node1\nnode1 node2\n"
    assert site.log("worker") == "node2\n"
    assert site.states() == {"lead": ("completed", 0), "worker": ("failed", 3)}


def kill_sessions(node: Node) -> None:
    """Kill the processes of OpenSSH's server that hold connections."""
    for pid in node.processes():
        if command_line(pid).startswith("sshd: root"):
            os.kill(pid, signal.SIGKILL)


def test_a_host_whose_server_is_killed_is_named_and_ends_its_processes(site: Site):
    up, go_on = site.folder / "up", site.folder / "go_on"
    lead = task("lead", f"until [ -e {go_on} ]; do sleep 0.1; done", "lead: true")
    worker = task("worker", f"touch {up}; trap 'touch {site.folder}/stopped; exit' TERM; sleep 1000 & wait")
    process = site.start(group(lead, worker))
    until(up.exists, SECONDS, site.report)
    kill_sessions(site.nodes[1])
    until(lambda: "worker: failed: lost the host node2: Connection to node2 closed" in site.printed, LOST_SECONDS)
    until((site.folder / "stopped").exists, 10.0)
    until(lambda: len(site.nodes[1].processes()) == 1, 10.0)
    go_on.touch()
    assert site.ended(process) == 0
    assert site.states() == {"lead": ("completed", 0), "worker": ("failed", 255)}


def test_a_task_is_not_started_again_before_its_processes_on_the_lost_host_have_ended(site: Site):
    up = site.folder / "up"
    script = f"if [ -e {up} ]; then echo again; exit 0; fi; touch {up}; trap 'sleep 7; echo end; exit' TERM"
    # The output of the first start cannot be received any more.
    text = task("alone", f"exec >>{site.folder}/order; {script}; sleep 1000 & wait", "exitActions: {RESCHEDULE: 255}")
    site.profile([{"name": "node1"}], grace_seconds=20)
    process = site.start(workflow(text))
    until(up.exists, SECONDS, site.report)
    kill_sessions(site.nodes[0])
    assert site.ended(process) == 0
    assert (site.folder / "order").read_text() == "end\nagain\n"
    assert site.tasks()["alone"]["restarts"] == 1


def test_a_host_that_is_cut_off_ends_its_processes(site: Site):
    up = site.folder / "up"
    lead = task("lead", f"touch {up}; sleep 1000", "lead: true")
    process = site.start(group(lead, task("worker", "sleep 1000")))
    until(up.exists, SECONDS, site.report)
    site.nodes[0].cut()
    until(lambda: "lead: failed: lost the host node1: Timeout, server node1 not" in site.printed, LOST_SECONDS)
    assert site.ended(process) == 1
    until(lambda: not site.processes(), 15.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_remains_on_a_host(number: signal.Signals, site: Site):
    # The process of the task that ignores SIGTERM is killed after the grace period.
    stubborn = "trap '' TERM; setsid bash -c 'trap \"\" TERM; sleep 1000' & touch {{output}}/up; wait"
    site.profile(grace_seconds=1)
    process = site.start(group(task("lead", stubborn, "lead: true"), task("worker", stubborn)))
    until(lambda: len(list(site.folder.glob("jobs/*/*/output/up"))) == 2, SECONDS, site.report)
    process.send_signal(number)
    site.ended(process)
    until(lambda: not site.processes(), 10.0)
    assert process.returncode == (130 if number == signal.SIGINT else -9)


def test_outputs_are_copied_to_the_host_of_the_task_that_reads_them(site: Site):
    roots = [site.folder / node.name for node in site.nodes]
    source = site.folder / "source"
    source.mkdir()
    for name in ("kept", "left_out"):
        (source / name).write_text(name)
    sync = [{"source": f"{source}/", "target": str(site.folder / "target"), "exclude": ["left_out"]}]
    hosts = [{"name": node.name, "storage_root": str(root)} for node, root in zip(site.nodes, roots, strict=True)]
    site.profile(hosts, sync=sync)
    # Another machine has launched a job on the host before.
    (roots[1] / "jobs" / "test-1").mkdir(parents=True)
    first = task("first", "hostname >{{output}}/name; sleep 1", "lead: true")
    second = task("second", "hostname >{{output}}/name")
    text = (
        group(first, second)
        + "  - name: last\n    tasks:\n"
        + indented(
            task(
                "third",
                "cat {{input:0}}/name {{input:1}}/name; ls $DIR",
                "inputs: [{task: first}, {task: second}]",
                f"environment: {{DIR: {site.folder}/target}}",
            )
        )
    )
    assert site.launch(text) == 0, site.report()
    assert site.log("third") == "node1\nnode2\nkept\n"
    assert (site.folder / "jobs" / "test-2" / "third.log").exists()


INPUTS = "inputs: [{task: first}, {task: second}]"


def indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def test_a_job_is_watched_and_canceled_from_another_terminal(site: Site):
    server = f"cd {site.folder}; echo serving; exec python -m http.server --bind 127.0.0.1 $TENSORBOARD_PORT"
    lead = task("lead", server, "lead: true", "environment: {TENSORBOARD_PORT: 6011}")
    worker = task(
        "worker",
        "[ $(printf %s $TOKEN | wc -c) = 11 ]; touch {{output}}/up; sleep 1000",
        "credentials: {a: {TOKEN: b}}",
    )
    process = site.start(group(lead, worker), TOKEN="sesame-4711")
    job = site.folder / "jobs" / "test-1"
    until((job / "worker" / "output" / "up").exists, SECONDS, site.report)
    until(lambda: "serving" in site.log("lead"), 10.0)
    printed = site.call("status")
    assert all(word in printed for word in ("on ssh: running", "node1", "node2"))
    assert site.call("logs").startswith("lead   | serving\n")
    tunnel = site.folder / "tunnel"
    argv = ["tensorboard", "test-1", "--profile", str(site.folder / "profile.yaml")]
    opened = site.hosts.caller.start(sys.executable, "-m", "paceline", *argv, output=tunnel)
    until(lambda: "http://127.0.0.1:6011" in tunnel.read_text(), 20.0, tunnel.read_text)
    read = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:6011/file.yaml').read().decode())"
    assert "name: worker" in site.hosts.caller.call(sys.executable, "-c", read)
    opened.terminate()
    # The credential is only in the memory and the environment of processes.
    nodes = [*site.nodes, site.hosts.caller]
    assert not [line for node in nodes for line in map(command_line, node.processes()) if "sesame" in line]
    assert not [file for file in site.folder.rglob("*") if file.is_file() and b"sesame" in file.read_bytes()]
    assert "has ended: interrupted" in site.call("cancel")
    assert site.ended(process) == 130
    assert not site.processes()
    assert len(site.hosts.caller.processes()) == 0


def test_hosts_that_cannot_be_used_are_named(site: Site):
    site.profile([{"name": "node1"}, {"name": "nowhere"}, {"name": "node2", "environment": "/no/environment"}])
    assert site.launch(group(task("lead", "true", "lead: true"), task("worker", "true"))) == 2
    assert "cannot connect to the host nowhere: ssh: Could not resolve hostname nowhere" in site.printed
    assert "the host node2 cannot run Paceline in the environment /no/environment" in site.printed
    assert "the group together has 2 tasks for the hosts node1" in site.printed
    site.profile(sync=[{"source": "/does/not/exist", "target": "/tmp"}])
    assert site.launch(workflow(task("alone", "true"))) == 2
    assert "ssh.sync: cannot copy to the host node1: rsync: " in site.printed


TRAIN = "train_options=--num-envs 8 --checkpoint-every 10 --timeout 5 --ppo.hidden 16 16"
# Torch's agents notice a lost node within seconds here, not within the minutes that suit a cluster.
IMPATIENT = "rdzv_conf=join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


def train(site: Site, *values: str) -> subprocess.Popen[bytes]:
    common = ["num_nodes=2", "num_gpu=0", "memory=1Mi", "storage=1Mi", "tensorboard_port=0", TRAIN]
    common += [f"run_dir={site.folder / 'run'}"]
    return site.start(WORKFLOWS / "train_policy.yaml", "--set", *common, *values)


def result(site: Site) -> dict[str, Any]:
    return json.loads((site.folder / "run" / "result.json").read_text())


def test_two_hosts_train_as_one(site: Site):
    assert site.ended(train(site, "max_iterations=20")) == 0, site.report()
    found = result(site)
    assert (found["status"], found["world_size"], found["iterations"]) == ("completed", 2, 20)


def test_training_continues_when_a_host_is_lost(site: Site):
    site.profile(lost_seconds=5)
    iterations = 200
    process = train(site, f"max_iterations={iterations}", "min_nodes=1", IMPATIENT)
    until(lambda: checkpoint.listing(site.folder / "run" / "checkpoints"), SECONDS, site.report)
    assert result(site)["world_size"] == 2
    site.nodes[1].cut()
    until(lambda: "worker-1: preparing: lost the host node2: Timeout" in site.printed, LOST_SECONDS, site.report)
    assert site.ended(process) == 0, site.report()
    found = result(site)
    assert (found["status"], found["world_size"], found["iterations"]) == ("completed", 1, iterations)
