"""Preflight: is this machine, or under a launcher every rank's, fit for a run? All that it says was measured."""

import json
import os
import re
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, astuple, dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from itertools import combinations
from pathlib import Path
from shutil import disk_usage
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from paceline.device.cpu import usable_cores
from paceline.device.gpus import choose_gpus, gpu_uuid
from paceline.device.memory import free_host_bytes
from paceline.distributed.group import Group, differences, interface_of, local_address
from paceline.distributed.rank import Rank, main_address, this_rank, under_launcher
from paceline.errors import UserError
from paceline.memory_estimate import min_bytes
from paceline.run.directory import RUNS
from paceline.run.versions import versions
from paceline.sim.simulation import choose_engine
from paceline.tasks import registry
from paceline.tasks.registry import Entry
from paceline.validation import above_zero, at_least_one

T = TypeVar("T")
Status = Literal["ok", "advice", "fails"]

# What a task takes is measured in so many worlds, and follows a straight line from there.
SAMPLE_WORLDS = (16, 64)
SMALLEST_SHM_BYTES = 2**30
FEWEST_OPEN_FILES = 1024
LARGE_SUM_BYTES = 4 * 2**20
_STYLES: dict[Status, str] = {"ok": "green", "advice": "yellow", "fails": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; where it `fails`, so would a run."""

    name: str
    status: Status
    value: str
    remedy: str = ""


def examine(
    task: str | None,
    num_envs: int | None,
    gpu_ids: tuple[str, ...],
    engine: str,
    run_dir: Path | None,
    timeout_seconds: float,
) -> list[Finding] | None:
    """All ranks' findings on the main rank, and None on the others. If the ranks do not come together within
    `timeout_seconds`, nobody can collect them, so every rank returns its own."""
    above_zero("--timeout", timeout_seconds)
    gpus = choose_gpus(gpu_ids, engine, under_launcher())
    rank = this_rank(gpus)
    engine, alone = choose_engine(engine, rank.device), rank.world_size == 1
    entry = registry.find(task) if task else None

    of_rank = [] if alone else [Finding("device", "ok", _describe(rank.device))]
    of_host = [*_devices(rank), *_network(rank), *_transport(rank), _open_files(rank), _run_dir(run_dir, rank)]
    if entry:
        sharers = gpus[: rank.local_size].count(gpus[rank.local_index]) if gpus else rank.local_size
        (of_rank if gpus else of_host).append(_memory_fit(entry, num_envs, engine, rank.device, sharers))
    if alone:
        return [*_version_findings(_versions(), engine), _host_name(timeout_seconds), *of_rank, *of_host]

    meeting, group = _meet(rank, timeout_seconds)
    own = _placed([meeting, *of_rank], f"rank {rank.index} on {rank.host}")
    if group is None or rank.local_index == 0:
        own += _placed(of_host, rank.host)
    if group is None:
        return own
    try:
        reports = _aside(lambda: _exchange(group, own)).result(timeout_seconds)
    except Exception as error:
        # Whatever happened to the ranks' sums is what was to be found out.
        return [Finding("all-reduce", "fails", _why(error, timeout_seconds), "see the network of each rank"), *own]
    return None if reports is None else _judge(reports, engine)


def table(findings: Iterable[Finding]) -> Table:
    """For people; a remedy stands under what it mends."""
    drawn = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    drawn.add_column("")
    drawn.add_column("check", max_width=26, overflow="fold")
    drawn.add_column("found", overflow="fold")
    for finding in findings:
        remedy = Text(f"\n{finding.remedy}" if finding.remedy else "", style="italic")
        status = Text(finding.status, style=_STYLES[finding.status])
        drawn.add_row(status, Text(finding.name), Text(finding.value) + remedy)
    return drawn


def as_json(findings: Iterable[Finding]) -> str:
    found = [asdict(finding) for finding in findings]
    return json.dumps({"ok": all(f["status"] != "fails" for f in found), "findings": found}, indent=2)


# All ranks together


def _meet(rank: Rank, seconds: float) -> tuple[Finding, Group | None]:
    try:
        host, port = main_address()
    except UserError as error:
        value, _, remedy = str(error).partition(": ")
        return Finding("rendezvous", "fails", value, remedy), None
    deadline = time.monotonic() + seconds
    # Aside, because the main rank listens only while it waits for the others, which may be for minutes.
    meeting = _aside(lambda: Group(rank, seconds))
    reached = _reach(host, port, deadline)
    if isinstance(reached, OSError):
        remedy = "is the main rank up, does the name lead to its host, is the port open?"
        if rank.world_size > rank.local_size and _is_loopback(local_address(host, port)):
            remedy = "it leads to this host itself: give the main rank's torch.distributed.run --local-addr"
        return Finding("rendezvous", "fails", f"{host}:{port} not reached in {seconds:g} s: {reached}", remedy), None
    answer = f"{host}:{port} ({reached[0]}) answers in {1000.0 * reached[1]:.1f} ms"
    store = _sign_in(rank, host, port, deadline)
    try:
        group = meeting.result(max(0.0, deadline - time.monotonic()))
    except Exception as error:
        # However the ranks missed each other, it is what was to be found out.
        missing = _missing(store, rank.world_size)
        why = f"rank {_join(missing)} did not come in {seconds:g} s" if missing else _why(error, seconds)
        return Finding("rendezvous", "fails", f"{answer}, but {why}", "see the findings of the other ranks"), None
    return Finding("rendezvous", "ok", f"{answer}; {rank.world_size} ranks met"), group


def _reach(host: str, port: int, deadline: float) -> tuple[str, float] | OSError:
    """The address behind `host` and the seconds that connecting took; tried until the deadline."""
    while True:
        started = time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - started)) as link:
                return str(link.getpeername()[0]), time.monotonic() - started
        except OSError as error:
            if time.monotonic() >= deadline:
                return error
        time.sleep(0.1)


def _sign_in(rank: Rank, host: str, port: int, deadline: float) -> Store | None:
    """Leave a mark at the rendezvous, by which a rank that never comes can be named."""
    try:
        patience = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store = dist.TCPStore(host, port, wait_for_workers=False, timeout=patience)  # pyright: ignore[reportPrivateImportUsage]
        store.set(f"doctor/{rank.index}", rank.host)
    except RuntimeError:
        return None
    return store


def _missing(store: Store | None, size: int) -> list[int]:
    try:
        return [index for index in range(size) if store and not store.check([f"doctor/{index}"])]
    except RuntimeError:
        return []


def _exchange(group: Group, own: list[Finding]) -> list[dict[str, Any]] | None:
    """Each rank's report in plain values, which a rank of another version can read too."""
    latency, bandwidth, right = _sum_test(group)
    reports = group.gather(
        {
            "host": group.rank.host,
            "gpu": gpu_uuid(group.rank.device) if group.rank.device.type == "cuda" else "",
            "versions": _versions(),
            "findings": [astuple(finding) for finding in own],
            "sums": {"backend": group.backend, "latency": latency, "bandwidth": bandwidth, "right": right},
        }
    )
    group.close()
    return reports


def _sum_test(group: Group) -> tuple[float, float, bool]:
    """Seconds for one number, bytes per second for many, and whether all sums were right."""
    device, size = group.rank.device, group.size
    # Small whole numbers, whose sum is exact, and not the same everywhere, lest a misplaced part go unseen.
    ramp = torch.arange(LARGE_SUM_BYTES // 4, device=device).remainder(7).float()
    right = True

    def seconds(numbers: Tensor) -> float:
        nonlocal right
        mine = numbers * (group.rank.index + 1)
        mine[0].item()  # waits for the device, as the comparison below does
        started = time.perf_counter()
        group.sum_(mine)[0].item()
        elapsed = time.perf_counter() - started
        right &= torch.equal(mine, numbers * (size * (size + 1) // 2))
        return elapsed

    # The first ones set up connections.
    latency = statistics.median([seconds(ramp[1:2]) for _ in range(23)][3:])
    return latency, LARGE_SUM_BYTES / statistics.median([seconds(ramp) for _ in range(6)][1:]), right


def _judge(reports: Sequence[dict[str, Any]], engine: str) -> list[Finding]:
    """What only all ranks together show, and then what each of them found."""
    hosts, gpus = [report["host"] for report in reports], [(report["gpu"], report["host"]) for report in reports]
    found = _version_findings(reports[0]["versions"], engine)
    found += _version_differences([report["versions"] for report in reports], hosts)
    for (gpu, host), sharers in Counter(gpus).items():
        if gpu and sharers > 1:
            ranks = _join(index for index, its in enumerate(gpus) if its == (gpu, host))
            value = f"ranks {ranks} share {gpu} on {host}, so {reports[0]['sums']['backend']} carries the sums"
            found.append(Finding("GPU sharing", "advice", value, "one rank per GPU lets nccl carry them, faster"))
    found.append(_sums([report["sums"] for report in reports]))
    return found + [Finding(*values) for report in reports for values in report["findings"]]


def _sums(of_ranks: Sequence[dict[str, Any]]) -> Finding:
    """As the slowest rank saw them."""
    milliseconds = 1000.0 * max(its["latency"] for its in of_ranks)
    gigabytes = min(its["bandwidth"] for its in of_ranks) / 1e9
    wrong = [index for index, its in enumerate(of_ranks) if not its["right"]]
    judged = f"wrong sums on rank {_join(wrong)}" if wrong else "sums right"
    speed = f"{of_ranks[0]['backend']}, {len(of_ranks)} ranks: {milliseconds:.2f} ms, {gigabytes:.2f} GB/s at 4 MiB"
    remedy = "network or driver damage data: compare versions, try NCCL_P2P_DISABLE=1"
    return _checked("all-reduce", f"{speed}; {judged}", remedy, not wrong, "fails")


def _versions() -> dict[str, str]:
    found = versions()
    found |= {name: found.get(name, "not installed") for name in ("mujoco-warp", "warp-lang")}
    return found | {"torch's CUDA": torch.version.cuda or "none", "NVIDIA driver": _driver()}


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    number = re.search(r"\d+\.\d[.\d]*", file.read_text()) if file.exists() else None
    return number[0] if number else "none"


def _version_findings(found: dict[str, str], engine: str) -> list[Finding]:
    otherwise: Status = "fails" if engine == "warp" else "advice" if _gpu_count() else "ok"
    remedy = "for GPUs: pip install 'paceline[gpu]'"
    return [_checked(name, value, remedy, value != "not installed", otherwise) for name, value in found.items()]


def _version_differences(found: Sequence[dict[str, str]], hosts: Sequence[str]) -> list[Finding]:
    remedy = "install the same on all hosts"
    return [
        Finding(f"{name}, rank {rank} on {hosts[rank]}", "fails", f"{theirs}, but {main} on rank 0, {hosts[0]}", remedy)
        for rank, name, theirs, main in differences(found)
    ]


# One host


def _devices(rank: Rank) -> list[Finding]:
    cores, count, driver = usable_cores(), _gpu_count(), _driver()
    taken_in_turns = rank.device.type == "cpu" and rank.local_size > cores
    value = f"{cores} of {os.cpu_count()} cores usable" + f" by {rank.local_size} ranks" * (rank.local_size > 1)
    found = [_checked("CPU", value, f"ranks take turns: start {cores} on this host", not taken_in_turns)]
    if not count and driver != "none":
        remedy = "install torch for CUDA" if torch.version.cuda is None else "see CUDA_VISIBLE_DEVICES and nvidia-smi"
        found.append(Finding("GPU", "advice", f"torch {torch.__version__} sees none, but driver {driver}", remedy))
    return found + [Finding(f"GPU {i}", "ok", _describe(torch.device("cuda", i))) for i in range(count)]


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    its = torch.cuda.get_device_properties(device)
    return f"{device}, {its.name}, {_size(its.total_memory)}, {gpu_uuid(device)}"


def _transport(rank: Rank) -> list[Finding]:
    pairs = list(combinations(range(_gpu_count()), 2))
    found = [_peer_access({pair: torch.cuda.can_device_access_peer(*pair) for pair in pairs})] if pairs else []
    if os.path.exists("/dev/shm"):
        shm = os.statvfs("/dev/shm")
        several_gpus = rank.device.type == "cuda" and (rank.local_size > 1 or bool(pairs))
        found.append(_shared_memory(shm.f_blocks * shm.f_frsize, several_gpus))
    return found


def _peer_access(reaches: dict[tuple[int, int], bool]) -> Finding:
    without = [f"{a}-{b}" for (a, b), there in reaches.items() if not there]
    value = f"not between GPUs {_join(without)}" if without else f"all {len(reaches)} pairs"
    return _checked("GPU peer access", value, "where NCCL hangs, set NCCL_P2P_DISABLE=1", not without)


def _shared_memory(total_bytes: int, several_gpus: bool) -> Finding:
    remedy = "NCCL passes data between GPUs through it: docker run --shm-size=1g, or NCCL_SHM_DISABLE=1"
    return _checked("/dev/shm", _size(total_bytes), remedy, total_bytes >= SMALLEST_SHM_BYTES or not several_gpus)


def _network(rank: Rank) -> list[Finding]:
    names, found = [name for _, name in socket.if_nameindex()], []
    if rank.world_size > 1 and (main := os.environ.get("MASTER_ADDR")):
        address = local_address(main, 1)
        interface = interface_of(address) if address else None
        through = f"{interface} ({address})" if interface else "no interface with an IPv4 address"
        remedy = f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to one of {_join(names)}"
        found.append(_checked("network", f"{through} leads to {main}", remedy, interface is not None))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if asked := os.environ.get(variable):
            there, remedy = not _absent(variable, asked, names), f"no such interface: unset it, or take {_join(names)}"
            found.append(_checked(variable, asked, remedy, there, "fails"))
    return found


def _absent(variable: str, asked: str, names: Sequence[str]) -> list[str]:
    """Interfaces that are asked for and not there. Gloo takes names and needs them all; NCCL takes beginnings of names,
    one of which is enough, whole names after "=" and those to leave out after "^"."""
    words = [word for word in asked.removeprefix("=").split(",") if word]
    if variable.startswith("GLOO"):
        return [word for word in words if word not in names]
    fits = str.__eq__ if asked.startswith("=") else str.startswith
    there = asked.startswith("^") or any(fits(name, word) for name in names for word in words)
    return [] if there else words


def _host_name(seconds: float) -> Finding:
    """What other nodes would connect to, if this one were the first of several."""
    name, addresses = socket.gethostname(), []
    # An address for documentation stands for anywhere else.
    own = local_address("192.0.2.1", 1)
    remedy = f"no other host can reach that: for several nodes torch.distributed.run needs --local-addr {own}"
    try:
        places = _aside(lambda: socket.getaddrinfo(name, None)).result(seconds)
        addresses = sorted({str(place[4][0]) for place in places})
        said = f"not needed by one rank; {name} is {_join(addresses)}"
    except (OSError, UnicodeError) as error:
        said = f"not needed by one rank; {name} does not resolve: {_why(error, seconds)}"
    return _checked("rendezvous", said, remedy, not all(map(_is_loopback, addresses)))


def _is_loopback(address: str | None) -> bool:
    return address is not None and ip_address(address.partition("%")[0]).is_loopback


def _open_files(rank: Rank) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = rank.world_size == 1 or limit >= FEWEST_OPEN_FILES or limit == resource.RLIM_INFINITY
    return _checked("open files", f"at most {limit}" if limit >= 0 else "no limit", "ulimit -n 4096", enough)


def _run_dir(run_dir: Path | None, rank: Rank) -> Finding:
    """Nothing is left behind. Hosts without the main rank write no more than workers' logs there."""
    path = (run_dir or RUNS).absolute()
    nearest = next(p for p in (path, *path.parents) if os.path.exists(p))
    started = time.perf_counter()
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".doctor_") as file:
            file.write(b"paceline")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        value = f"cannot write in {nearest}: {error.strerror}"
        if rank.index == rank.local_index:
            return Finding("run directory", "fails", value, "choose another --run-dir, or mend its permissions")
        return Finding("run directory", "advice", value, "choose another place for workers' logs: --worker-log-dir")
    milliseconds, free = 1000.0 * (time.perf_counter() - started), _size(disk_usage(nearest).free)
    return Finding("run directory", "ok", f"wrote in {nearest} in {milliseconds:.1f} ms, {free} free")


# Memory


def _memory_fit(entry: Entry, num_envs: int | None, engine: str, device: torch.device, sharers: int) -> Finding:
    """For `sharers` ranks in one memory: a host's, or a GPU's."""
    on_gpu = device.type == "cuda"
    worlds = num_envs if num_envs is not None else entry.gpu_envs if on_gpu else entry.cpu_envs
    at_least_one("--num-envs", worlds)
    few, many = SAMPLE_WORLDS
    small, large = min_bytes(entry, few, engine), min_bytes(entry, many, engine)
    per_world = (large - small) / (many - few)
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_host_bytes()
    return _fit(worlds, small - few * per_world, per_world, free, sharers)


def _fit(worlds: int, fixed: float, per_world: float, free: int, sharers: int) -> Finding:
    """Sizes in bytes; each of the sharers takes `fixed + worlds * per_world`."""
    taken, ranks = sharers * (fixed + worlds * per_world), f" for each of {sharers} ranks" if sharers > 1 else ""
    value = f"{worlds} worlds{ranks} take at least {_size(taken)}; {_size(free)} are free"
    largest = int((free / sharers - fixed) // per_world)
    remedy = f"at most --num-envs {largest}" if largest > 0 else "not one world fits: free some memory"
    return _checked("memory", value, remedy, taken <= free, "fails")


# Words, and waiting


def _aside(work: Callable[[], T]) -> "Future[T]":
    """Run what may never end in a thread that nobody waits for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="doctor").start()
    return future


def _checked(name: str, value: str, remedy: str, good: bool, otherwise: Status = "advice") -> Finding:
    return Finding(name, "ok", value) if good else Finding(name, otherwise, value, remedy)


def _why(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no end after {seconds:g} s"
    # Gloo begins with the place in its source.
    words = re.sub(r"\[enforce fail at [^]]*\] ?", "", str(error)).strip()
    return (words or type(error).__name__).splitlines()[0]


def _placed(findings: Iterable[Finding], place: str) -> list[Finding]:
    return [replace(finding, name=f"{finding.name}, {place}") for finding in findings]


def _join(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024.0:
            return f"{count:.4g} {unit}"
        count /= 1024.0
    return f"{count:,.1f} GiB"
