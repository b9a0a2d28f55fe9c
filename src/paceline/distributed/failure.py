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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from paceline.distributed.launch_record import machine_id
from paceline.distributed.rank import Rank
from paceline.distributed.running_clock import RunningClock

EXIT_CODE = 1
REFUSAL_EXIT_CODE = 2
# Time for which a rank that is alive but late, for example because it compiles, may keep the others waiting, s.
LATE_SECONDS = 600.0
# Timeouts of torch also count the time in which the job is suspended. `Watch` replaces them.
UNLIMITED = timedelta(days=30)
# Interval between two heartbeats, s.
_INTERVAL_SECONDS = 0.5
_SIGNED_OFF = b"gone"
# A broken connection is usually the consequence of another rank's failure. Its report is awaited for this long.
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
    """Whether the rank refused its input, as a `UserError`; a restart would not help."""

    @property
    def exit_code(self) -> int:
        return REFUSAL_EXIT_CODE if self.refused else EXIT_CODE

    def __str__(self) -> str:
        more = f", more in {self.log}" if self.log else ""
        return f"{self.cause}; rank {self.rank} on {self.host}{more}"


@dataclass
class _Heartbeats:
    """The latest heartbeat of another rank, and the running time at which it arrived."""

    beat: bytes = b""
    beat_at: float = 0.0
    exchanges: int = 0
    waited_since: float = 0.0
    """Running time since which it has entered fewer collectives than this rank, without entering a further one."""

    def update(self, beat: bytes, own_exchanges: int, now: float) -> None:
        """Process a heartbeat, which may be the same as before. `own_exchanges` is the number of collectives of this
        rank."""
        signed_off = beat == _SIGNED_OFF
        exchanges = int(beat.split()[1]) if beat and not signed_off else self.exchanges
        if signed_off or beat != self.beat:
            self.beat, self.beat_at = beat, now
        if signed_off or exchanges != self.exchanges or exchanges >= own_exchanges:
            self.exchanges, self.waited_since = exchanges, now


