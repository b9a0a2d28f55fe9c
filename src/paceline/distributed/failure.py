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

from torch.distributed.distributed_c10d import Store

from paceline.distributed.launch_record import machine_id
from paceline.distributed.rank import Rank

EXIT_CODE = 1
REFUSAL_EXIT_CODE = 2
# Between two looks at the store.
_INTERVAL_SECONDS = 0.5
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
    """Whether the rank refused its input, as a `UserError`; a restart would not help."""

    @property
    def exit_code(self) -> int:
        return REFUSAL_EXIT_CODE if self.refused else EXIT_CODE

    def __str__(self) -> str:
        more = f", more in {self.log}" if self.log else ""
        return f"{self.cause}; rank {self.rank} on {self.host}{more}"


class Watch:
    """Beats for this rank, and listens for the others. The main rank listens to all, the others to it."""

    def __init__(self, store: Store, rank: Rank, timeout_seconds: float):
        self._store, self._rank, self._timeout = store, rank, timeout_seconds
        self._watched = [index for index in range(rank.world_size) if (index == 0) != rank.is_main]
        self._places: dict[int, tuple[str, int]] = {}
        self._stopped = threading.Event()
        self._closed = threading.Event()
        # Held by the thread that ends the process: another thread may learn of the same failure at the same time.
        self._ending = threading.Lock()
        self._lock = threading.Lock()
        self._reached = time.monotonic()
        self._thread: threading.Thread | None = None
        self._store.set(self._key("place"), f"{rank.host} {os.getpid()} {machine_id()}")

    def start(self, on_failure: Callable[[Failure], None]) -> None:
        """From now on a failure elsewhere calls `on_failure`, in a thread of its own, and then ends the process."""
        self._on_failure = on_failure
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
            self._quietly(lambda: self._store.set(self._key("beat"), "gone"))
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
        heard: dict[int, tuple[bytes, float]] = dict.fromkeys(self._watched, (b"", time.monotonic()))
        beats = 0
        while not self._stopped.wait(_INTERVAL_SECONDS):
            beats += 1
            try:
                with self._reaching():
                    self._store.set(self._key("beat"), str(beats))
                failure = self._known() or self._silent(heard)
            except (RuntimeError, ValueError) as error:
                failure = Failure(0, self._place(0)[0], f"the main rank cannot be reached: {error}".splitlines()[0])
            if failure and not self._stopped.is_set():
                self._end(failure)

    def _guard(self) -> None:
        """Ends the process when the store does not answer: over a cut network its calls wait without end, whatever
        timeout it has."""
        while not self._closed.wait(_INTERVAL_SECONDS):
            silence = time.monotonic() - self._reached
            if silence > self._timeout:
                host, _ = self._places.get(0, ("an unknown host", 0))
                self._leave(Failure(0, host, f"the main rank cannot be reached for {silence:.0f} s (--timeout)"))

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """One thread at a time may use the store."""
        with self._lock:
            yield
            self._reached = time.monotonic()

    def _silent(self, heard: dict[int, tuple[bytes, float]]) -> Failure | None:
        """A rank that was not heard of for too long; `heard` is its last beat and when it came."""
        for index in self._watched:
            key, now = f"beat/{index}", time.monotonic()
            with self._reaching():
                beat = self._store.get(key) if self._store.check([key]) else b""
            last, when = heard[index]
            if beat != last or beat == b"gone":
                heard[index] = beat, now
            elif now - when > self._timeout:
                host, pid = self._place(index)
                if pid:
                    # Stopped or stuck, it would outlive the others, and a launcher would wait for it.
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return Failure(index, host, f"not heard of for {now - when:.0f} s (--timeout)")
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
