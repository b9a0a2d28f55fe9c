"""Simulate the store traffic of many ranks on one machine: start-up, failure watch, failure and restart.

    unshare --net sh -c 'ip link set lo up; python bench/control_plane.py [--clients 64 256 1024] [--rounds 3]'

The clients are threads of a few processes. Each has its own connection to a real TCPStore over loopback and its own
`Watch`, as a rank has; there are no envs and no process group. The main rank has a separate process, and so has the
store, as under torch's elastic launcher. A round is a start on a new store, a failure of the last client, and a restart
on the same store. torch looks up the names of all connections; in a separate network namespace it does not ask a name
server for them:

    startup_seconds, restart_seconds    until the last client is connected, is watched and has exchanged a value
    loop_seconds                        periods of the main rank's watch loop, of which 0.5 s are its pause
    requests_per_loop                   store requests of the main rank per period
    failure_seconds                     from a client's report until the last client knows the failure
"""

import argparse
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import Queue
from statistics import median
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.distributed.failure import Failure, Watch
from paceline.distributed.group import all_different
from paceline.distributed.rank import Rank

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["paceline.distributed.group"])
PROCESSES = 4
SECONDS = 120.0
"""Time limit of each phase."""
CAUSE = "the simulated failure"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256, 1024], help="Numbers of ranks.")
    parser.add_argument("--rounds", type=int, default=3, help="Starts and restarts of each number of ranks.")
    parser.add_argument("--watch-seconds", type=float, default=10.0, help="Time between start and failure, s.")
    arguments = parser.parse_args()
    rows = []
    for _ in range(arguments.rounds):
        for clients in arguments.clients:
            rows.append(simulate(clients, arguments.watch_seconds) | {"load_average": os.getloadavg()[0]})
            print(rows[-1], flush=True)
    import rates  # not importable for the test that imports this module

    rates.write("control_plane", **vars(arguments), processes=PROCESSES, rows=rows)


def simulate(clients: int, watch_seconds: float) -> dict[str, Any]:
    """Return the measurements of one round."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (_attempt(f"attempt {number}", clients, server.port, watch_seconds) for number in range(2))
    return {"clients": clients} | first | {"restart_seconds": second["startup_seconds"]}


def _attempt(name: str, clients: int, port: int, watch_seconds: float) -> dict[str, Any]:
    """Start all ranks, let the last one fail, and end their processes."""
    parts = [range(1), *(range(1 + number, clients, PROCESSES) for number in range(PROCESSES))]
    pipes, far_ends = zip(*(CONTEXT.Pipe() for _ in parts), strict=True)
    processes = [
        CONTEXT.Process(target=_run_ranks, args=(pipe, part, clients, port, name), daemon=True)
        for pipe, part in zip(far_ends, parts, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        _receive(pipes)
        began = time.monotonic()
        for pipe in pipes:
            pipe.send("start")
        startup_seconds = max(_receive(pipes)) - began
        time.sleep(watch_seconds)
        for pipe in pipes:
            pipe.send("the last rank fails")
        failed_at = max(_receive(pipes))
        known, beats = zip(*_receive(pipes), strict=True)
    finally:
        for process in processes:
            process.kill()
    failures = [found for part in known for found in part]
    assert len(failures) == clients - 1
    assert {str(failure) for _, failure in failures} == {f"{CAUSE}; rank {clients - 1} on simulated"}
    loops = [(end - start, after - before) for (start, before), (end, after) in pairwise(beats[0])]
    periods, requests = zip(*loops, strict=True)
    return {
        "startup_seconds": startup_seconds,
        "loop_seconds": {"median": median(periods), "max": max(periods)},
        "requests_per_loop": max(requests),
        "failure_seconds": max(at for at, _ in failures) - failed_at,
    }


def _receive(pipes: Sequence[Connection]) -> list[Any]:
    """Return a message of each process."""
    found = []
    for pipe in pipes:
        assert pipe.poll(SECONDS), "a process does not answer"
        found.append(pipe.recv())
    return found


def _run_ranks(pipe: Connection, indices: range, clients: int, port: int, name: str) -> None:
    """Run ranks in threads of this process."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # for the lookup of names, see above
    ranks = [Rank(index, clients, host="simulated") for index in indices]
    known, watches, store = Queue[tuple[float, Failure]](), dict[int, Watch](), RecordingStore()

    def know(failure: Failure) -> None:
        known.put((time.monotonic(), failure))
        threading.Event().wait()  # the watch would end the process

    def start(rank: Rank) -> float:
        connection = TCPStore("127.0.0.1", port, clients, is_master=False, timeout=timedelta(seconds=SECONDS))
        shared = PrefixStore(name, connection)
        if rank.is_main:
            store.store = shared
        watches[rank.index] = Watch(cast("Any", store) if rank.is_main else shared, rank, timeout_seconds=60.0)
        watches[rank.index].start(know)
        assert all_different(rank, shared, "gpu", str(rank.index))
        return time.monotonic()

    with ThreadPoolExecutor(len(ranks)) as threads:
        pipe.send("ready")
        pipe.recv()
        pipe.send(max(threads.map(start, ranks)))
        pipe.recv()
        failing = watches.get(clients - 1)
        pipe.send(time.monotonic())
        if failing:
            failing.report(Failure(clients - 1, "simulated", CAUSE))
        failures = [known.get(timeout=SECONDS) for _ in range(len(ranks) - bool(failing))]
        pipe.send((failures, store.beats))
        pipe.recv()


class RecordingStore:
    """The store of the main rank. Records the time of each heartbeat and the number of requests until then."""

    store: PrefixStore

    def __init__(self) -> None:
        self.beats: list[tuple[float, int]] = []
        self._requests = 0

    def __getattr__(self, name: str) -> Any:
        if name == "set" and threading.current_thread().name == "watch":
            self.beats.append((time.monotonic(), self._requests))
        self._requests += 1
        return getattr(self.store, name)


if __name__ == "__main__":
    main()
