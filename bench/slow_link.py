"""A network link with a latency between two nodes on one machine, for benchmarks and tests. It needs root.

    from slow_link import slow_link

    with slow_link(latency_ms=5.0) as (first, second):
        second.start("nc", first.address, "5000", output=Path("received"))

The nodes are network namespaces (see `tests/distributed/namespaces.py`), each with a TUN device as its only interface
besides loopback. A relay process copies IP packets from one device to the other and delays each packet by `latency_ms`.
A round trip therefore takes 2 * `latency_ms`, and a sum over two ranks with gloo, which has two round trips, 4 *
`latency_ms`. The relay itself adds 0.2 ms per packet, or more if all cores are busy, also if `latency_ms` is 0. The
link has no bandwidth limit and loses no packets.
"""

import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.distributed.namespaces import Node, ip, network

# Large packets, because the relay spends its time per packet.
_MTU = 65_000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_QUEUE_PACKETS = "10000"


@contextmanager
def slow_link(latency_ms: float) -> Iterator[tuple[Node, Node]]:
    """Create two nodes that reach only each other, with a one-way latency of `latency_ms` milliseconds in each
    direction. At the end all processes on them are killed."""
    with network(2) as (first, second):
        ends = [_replace_interface(node) for node in (first, second)]
        command = [sys.executable, __file__, str(latency_ms), *map(str, ends)]
        # The relay ends when its standard input is closed, also if this process is killed.
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=ends):
            for end in ends:
                os.close(end)
            yield first, second


def start_ranks(nodes: tuple[Node, Node], argv: list[str], log: Path) -> list[subprocess.Popen[bytes]]:
    """Start `paceline` with these arguments as two ranks, one on each node, and append their output to a file. Each
    node has its own core, as hosts have."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "paceline", *argv]
    return [
        node.start("taskset", "--cpu-list", str(index), *command, output=log, RANK=str(index), **shared)
        for index, node in enumerate(nodes)
    ]


def _replace_interface(node: Node) -> int:
    """Replace the interface of a node by a TUN device with the same address and return the device's descriptor."""
    descriptor, name = os.open("/dev/net/tun", os.O_RDWR), f"tun{uuid.uuid4().hex[:8]}"
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    ip("-n", node.namespace, "link", "delete", "eth0")
    ip("link", "set", name, "netns", node.namespace, "name", "eth0")
    ip("-n", node.namespace, "link", "set", "eth0", "mtu", str(_MTU), "txqueuelen", _QUEUE_PACKETS, "up")
    ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", "eth0")
    return descriptor


def relay(latency_seconds: float, first: int, second: int) -> None:
    """Copy packets between two TUN devices, each `latency_seconds` after it was sent, until standard input closes."""
    peer = {first: second, second: first}
    # The latency is the same for all packets, so they are due in the order in which they were sent.
    pending: deque[tuple[float, int, bytes]] = deque()
    with selectors.DefaultSelector() as selector:
        for descriptor in (sys.stdin.fileno(), first, second):
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            timeout = max(0.0, pending[0][0] - time.monotonic()) if pending else None
            for key, _ in selector.select(timeout):
                if key.fd not in peer:
                    return
                pending.append((time.monotonic() + latency_seconds, peer[key.fd], os.read(key.fd, _MTU)))
            while pending and pending[0][0] <= time.monotonic():
                _, device, packet = pending.popleft()
                os.write(device, packet)


if __name__ == "__main__":
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    relay(float(sys.argv[1]) / 1e3, int(sys.argv[2]), int(sys.argv[3]))
