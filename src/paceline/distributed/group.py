"""The process group of a run: collectives, and a watch over the ranks.

This is the only module that names gloo or nccl. Without a launcher there is one rank, and no operation communicates.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from paceline.device.gpus import gpu_uuid
from paceline.distributed.failure import LATE_SECONDS, UNLIMITED, Failure, PeerLostError, Watch
from paceline.distributed.launcher import main_address
from paceline.distributed.rank import Rank
from paceline.errors import counted

# Time limit for forming the group, and for each collective of a group whose watch is not started.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# Time limit for all ranks to connect.
CONNECT_TIMEOUT = timedelta(minutes=5)


class Group:
    """The ranks of a run. Without a launcher it is a single rank, without a process group and without a `watch`.

    With `on_failure` the watch starts as soon as the ranks have a common store: when another rank fails, hangs or is
    late by more than `late_seconds`, it calls `on_failure` in a separate thread and ends the process. It replaces the
    timeouts of gloo and nccl, which would end a job that was suspended for longer.
    """

    def __init__(
        self,
        rank: Rank,
        timeout_seconds: float = 60.0,
        on_failure: Callable[[Failure], None] | None = None,
        late_seconds: float = LATE_SECONDS,
    ):
        self.rank, self.size = rank, rank.world_size
        self.is_distributed = rank.launched
        """True under a launcher, also with one rank: collectives use a process group."""
        self.watch: Watch | None = None
        self.backend = "none"
        """Backend of `sum_` for the tensors of this rank: none, gloo or nccl."""
        self.collectives = 0
        """Number of sums in which this process has taken part."""
        self._summed_bytes = 0
        self._sync_seconds = 0.0
        self._reported = (0.0, 0, 0)
        if not self.is_distributed:
            return
        _choose_interface(*main_address())
        try:
            store = _store(CONNECT_TIMEOUT)
            self.watch = Watch(cast("Any", store).clone(), rank, timeout_seconds, late_seconds)
            if on_failure:
                self.watch.start(on_failure)
            self.backend = "nccl" if rank.device.type == "cuda" and _has_own_gpu(rank, store) else "gloo"
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo",
                store=PrefixStore("group", store),
                rank=rank.index,
                world_size=self.size,
                timeout=COLLECTIVE_TIMEOUT,
                device_id=rank.device if self.backend == "nccl" else None,
            )
            # Objects are exchanged over gloo, without the GPU. None is the group of all ranks made above.
            self._gloo = None
            if self.backend == "nccl":
                self._gloo = cast("ProcessGroup", dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))
            for group in {None, self._gloo} if on_failure else ():
                _set_pg_timeout(UNLIMITED, group)
        except (RuntimeError, ValueError) as error:
            remedy = "; choose another MASTER_PORT" if "EADDRINUSE" in str(error) else ""
            raise PeerLostError(
                f"the {counted(self.size, 'rank')} did not connect: {_first_line(error)}{remedy}"
            ) from error

    @property
    def capturable(self) -> bool:
        """True if `sum_` of GPU tensors may be part of a CUDA graph."""
        return self.backend != "gloo"

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place and return it. The result is bit-identical on all ranks."""
        self.begin_sum_(tensor)()
        return tensor

    def begin_sum_(self, tensor: Tensor) -> Callable[[], None]:
        """Start `sum_`. The returned function waits for its end."""
        if not self.is_distributed:
            return lambda: None
        self.collectives += 1
        self._summed_bytes += tensor.nbytes
        # nccl works in stream order; the host does not wait.
        if self.backend == "nccl":
            self._exchange(lambda: dist.all_reduce(tensor))
            return lambda: None
        work = self._timed(lambda: dist.all_reduce(tensor, async_op=True))
        return lambda: self._timed(work.wait)

    def _timed(self, collective: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = self._exchange(collective)
        self._sync_seconds += time.perf_counter() - started
        return result

    def sync_usage(self) -> dict[str, float]:
        """Return what sums over gloo have used since the last call: "seconds/sync", including the wait for slower
        ranks, "sync/collectives" and "sync/bytes". Sums over nccl are part of CUDA graphs and are not measured."""
        now = self._sync_seconds, self.collectives, self._summed_bytes
        seconds, collectives, summed_bytes = (new - old for new, old in zip(now, self._reported, strict=True))
        self._reported = now
        if self.backend != "gloo":
            return {"seconds/sync": 0.0}
        return {"seconds/sync": seconds, "sync/collectives": collectives, "sync/bytes": summed_bytes}

    def all_gather(self, fact: Any) -> list[Any]:
        """Return the objects of all ranks, by rank, on all ranks."""
        facts = [fact] * self.size
        if self.is_distributed:
            self._exchange(lambda: dist.all_gather_object(facts, fact, group=self._gloo))
        return facts

    def gather(self, fact: Any) -> list[Any] | None:
        """Return the objects of all ranks, by rank, on the main rank; None on the others."""
        facts = [fact] * self.size if self.rank.is_main else None
        if self.is_distributed:
            self._exchange(lambda: dist.gather_object(fact, facts, group=self._gloo))
        return facts

    def scatter(self, facts: Iterable[Any]) -> Any:
        """Return one of the main rank's objects on each rank, by rank. The main rank sends them one after the other, so
        that an iterator needs memory for one of them only. `facts` of other ranks is ignored."""
        if not self.is_distributed:
            (own,) = facts
            return own
        return self._exchange(lambda: self._send_each(facts) if self.rank.is_main else self._receive())

    def _send_each(self, facts: Iterable[Any]) -> Any:
        own = None
        for index, fact in enumerate(facts):
            if index == self.rank.index:
                own = fact
            else:
                dist.send_object_list([fact], index, group=self._gloo, device=torch.device("cpu"))
        return own

    def _receive(self) -> Any:
        facts = [None]
        dist.recv_object_list(facts, 0, group=self._gloo, device=torch.device("cpu"))
        return facts[0]

    def begin_all_gather(self, row: list[float]) -> Callable[[], Tensor]:
        """Start to gather a row of numbers from each rank. The returned function waits; it returns [rank, column]."""
        table = torch.zeros(self.size, len(row), dtype=torch.float64)
        table[self.rank.index] = torch.tensor(row, dtype=torch.float64)
        work = cast("dist.Work", dist.all_reduce(table, group=self._gloo, async_op=True))

        def finish() -> Tensor:
            self._exchange(work.wait)
            return table

        return finish

    def broadcast(self, fact: Any) -> Any:
        """Return the main rank's object on all ranks."""
        facts = [fact]
        if self.is_distributed:
            self._exchange(lambda: dist.broadcast_object_list(facts, group=self._gloo, device=torch.device("cpu")))
        return facts[0]

    def close(self) -> None:
        if self.watch:
            self.watch.stop()
        if self.is_distributed and dist.is_initialized():
            dist.destroy_process_group()

    def _exchange(self, collective: Callable[[], Any]) -> Any:
        """Call a collective or wait for its end, and return the result."""
        if self.watch:
            self.watch.exchanges += 1
        try:
            return collective()
        except RuntimeError as error:
            raise PeerLostError(f"another rank was lost: {_first_line(error)}") from error


def all_different(rank: Rank, store: Store, name: str, value: str) -> bool:
    """Return on all ranks whether no two ranks have the same value."""
    store.set(f"{name}/{rank.index}", value)
    if rank.is_main:
        # If each rank read all values, the number of requests would be the square of that of ranks.
        values = store.multi_get([f"{name}/{index}" for index in range(rank.world_size)])
        store.set(f"{name}/all_different", str(len(set(values)) == rank.world_size))
    return store.get(f"{name}/all_different") == b"True"


def _has_own_gpu(rank: Rank, store: Store) -> bool:
    """Return whether no two ranks share a GPU, which nccl requires."""
    return all_different(rank, store, "gpu", f"{rank.host} {gpu_uuid(rank.device)}")


def report_refusal(rank: Rank, cause: str, seconds: float) -> Failure:
    """Report to the other ranks that this one refuses its input before it has a `Group`, and return the first reported
    failure. Raise `PeerLostError` if the ranks do not connect within `seconds`."""
    try:
        watch = Watch(_store(timedelta(seconds=seconds)), rank, seconds)
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(_first_line(error)) from error
    return watch.report(Failure(rank.index, rank.host, cause, refused=True))


def _store(timeout: timedelta) -> Store:
    """Connect to the common key-value store. Return it when all ranks are connected."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # With a fixed main node (--master_addr) the store belongs to the launcher and outlives a restart. The prefix
    # separates the keys of this attempt from those of earlier ones.
    is_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt {attempt}" if is_agent_store else "attempt", store)


def differences(facts: Sequence[dict[str, str]]) -> list[tuple[int, str, str, str]]:
    """Return the differences between the ranks and the main rank as (rank, name, its value, the main rank's value)."""
    return [
        (index, name, values.get(name, "nothing"), facts[0].get(name, "nothing"))
        for index, values in enumerate(facts)
        for name in sorted({*values, *facts[0]})
        if values.get(name) != facts[0].get(name)
    ]


def _choose_interface(host: str, port: int) -> None:
    """Select the network interface that leads to the main rank for gloo and nccl. Their default is the interface of
    the host name, which is often the loopback interface or that of a container."""
    name = interface_of(local_address(host, port))
    if name and name != "lo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def local_address(host: str, port: int) -> str | None:
    """Return the address of this machine on the route to `host`, or None. No packet is sent."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def interface_of(address: str | None) -> str | None:
    """Return the name of the network interface that has this IPv4 address, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.family == socket.AF_INET and found.address == address for found in addresses):
            return name
    return None


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without the location in the library's source."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^ \]]*:\d+\] ", "", line).split(". This is typically")[0]
