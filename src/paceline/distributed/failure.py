"""Detect the failure of a rank on all ranks.

A collective waits for all ranks, so a rank that fails or hangs would leave the others waiting for minutes. A thread in
each rank writes heartbeats to a common store, reads those of others, and ends its process when a rank reports a failure
or stops sending heartbeats.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from paceline.distributed.launch_record import machine_id
from paceline.distributed.launcher import WATCH_THREAD
from paceline.distributed.rank import Rank

REFUSAL_EXIT_CODE = 2
# Time for which a rank that is alive but late, for example because it compiles, may keep the others waiting, s.
LATE_SECONDS = 600.0
# Timeouts of torch also count the time in which the job is suspended. `Watch` replaces them.
UNLIMITED = timedelta(days=30)
# Interval between two heartbeats, s.
_INTERVAL_SECONDS = 0.5
_SIGNED_OFF = "gone"
# A broken connection is usually the consequence of another rank's failure. Time to wait for that rank's report, s.
_ECHO_SECONDS = 3.0


class PeerLostError(Exception):
    """A collective failed because another rank was lost."""


@dataclass(frozen=True)
class Failure:
    """The cause of a failed run and the rank where it occurred."""

    rank: int
    host: str
    cause: str
    log: str = ""
    """File with the traceback; empty if there is none."""
    refused: bool = False
    """True if the rank refused its input with a `UserError`; a restart would not help."""

    def __str__(self) -> str:
        more = f", more in {self.log}" if self.log else ""
        return f"{self.cause}; rank {self.rank} on {self.host}{more}"


class RunningClock:
    """Measures the time in which this process runs. Time in which it is stopped, as part of a suspended job, does not
    count. The clock must be read at least every `max_step_seconds`, or it falls behind."""

    def __init__(self, max_step_seconds: float):
        self._max_step_seconds = max_step_seconds
        self._seconds, self._read_at = 0.0, time.monotonic()
        self._lock = threading.Lock()

    def read(self) -> float:
        """Return the running time in seconds since the clock was made."""
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._read_at, self._max_step_seconds)
            self._read_at = now
            return self._seconds


@dataclass
class _Peer:
    """Another rank, its latest heartbeat and the running time at which that arrived."""

    host: str
    pid: int
    """Process ID; 0 if the rank runs on another machine."""
    beat_at: float
    waited_since: float
    """Running time at which this rank began to wait for the peer to enter its next collective, s."""
    beat: str = ""
    exchanges: int = 0


class Watch:
    """Sends the heartbeats of this rank and checks those of others. The main rank checks all ranks, the others check
    the main rank.

    All limits are in running time: a job may be suspended for any time if all of its ranks are.
    """

    def __init__(self, store: Store, rank: Rank, timeout_seconds: float, late_seconds: float = LATE_SECONDS):
        self._store, self._rank, self._timeout, self._late_seconds = store, rank, timeout_seconds, late_seconds
        self.exchanges = 0
        """Number of collectives that this rank has entered."""
        self._peers: dict[int, _Peer] = {}
        self._stopped, self._closed = threading.Event(), threading.Event()
        # Held by the thread that ends the process: another thread may detect the same failure at the same time.
        self._ending = threading.Lock()
        self._lock = threading.Lock()
        self._clock = RunningClock(2.0 * _INTERVAL_SECONDS)
        self._last_contact = self._clock.read()
        self._thread: threading.Thread | None = None
        # All keys that are read later exist from here on, so that one request reads many of them.
        self._store.compare_set("failure", "", "")
        self._store.set(f"beat/{rank.index}", "")
        self._store.set(f"location/{rank.index}", f"{rank.host} {os.getpid()} {machine_id()}")

    def start(self, on_failure: Callable[[Failure], None]) -> None:
        """Start the threads. If another rank fails, they call `on_failure` and end the process."""
        self._on_failure = on_failure
        self._store.set_timeout(UNLIMITED)
        self._thread = threading.Thread(target=self._run, daemon=True, name=WATCH_THREAD)
        self._thread.start()
        if not self._rank.is_main:
            threading.Thread(target=self._guard, daemon=True, name="guard").start()

    def stop(self) -> None:
        """Sign off. The other ranks then expect no more heartbeats of this rank."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._try(self._store.set, f"beat/{self._rank.index}", _SIGNED_OFF)
        if self._thread:
            self._thread.join(2.0 * _INTERVAL_SECONDS)
        self._closed.set()

    def count(self, name: str, amount: int = 1) -> int:
        """Add to a number that all ranks share and return the sum. Unlike a collective, this waits for no other rank
        and may be called in any thread."""
        return self._use(self._store.add, f"count/{name}", amount)

    def report(self, own: Failure, echo: bool = False) -> Failure:
        """Report this rank's failure to all ranks and return the first reported failure. With `echo`, report only if no
        other rank reports within a few seconds.

        The main rank returns after the others have read it, the others after the main rank has printed it, because
        a launcher may kill the other ranks as soon as this one ends.
        """
        deadline = time.monotonic() + _ECHO_SECONDS
        # If another thread is ending the process, this blocks until the process has ended.
        self._ending.acquire()
        self._stopped.set()
        while echo and time.monotonic() < deadline:
            if known := self._reported():
                return known
            time.sleep(0.1)
        self._publish(own)
        known = self._reported() or own
        if self._rank.is_main:
            self._try(self._store.set, "printed", "yes")
        while time.monotonic() < deadline and not self._is_received():
            time.sleep(0.05)
        return known

    def _run(self) -> None:
        """Send heartbeats and check those of others until a failure is found or `stop` is called."""
        self._find_peers()
        beats = 0
        while not self._stopped.wait(_INTERVAL_SECONDS):
            beats += 1
            try:
                self._use(self._store.set, f"beat/{self._rank.index}", f"{beats} {self.exchanges}")
                own_exchanges = self.exchanges
                reported, *latest = self._read("failure", *(f"beat/{index}" for index in self._peers))
                failure = _parse(reported) or self._overdue(latest, own_exchanges)
            except (RuntimeError, ValueError) as error:
                failure = self._main_lost(f": {error}".splitlines()[0])
            if failure and not self._stopped.is_set():
                self._publish(failure)
                self._try(self._store.add, "readers", 1)
                self._exit(failure)

    def _guard(self) -> None:
        """End the process when the store does not answer. Over a broken network its calls block without a timeout."""
        while not self._closed.wait(_INTERVAL_SECONDS):
            silence = self._clock.read() - self._last_contact
            if silence > self._timeout:
                self._exit(self._main_lost(f" for {silence:.0f} s (--timeout)"))

    def _find_peers(self) -> None:
        """Find the ranks that this one checks. Two hosts may have the same name, so the machine ID is compared too."""
        indices = range(1, self._rank.world_size) if self._rank.is_main else range(1)
        locations = self._read(*(f"location/{index}" for index in indices))
        now = self._clock.read()
        for index, location in zip(indices, locations, strict=True):
            host, pid, machine = location.split()
            is_here = (host, machine) == (self._rank.host, machine_id())
            self._peers[index] = _Peer(host, int(pid) if is_here else 0, beat_at=now, waited_since=now)

    def _main_lost(self, details: str) -> Failure:
        host = self._peers[0].host if 0 in self._peers else "an unknown host"
        return Failure(0, host, f"the main rank cannot be reached{details}")

    def _overdue(self, latest: Iterable[str], own_exchanges: int) -> Failure | None:
        """Return the failure of a rank that sent no heartbeat, or kept the others waiting, for too long, given the
        latest heartbeats and the number of this rank's collectives before they were read."""
        now = self._clock.read()
        for (index, peer), beat in zip(self._peers.items(), latest, strict=True):
            if beat == _SIGNED_OFF:
                continue
            if beat != peer.beat:
                peer.beat, peer.beat_at = beat, now
            exchanges = int(beat.split()[1]) if beat else 0
            if exchanges != peer.exchanges or exchanges >= own_exchanges:
                peer.exchanges, peer.waited_since = exchanges, now
            silence, waited = now - peer.beat_at, now - peer.waited_since
            if silence > self._timeout:
                if peer.pid:
                    # A stopped process would remain when the others have ended, and a launcher would wait for it.
                    with suppress(ProcessLookupError):
                        os.kill(peer.pid, signal.SIGKILL)
                return Failure(index, peer.host, f"no heartbeat for {silence:.0f} s (--timeout)")
            if waited > self._late_seconds:
                return Failure(index, peer.host, f"alive, but kept the other ranks waiting for {waited:.0f} s")
        return None

    def _exit(self, failure: Failure) -> None:
        if not self._ending.acquire(blocking=False):
            return
        try:
            self._on_failure(failure)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if self._rank.is_main:
                self._try(self._store.set, "printed", "yes")
                time.sleep(2.0 * _INTERVAL_SECONDS)
            os._exit(REFUSAL_EXIT_CODE if failure.refused else 1)

    def _publish(self, failure: Failure) -> None:
        """Write a failure to the store, unless the store already has one."""
        self._try(self._store.compare_set, "failure", "", json.dumps(asdict(failure)))

    def _reported(self) -> Failure | None:
        text = self._try(self._store.get, "failure")
        return _parse(text.decode()) if text else None

    def _is_received(self) -> bool:
        """Return whether the others have read the failure; for others, whether the main rank has printed it."""
        if not self._rank.is_main:
            return self._try(self._store.check, ["printed"]) is not False
        readers = self._try(self._store.add, "readers", 0)
        return readers is None or readers >= self._rank.world_size - 1

    def _read(self, *keys: str) -> list[str]:
        """Return entries of the store by one request. Wait until all of them exist."""
        return [entry.decode() for entry in self._use(self._store.multi_get, keys)] if keys else []

    def _use(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Call an operation of the store, in one thread at a time."""
        with self._lock:
            try:
                return operation(*arguments)
            finally:
                self._last_contact = self._clock.read()

    def _try(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Call an operation of the store; return None if it fails because the main rank has ended."""
        with suppress(RuntimeError, ValueError):
            return self._use(operation, *arguments)
        return None


def _parse(report: str) -> Failure | None:
    return Failure(**json.loads(report)) if report else None