class Watch:
    """Sends the heartbeats of this rank and checks those of others. The main rank checks all ranks, the others check
    the main rank.

    All limits are in running time: a job may be suspended for any time if all of its ranks are.
    """

    def __init__(self, store: Store, rank: Rank, timeout_seconds: float, late_seconds: float = LATE_SECONDS):
        self._store, self._rank, self._timeout, self._late_seconds = store, rank, timeout_seconds, late_seconds
        self.exchanges = 0
        """Number of collectives that this rank has entered."""
        self._watched = [index for index in range(rank.world_size) if (index == 0) != rank.is_main]
        self._locations: dict[int, tuple[str, int]] = {}
        self._stopped = threading.Event()
        self._closed = threading.Event()
        # Held by the thread that ends the process: another thread may learn of the same failure at the same time.
        self._ending = threading.Lock()
        self._lock = threading.Lock()
        self._clock = RunningClock(2.0 * _INTERVAL_SECONDS)
        self._last_contact = self._clock.read()
        self._thread: threading.Thread | None = None
        self._store.set(self._key("location"), f"{rank.host} {os.getpid()} {machine_id()}")

    def start(self, on_failure: Callable[[Failure], None]) -> None:
        """Start the threads. A failure of another rank calls `on_failure` in a separate thread and then ends the
        process."""
        self._on_failure = on_failure
        self._store.set_timeout(UNLIMITED)
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()
        if not self._rank.is_main:
            threading.Thread(target=self._guard, daemon=True, name="guard").start()

    def stop(self) -> None:
        """Sign off: from here on the others no longer expect heartbeats of this rank."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        with self._using_store():
            self._ignoring_errors(lambda: self._store.set(self._key("beat"), _SIGNED_OFF.decode()))
        if self._thread:
            self._thread.join(2.0 * _INTERVAL_SECONDS)
        self._closed.set()

    def report(self, own: Failure, echo: bool = False) -> Failure:
        """Report this rank's failure to all ranks and return the first reported failure. With `echo`, report only if no
        other rank reports within a few seconds.

        Return after the main rank has printed the failure, or after the others have read it from the main rank's
        store. A launcher that sees this rank end may end the others at once.
        """
        deadline = time.monotonic() + _ECHO_SECONDS
        # If the watch is ending the process, it does so while this waits.
        self._ending.acquire()
        self._stopped.set()
        while echo and time.monotonic() < deadline:
            if known := self._reported():
                return known
            time.sleep(0.1)
        with self._using_store():
            self._ignoring_errors(lambda: self._store.compare_set("failure", "", json.dumps(asdict(own))))
        known = self._reported() or own
        if self._rank.is_main:
            self._confirm_printed()
        while time.monotonic() < deadline and not self._is_received():
            time.sleep(0.05)
        return known

    def _run(self) -> None:
        for index in self._watched:
            self._location(index)
        now = self._clock.read()
        heartbeats = {index: _Heartbeats(beat_at=now, waited_since=now) for index in self._watched}
        beats = 0
        while not self._stopped.wait(_INTERVAL_SECONDS):
            beats += 1
            try:
                with self._using_store():
                    self._store.set(self._key("beat"), f"{beats} {self.exchanges}")
                failure = self._reported() or self._overdue(heartbeats)
            except (RuntimeError, ValueError) as error:
                failure = Failure(0, self._location(0)[0], f"the main rank cannot be reached: {error}".splitlines()[0])
            if failure and not self._stopped.is_set():
                self._end(failure)

    def _guard(self) -> None:
        """End the process when the store does not answer. Over a broken network its calls block without a timeout."""
        while not self._closed.wait(_INTERVAL_SECONDS):
            silence = self._clock.read() - self._last_contact
            if silence > self._timeout:
                host, _ = self._locations.get(0, ("an unknown host", 0))
                self._exit(Failure(0, host, f"the main rank cannot be reached for {silence:.0f} s (--timeout)"))

    @contextmanager
    def _using_store(self) -> Iterator[None]:
        """Allow one thread at a time to use the store."""
        with self._lock:
            yield
            self._last_contact = self._clock.read()

    def _overdue(self, heartbeats: dict[int, _Heartbeats]) -> Failure | None:
        """Return the failure of a rank that sent no heartbeat, or kept the others waiting, for too long."""
        for index, last in heartbeats.items():
            key, exchanges = f"beat/{index}", self.exchanges
            with self._using_store():
                beat = self._store.get(key) if self._store.check([key]) else b""
            now = self._clock.read()
            last.update(beat, exchanges, now)
            silence, waited = now - last.beat_at, now - last.waited_since
            host, pid = self._location(index)
            if silence > self._timeout:
                if pid:
                    # A stopped process would outlive the others, and a launcher would wait for it.
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return Failure(index, host, f"no heartbeat for {silence:.0f} s (--timeout)")
            if waited > self._late_seconds:
                return Failure(index, host, f"alive, but kept the other ranks waiting for {waited:.0f} s")
        return None

    def _end(self, failure: Failure) -> None:
        with self._using_store():
            self._ignoring_errors(lambda: self._store.compare_set("failure", "", json.dumps(asdict(failure))))
            self._ignoring_errors(lambda: self._store.add("readers", 1))
        self._exit(failure)

    def _exit(self, failure: Failure) -> None:
        if not self._ending.acquire(blocking=False):
            return
        try:
            self._on_failure(failure)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if self._rank.is_main:
                self._confirm_printed()
                time.sleep(2.0 * _INTERVAL_SECONDS)
            os._exit(failure.exit_code)

    def _reported(self) -> Failure | None:
        with self._using_store():
            try:
                text = self._store.get("failure").decode() if self._store.check(["failure"]) else ""
            except (RuntimeError, ValueError):
                if self._stopped.is_set():
                    return None
                raise
        return Failure(**json.loads(text)) if text else None

    def _confirm_printed(self) -> None:
        with self._using_store():
            self._ignoring_errors(lambda: self._store.set("printed", "yes"))

    def _is_received(self) -> bool:
        """Return whether the ranks that must know of a failure before this process ends know of it."""
        with self._using_store():
            try:
                if self._rank.is_main:
                    return self._store.add("readers", 0) >= self._rank.world_size - 1
                return self._store.check(["printed"])
            except (RuntimeError, ValueError):
                return True

    def _location(self, index: int) -> tuple[str, int]:
        """Return the host of a rank and, if it runs on this machine, its process ID. Two hosts may have the same
        name."""
        if index not in self._locations:
            with self._using_store():
                host, pid, machine = self._store.get(f"location/{index}").decode().split()
            here = (host, machine) == (self._rank.host, machine_id())
            self._locations[index] = host, int(pid) if here else 0
        return self._locations[index]

    def _key(self, kind: str) -> str:
        return f"{kind}/{self._rank.index}"

    @staticmethod
    def _ignoring_errors(work: Callable[[], object]) -> None:
        """Ignore errors of the store, which may be gone with the main rank."""
        try:
            work()
        except (RuntimeError, ValueError):
            return
