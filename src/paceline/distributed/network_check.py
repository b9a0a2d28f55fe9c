"""Measure the connection between ranks: reach the main rank, name the ranks that are missing, time collectives."""

import socket
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from ipaddress import ip_address
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank


class AllReduceTiming(NamedTuple):
    """Result of `time_all_reduce` on one rank."""

    backend: str
    latency: float
    """Mean time to sum one number, seconds."""
    large_bytes: int
    """Size of the large message."""
    large_seconds: float
    """Mean time to sum the large message."""
    correct: bool
    """True if all sums were correct."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the large message."""
        return self.large_bytes / self.large_seconds


def time_all_reduce(group: Group, large_bytes: int = 4 * 2**20) -> AllReduceTiming:
    """Time the sum of one number and of a message of `large_bytes` over all ranks, and compare the sums with the
    expected values."""
    # The sums of small integers are exact. They vary over the tensor, so that a misplaced part is detected.
    ramp = torch.arange(max(2, large_bytes // 4), device=group.rank.device).remainder(7).float()
    correct = True

    def seconds(numbers: Tensor) -> float:
        nonlocal correct
        tensor = numbers * (group.rank.index + 1)
        tensor[0].item()  # synchronizes with the device
        started = time.perf_counter()
        group.sum_(tensor)[0].item()
        elapsed = time.perf_counter() - started
        correct &= torch.equal(tensor, numbers * (group.size * (group.size + 1) // 2))
        return elapsed

    def mean_seconds(numbers: Tensor, calls: int) -> float:
        # The first calls set up connections and are not counted. A mean, because training waits for the slow ones, too.
        return statistics.fmean([seconds(numbers) for _ in range(3 + calls)][3:])

    latency = mean_seconds(ramp[1:2], 40)
    large_seconds = mean_seconds(ramp, 40 if ramp.nbytes < 2**20 else 10)
    return AllReduceTiming(group.backend, latency, ramp.nbytes, large_seconds, correct)


def connect(host: str, port: int, deadline: float) -> tuple[str, float]:
    """Connect to a port and return the address of the host and the time it took, seconds. Retry until the deadline,
    then raise OSError."""
    while True:
        started = time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - started)) as connection:
                return str(connection.getpeername()[0]), time.monotonic() - started
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.1)


def register(rank: Rank, host: str, port: int, deadline: float) -> Store | None:
    """Write this rank to the store of the main rank, for `missing_ranks`. Return the store, or None on failure."""
    try:
        timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store = dist.TCPStore(host, port, wait_for_workers=False, timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
        store.set(f"doctor/{rank.index}", rank.host)
        return store
    except RuntimeError:
        return None


def missing_ranks(store: Store | None, world_size: int) -> list[int]:
    """Return the ranks that have not registered; an empty list if the store cannot be read."""
    try:
        return [index for index in range(world_size) if store and not store.check([f"doctor/{index}"])]
    except RuntimeError:
        return []


def is_loopback(address: str | None) -> bool:
    return address is not None and ip_address(address).is_loopback


def missing_interfaces(variable: str, value: str, names: Sequence[str]) -> list[str]:
    """Return the interfaces in the value of a variable that do not exist. Gloo takes names and needs all of them. NCCL
    takes prefixes, of which one must match; exact names after "="; excluded prefixes after "^"."""
    wanted = [interface for interface in value.removeprefix("=").split(",") if interface]
    if variable.startswith("GLOO"):
        return [interface for interface in wanted if interface not in names]
    matches = str.__eq__ if value.startswith("=") else str.startswith
    found = value.startswith("^") or any(matches(name, interface) for name in names for interface in wanted)
    return [] if found else wanted
