"""The failure of one is known to all: every rank beats, and whoever fails says so.

A collective waits for all ranks, so one that fails or hangs would leave the others waiting for minutes. A thread in
each rank looks at a store they share, and ends its process when it hears of a failure or no longer hears of a rank.
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
# A rank that is alive but late, for example because it compiles, may keep the others waiting for this long.
LATE_SECONDS = 600.0
# For timeouts of torch that also count the time in which the job is suspended: `Watch` has its own instead.
UNLIMITED = timedelta(days=30)
# Between two looks at the store.
_INTERVAL_SECONDS = 0.5
_GONE = b"gone"
# A broken connection is most often the echo of another rank's failure: so long its own words are waited for.
_ECHO_SECONDS = 3.0


class PeerLostError(Exception):
    """A collective failed, because some rank is gone."""


@dataclass(frozen=True)
class Failure:
    """What ended a run, and where."""

    rank: int
    host: str
    cause: str
    log: str = ""
    """The file with more, or nothing."""
    refused: bool = False
    """True if the rank refused its input with a `UserError`. A restart would not help."""

    @property
    def exit_code(self) -> int:
        return REFUSAL_EXIT_CODE if self.refused else EXIT_CODE

    def __str__(self) -> str:
        more = f", more in {self.log}" if self.log else ""
        return f"{self.cause}; rank {self.rank} on {self.host}{more}"


@dataclass
class _Heard:
    """What was last heard of another rank, and when, in running time."""

    beat: bytes = b""
    beat_at: float = 0.0
    exchanges: int = 0
    waited_since: float = 0.0
    """Since then it has entered fewer collectives than this rank, and no further one."""

    def update(self, beat: bytes, own_exchanges: int, now: float) -> None:
        """Take a beat, which may be the same as before. `own_exchanges` is how many collectives this rank entered."""
        gone = beat == _GONE
        exchanges = int(beat.split()[1]) if beat and not gone else self.exchanges
        if gone or beat != self.beat:
            self.beat, self.beat_at = beat, now
        if gone or exchanges != self.exchanges or exchanges >= own_exchanges:
            self.exchanges, self.waited_since = exchanges, now


class Watch:
    """Beats for this rank, and listens for the others. The main rank listens to all, the others to it.

    All limits are in running time: a job may be suspended for any time, if all of its ranks are."""

    def __init__(self, store: Store, rank: Rank, timeout_seconds: float, late_seconds: float = LATE_SECONDS):
        self._store, self._rank, self._timeout, self._late = store, rank, timeout_seconds, late_seconds
        self.exchanges = 0
        """Number of collectives that this rank has entered."""
        self._watched = [index for index in range(rank.world_size) if (index == 0) != rank.is_main]
        self._places: dict[int, tuple[str, int]] = {}
        self._stopped = threading.Event()
        self._closed = threading.Event()
        # Held by the thread that ends the process: another thread may learn of the same failure at the same time.
        self._ending = threading.Lock()
        self._lock = threading.Lock()
        self._clock = RunningClock(2.0 * _INTERVAL_SECONDS)
        self._reached = self._clock.read()
        self._thread: threading.Thread | None = None
        self._store.set(self._key("place"), f"{rank.host} {os.getpid()} {machine_id()}")

    def start(self, on_failure: Callable[[Failure], None]) -> None:
        """From now on a failure elsewhere calls `on_failure`, in a thread of its own, and then ends the process."""
        self._on_failure = on_failure
        self._store.set_timeout(UNLIMITED)
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()
        if not self._rank.is_main:
            threading.Thread(target=self._guard, daemon=True, name="guard").start()

    def stop(self) -> None:
        """Say goodbye; from here on this rank's silence means nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        with self._reaching():
            self._quietly(lambda: self._store.set(self._key("beat"), _GONE.decode()))
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
            if known := self._known():
                return known
            time.sleep(0.1)
        with self._reaching():
            self._quietly(lambda: self._store.compare_set("failure", "", json.dumps(asdict(own))))
        known = self._known() or own
        if self._rank.is_main:
            self._confirm_printed()
        while time.monotonic() < deadline and not self._is_received():
            time.sleep(0.05)
        return known

    def _run(self) -> None:
        for index in self._watched:
            self._place(index)
        now = self._clock.read()
        heard = {index: _Heard(beat_at=now, waited_since=now) for index in self._watched}
        beats = 0
        while not self._stopped.wait(_INTERVAL_SECONDS):
            beats += 1
            try:
                with self._reaching():
                    self._store.set(self._key("beat"), f"{beats} {self.exchanges}")
                failure = self._known() or self._overdue(heard)
            except (RuntimeError, ValueError) as error:
                failure = Failure(0, self._place(0)[0], f"the main rank cannot be reached: {error}".splitlines()[0])
            if failure and not self._stopped.is_set():
                self._end(failure)

    def _guard(self) -> None:
        """Ends the process when the store does not answer: over a cut network its calls wait without end, whatever
        timeout it has."""
        while not self._closed.wait(_INTERVAL_SECONDS):
            silence = self._clock.read() - self._reached
            if silence > self._timeout:
                host, _ = self._places.get(0, ("an unknown host", 0))
                self._leave(Failure(0, host, f"the main rank cannot be reached for {silence:.0f} s (--timeout)"))

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """One thread at a time may use the store."""
        with self._lock:
            yield
            self._reached = self._clock.read()

    def _overdue(self, heard: dict[int, _Heard]) -> Failure | None:
        """Return the failure of a rank that was not heard of, or kept the others waiting, for too long."""
        for index, last in heard.items():
            key, exchanges = f"beat/{index}", self.exchanges
            with self._reaching():
                beat = self._store.get(key) if self._store.check([key]) else b""
            now = self._clock.read()
            last.update(beat, exchanges, now)
            silence, waited = now - last.beat_at, now - last.waited_since
            host, pid = self._place(index)
            if silence > self._timeout:
                if pid:
                    # Stopped or stuck, it would outlive the others, and a launcher would wait for it.
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return Failure(index, host, f"not heard of for {silence:.0f} s (--timeout)")
            if waited > self._late:
                return Failure(index, host, f"alive, but kept the other ranks waiting for {waited:.0f} s")
        return None

    def _end(self, failure: Failure) -> None:
        with self._reaching():
            self._quietly(lambda: self._store.compare_set("failure", "", json.dumps(asdict(failure))))
            self._quietly(lambda: self._store.add("readers", 1))
        self._leave(failure)

    def _leave(self, failure: Failure) -> None:
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

    def _known(self) -> Failure | None:
        with self._reaching():
            try:
                text = self._store.get("failure").decode() if self._store.check(["failure"]) else ""
            except (RuntimeError, ValueError):
                if self._stopped.is_set():
                    return None
                raise
        return Failure(**json.loads(text)) if text else None

    def _confirm_printed(self) -> None:
        with self._reaching():
            self._quietly(lambda: self._store.set("printed", "yes"))

    def _is_received(self) -> bool:
        """Return whether the ranks that must know of a failure before this process ends know of it."""
        with self._reaching():
            try:
                if self._rank.is_main:
                    return self._store.add("readers", 0) >= self._rank.world_size - 1
                return self._store.check(["printed"])
            except (RuntimeError, ValueError):
                return True

    def _place(self, index: int) -> tuple[str, int]:
        """A rank's host, and its process if that is one of this machine's; hosts may have the same name."""
        if index not in self._places:
            with self._reaching():
                host, pid, machine = self._store.get(f"place/{index}").decode().split()
            here = (host, machine) == (self._rank.host, machine_id())
            self._places[index] = host, int(pid) if here else 0
        return self._places[index]

    def _key(self, kind: str) -> str:
        return f"{kind}/{self._rank.index}"

    @staticmethod
    def _quietly(work: Callable[[], object]) -> None:
        """The store may be gone with the main rank; then there is nobody left to tell."""
        try:
            work()
        except (RuntimeError, ValueError):
            return
