"""Nodes on one machine: network namespaces with a host name and an address each, connected by a bridge. Links can be
cut."""

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.signals import DEFAULT_SIGNALS

# Set the node's host name and /etc/hosts, then run the command in the same process.
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
_CALL_SECONDS = 30.0


@dataclass(frozen=True)
class Node:
    """A node with its own network and host name. All nodes share the file system."""

    name: str
    address: str
    namespace: str
    switch: str
    hosts: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str, output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on the node and append its output to a file."""
        with output.open("ab") as file:
            process = subprocess.Popen(
                self._entering(*command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
            )
        self.started.append(process)
        return process

    def call(self, *command: str, **environment: str) -> str:
        """Run a command on the node to its end, which must be a success. Return its output."""
        argv, variables = self._entering(*command), os.environ | environment
        done = subprocess.run(argv, capture_output=True, text=True, env=variables, timeout=_CALL_SECONDS)
        assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}{done.stdout}"
        return done.stdout

    def _entering(self, *command: str) -> list[str]:
        """Return the command line that runs a command on the node, in the same process."""
        enter = ["nsenter", f"--net=/var/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        return [*DEFAULT_SIGNALS, *enter, "sh", "-c", _ENTER, self.name, str(self.hosts), *command]

    def cut(self) -> None:
        """Drop all packets from and to the node."""
        self._link("down")

    def reconnect(self) -> None:
        self._link("up")

    def _link(self, state: str) -> None:
        ip("-n", self.switch, "link", "set", self.name, state)

    def processes(self) -> list[int]:
        """Return the processes started on the node that still run."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split() if not _is_dead(int(pid))]

    def kill_all(self) -> None:
        deadline = time.monotonic() + 10.0
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        for process in self.started:
            process.wait(10.0)


@contextmanager
def network(count: int, own_name: str = "") -> Iterator[list[Node]]:
    """Create `count` nodes, `node1` with the address 10.213.7.1 and so on, which reach only each other. A node
    resolves its own name to that address, or to `own_name`. At the end all processes on them are killed."""
    mark = uuid.uuid4().hex[:8]
    switch = f"paceline_{mark}_switch"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline_hosts_")))
        _namespace(stack, switch)
        ip("-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        nodes = []
        for index in range(1, count + 1):
            name = f"node{index}"
            node = Node(name, f"10.213.7.{index}", f"paceline_{mark}_{index}", switch, hosts=folder / name)
            _namespace(stack, node.namespace)
            stack.callback(node.kill_all)
            cable = ("link", "add", "eth0", "netns", node.namespace, "type", "veth", "peer", "name", node.name)
            ip("-n", switch, *cable)
            ip("-n", switch, "link", "set", node.name, "up", "master", "bridge")
            ip("-n", node.namespace, "link", "set", "lo", "up")
            ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", "eth0")
            ip("-n", node.namespace, "link", "set", "eth0", "up")
            nodes.append(node)
        for node in nodes:
            names = {other.name: other.address for other in nodes} | ({node.name: own_name} if own_name else {})
            lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()]
            node.hosts.write_text("".join(lines))
        yield nodes


def _namespace(stack: ExitStack, name: str) -> None:
    ip("netns", "add", name)
    stack.callback(ip, "netns", "delete", name)


def ip(*argv: str) -> None:
    """Run the command `ip`, which must be a success."""
    done = subprocess.run(["ip", *argv], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(argv)}: {done.stderr.strip()}"


def _is_dead(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
