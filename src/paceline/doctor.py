"""Check whether a run can work on this machine or, under a launcher, on the machines of all ranks.

Each check is a function that returns one `Finding`, or a list if it concerns several things.
"""

import os
import re
import resource
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from shutil import disk_usage
from typing import Any, Literal

import mujoco
import torch
from rich.filesize import decimal

from paceline.device.cpu import usable_cores
from paceline.device.gpus import choose_gpus, driver_version, gpu_count, gpu_uuid
from paceline.device.memory import free_bytes
from paceline.distributed import network_check
from paceline.distributed.group import Group, differences, interface_of, local_address
from paceline.distributed.launcher import main_address, under_launcher
from paceline.distributed.network_check import AllReduceTiming, is_loopback, missing_interfaces
from paceline.distributed.rank import Rank, this_rank
from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import action_spec
from paceline.errors import UserError, counted, one_line
from paceline.process.background import Background
from paceline.run.config import TrainConfig
from paceline.run.directory import RUNS
from paceline.run.versions import versions
from paceline.sim.calibration import measure_capacity
from paceline.sim.simulation import choose_engine
from paceline.tasks import registry
from paceline.training.build import make_env

Status = Literal["ok", "advice", "fails"]

MIN_SHM_BYTES = 2**30
MIN_OPEN_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """Result of one check. If the status is "fails", a run would fail."""

    name: str
    status: Status
    value: str
    remedy: str = ""


def _finding(name: str, value: str, ok: bool = True, remedy: str = "", otherwise: Status = "fails") -> Finding:
    """Return a finding with the status "ok", or with the status `otherwise` and a remedy."""
    return Finding(name, "ok", value) if ok else Finding(name, otherwise, value, remedy)


def examine(
    task: str | None, num_envs: int | None, gpu_ids: tuple[str, ...], engine: str, run_dir: Path | None, timeout: float
) -> list[Finding] | None:
    """Return the findings of all ranks on the main rank, and None on the others. If the ranks do not connect within
    `timeout` seconds, every rank returns its own findings."""
    gpus = choose_gpus(gpu_ids, engine, under_launcher())
    rank = this_rank(gpus)
    engine = choose_engine(engine, rank.device)
    peers = {pair: torch.cuda.can_device_access_peer(*pair) for pair in combinations(range(gpu_count()), 2)}
    shm_bytes = disk_usage("/dev/shm").total if os.path.exists("/dev/shm") else None
    several_gpus = rank.device.type == "cuda" and max(rank.local_size, gpu_count()) > 1
    of_rank = [_finding("device", _describe(rank.device))] if rank.world_size > 1 else []
    of_host = [
        check_cpu(rank),
        *check_gpus(),
        *check_network(rank),
        *([check_peer_access(peers)] if peers else []),
        *([check_shared_memory(shm_bytes, several_gpus)] if shm_bytes is not None else []),
        check_open_files(rank),
        check_run_dir(run_dir, rank),
    ]
    if task:
        sharers = gpus[: rank.local_size].count(gpus[rank.local_index]) if gpus else rank.local_size
        (of_rank if gpus else of_host).append(check_memory(task, num_envs, engine, rank.device, sharers))
    if rank.world_size == 1:
        return [*check_versions(_versions(), engine), check_host_name(timeout), *of_rank, *of_host]

    rendezvous, group = _form_group(rank, timeout)
    own = _with_place([rendezvous, *of_rank], f"rank {rank.index} on {rank.host}")
    if group is None or rank.local_index == 0:
        own += _with_place(of_host, rank.host)
    if group is None:
        return own
    try:
        reports = Background(lambda: _gather_reports(group, own)).result(timeout)
    except Exception as error:  # any error of the collectives is a finding
        return [_finding("all-reduce", _reason(error, timeout), False, "see the network findings of each rank"), *own]
    return None if reports is None else combine_reports(reports, engine)


# Checks of all ranks together


def _form_group(rank: Rank, timeout: float) -> tuple[Finding, Group | None]:
    def failed(value: str, remedy: str) -> tuple[Finding, None]:
        return _finding("rendezvous", value, False, remedy), None

    try:
        host, port = main_address()
    except UserError as error:
        value, _, remedy = str(error).partition(": ")
        return failed(value, remedy)
    deadline = time.monotonic() + timeout
    # The main rank accepts connections only while it forms the group, which may take minutes.
    forming = Background(lambda: Group(rank, timeout))
    try:
        address, seconds = network_check.connect(host, port, deadline)
    except OSError as error:
        remedy = "check that the main rank runs, that the name resolves to its host and that the port is open"
        if rank.world_size > rank.local_size and is_loopback(local_address(host, port)):
            remedy = "the address is this host itself: give --local-addr to the main node's torch.distributed.run"
        return failed(f"{host}:{port} not reached in {timeout:g} s: {error}", remedy)
    value = f"{host}:{port} ({address}) answers in {1000.0 * seconds:.1f} ms"
    store = network_check.register(rank, host, port, deadline)
    try:
        group = forming.result(max(0.0, deadline - time.monotonic()))
    except Exception as error:  # any error while the group is formed is a finding
        missing = _join(network_check.missing_ranks(store, rank.world_size))
        why = f"rank {missing} did not connect in {timeout:g} s" if missing else _reason(error, timeout)
        return failed(f"{value}, but {why}", "see the findings of the other ranks")
    return _finding("rendezvous", f"{value}; {counted(rank.world_size, 'rank')} connected"), group


def _gather_reports(group: Group, own: list[Finding]) -> list[dict[str, Any]] | None:
    """Send each rank's report to the main rank, in plain values, which other versions of Paceline can read."""
    device = group.rank.device
    report = {
        "host": group.rank.host,
        "gpu": gpu_uuid(device) if device.type == "cuda" else "",
        "versions": _versions(),
        "findings": [astuple(finding) for finding in own],
        "all_reduce": tuple(network_check.time_all_reduce(group)),
    }
    reports = group.gather(report)
    group.close()
    return reports


def combine_reports(reports: Sequence[dict[str, Any]], engine: str) -> list[Finding]:
    """Return the findings about all ranks together, followed by those of each rank."""
    hosts, gpus, found, timings = ([r[name] for r in reports] for name in ("host", "gpu", "versions", "all_reduce"))
    return [
        *check_versions(found[0], engine),
        *check_same_versions(found, hosts),
        *check_gpu_sharing(gpus, hosts),
        check_all_reduce([AllReduceTiming(*timing) for timing in timings]),
        *(Finding(*values) for report in reports for values in report["findings"]),
    ]


def check_same_versions(found: Sequence[dict[str, str]], hosts: Sequence[str]) -> list[Finding]:
    remedy = "install the same version on all hosts"
    return [
        _finding(f"{name}, rank {rank} on {hosts[rank]}", f"{value}, but {main} on rank 0, {hosts[0]}", False, remedy)
        for rank, name, value, main in differences(found)
    ]


def check_gpu_sharing(gpus: Sequence[str], hosts: Sequence[str]) -> list[Finding]:
    """Report GPUs that several ranks use, by the UUID and the host of each rank's GPU."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(zip(gpus, hosts, strict=True)):
        ranks.setdefault(place, []).append(rank)
    remedy = "gradients go over gloo; nccl is faster and needs one GPU per rank"
    return [
        _finding("GPU sharing", f"ranks {_join(sharing)} share {gpu} on {host}", False, remedy, "advice")
        for (gpu, host), sharing in ranks.items()
        if gpu and len(sharing) > 1
    ]


def check_all_reduce(timings: Sequence[AllReduceTiming]) -> Finding:
    """Report the speed on the slowest rank and the ranks with wrong sums."""
    latency, bandwidth = max(timing.latency for timing in timings), min(timing.bandwidth for timing in timings)
    wrong = [index for index, timing in enumerate(timings) if not timing.correct]
    sums = f"wrong sums on rank {_join(wrong)}" if wrong else "all sums correct"
    speed = f"{counted(len(timings), 'rank')}: {1e3 * latency:.2f} ms, {bandwidth / 1e9:.2f} GB/s at 4 MiB; {sums}"
    remedy = "the network or the driver corrupts data: compare versions, try NCCL_P2P_DISABLE=1"
    return _finding("all-reduce", f"{timings[0].backend}, {speed}", not wrong, remedy)


# Checks of one host


def check_versions(found: dict[str, str], engine: str) -> list[Finding]:
    if_missing: Status = "fails" if engine == "warp" else "advice" if gpu_count() else "ok"
    remedy = "for GPUs: pip install 'paceline[gpu]'"
    return [_finding(name, value, value != "not installed", remedy, if_missing) for name, value in found.items()]


def check_cpu(rank: Rank) -> Finding:
    cores = usable_cores()
    enough = rank.device.type != "cpu" or rank.local_size <= cores
    value = f"{cores} of {counted(os.cpu_count() or 1, 'core')} usable"
    value += f" by {rank.local_size} ranks" if rank.local_size > 1 else ""
    return _finding("CPU", value, enough, f"ranks share cores: start at most {cores} on this host", "advice")


def check_gpus() -> list[Finding]:
    count, driver = gpu_count(), driver_version()
    if not count and driver != "none":
        value = f"torch {torch.__version__} finds none, but driver {driver}"
        remedy = "install torch for CUDA" if torch.version.cuda is None else "see CUDA_VISIBLE_DEVICES and nvidia-smi"
        return [_finding("GPU", value, False, remedy, "advice")]
    return [_finding(f"GPU {i}", _describe(torch.device("cuda", i))) for i in range(count)]


def check_network(rank: Rank) -> list[Finding]:
    names, findings = [name for _, name in socket.if_nameindex()], []
    if rank.world_size > 1 and (main := os.environ.get("MASTER_ADDR")):
        address = local_address(main, 1)
        interface = interface_of(address)
        route = f"{interface} ({address})" if interface else "no interface with an IPv4 address"
        remedy = f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to one of {_join(names)}"
        findings.append(_finding("network", f"{route} leads to {main}", interface is not None, remedy, "advice"))
    remedy = f"no such interface: unset it, or choose from {_join(names)}"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if value := os.environ.get(variable):
            findings.append(_finding(variable, value, not missing_interfaces(variable, value, names), remedy))
    return findings


def check_host_name(timeout: float) -> Finding:
    """Check that other nodes could connect to this host by its name, if it were the main node."""
    name = socket.gethostname()
    try:
        resolved = Background(lambda: socket.getaddrinfo(name, None)).result(timeout)
        addresses = sorted({str(entry[4][0]) for entry in resolved})
        found, reachable = f"is {_join(addresses)}", not all(map(is_loopback, addresses))
    except (OSError, UnicodeError) as error:
        found, reachable = f"does not resolve: {_reason(error, timeout)}", False
    # 192.0.2.1 is reserved for documentation; the route to it is the default route.
    own = local_address("192.0.2.1", 1)
    remedy = f"other hosts cannot reach that: for several nodes give torch.distributed.run --local-addr {own}"
    return _finding("rendezvous", f"not needed by one rank; {name} {found}", reachable, remedy, "advice")


def check_peer_access(access: Mapping[tuple[int, int], bool]) -> Finding:
    """Check that all pairs of GPUs can access each other's memory."""
    without = [f"{a}-{b}" for (a, b), possible in access.items() if not possible]
    value = f"not between GPUs {_join(without)}" if without else "between all GPUs"
    return _finding("GPU peer access", value, not without, "if NCCL hangs, set NCCL_P2P_DISABLE=1", "advice")


def check_shared_memory(total_bytes: int, several_gpus: bool) -> Finding:
    """Check the size of /dev/shm."""
    enough = total_bytes >= MIN_SHM_BYTES or not several_gpus
    remedy = "NCCL exchanges data between GPUs through it: docker run --shm-size=1g, or NCCL_SHM_DISABLE=1"
    return _finding("/dev/shm", decimal(total_bytes), enough, remedy, "advice")


def check_open_files(rank: Rank) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = limit == resource.RLIM_INFINITY
    enough = rank.world_size == 1 or unlimited or limit >= MIN_OPEN_FILES
    return _finding("open files", "no limit" if unlimited else f"at most {limit}", enough, "ulimit -n 4096", "advice")


def check_run_dir(run_dir: Path | None, rank: Rank) -> Finding:
    """Write a temporary file. Hosts without the main rank write only logs of ranks."""
    path = (run_dir or RUNS).absolute()
    nearest = next(p for p in (path, *path.parents) if os.path.exists(p))
    started = time.perf_counter()
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".doctor_") as file:
            file.write(b"paceline")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy, otherwise = "choose another --run-dir, or change its permissions", "fails"
        if rank.index != rank.local_index:
            remedy, otherwise = "choose another directory for logs: --worker-log-dir", "advice"
        return _finding("run directory", f"cannot write in {nearest}: {error.strerror}", False, remedy, otherwise)
    milliseconds, free = 1000.0 * (time.perf_counter() - started), decimal(disk_usage(nearest).free)
    return _finding("run directory", f"wrote in {nearest} in {milliseconds:.1f} ms, {free} free")


def check_memory(task: str, num_envs: int | None, engine: str, device: torch.device, sharers: int) -> Finding:
    """Check that the envs of `sharers` ranks fit into the memory of one host or GPU."""
    entry = registry.find(task)
    num_envs = num_envs or (entry.gpu_envs if device.type == "cuda" else entry.cpu_envs)
    # Measured for two small numbers of envs and extrapolated linearly.
    small, large = min_bytes(task, 16, engine), min_bytes(task, 64, engine)
    per_env = (large - small) / (64 - 16)
    return check_fit(num_envs, small - 16 * per_env, per_env, free_bytes(device), sharers)


def check_fit(num_envs: int, fixed: float, per_env: float, free: int, sharers: int) -> Finding:
    """Compare `free` bytes with those of `sharers` ranks, each of which needs `fixed + num_envs * per_env`."""
    needed, ranks = sharers * (fixed + num_envs * per_env), f" on each of {sharers} ranks" if sharers > 1 else ""
    value = f"at least {decimal(int(needed))} for {counted(num_envs, 'env')}{ranks}; {decimal(free)} are free"
    largest = int((free / sharers - fixed) // per_env)
    remedy = f"at most --num-envs {largest}" if largest > 0 else "not one env fits: free some memory"
    return _finding("memory", value, needed <= free, remedy)


def min_bytes(task: str, num_envs: int, engine: str) -> int:
    """Return a lower bound of the memory that training needs, in bytes.

    It contains the state of the envs, the arrays of the engine, one rollout, and the input and output of the widest
    layer when the critic evaluates the whole rollout. It does not contain parameters, further copies, compiled code and
    the memory of the libraries.
    """
    env, training = make_env(TrainConfig(task, {}), Rank(), range(num_envs)), registry.find(task).training
    env.reset()
    actions = action_spec(env)
    step = env.step(actions.zeros(num_envs, env.device))
    tensors = (*step.obs.values(), *step.final_obs.values(), step.reward, step.terminated, step.truncated, step.log)
    step_bytes = sum(tensor.nbytes for tensor in tensors)
    # Floats in addition to the env's outputs: actions, outputs of the actor, noise, and the layers for `obs` and
    # `final_obs`.
    step_bytes += 4 * num_envs * (3 * actions.num_outputs + 2 * 2 * max(training.hidden_layers))
    state_bytes = sum(tensor.nbytes for tensor in env.state().values())
    engine_bytes = _warp_bytes(env.sim.model, num_envs) if engine == "warp" and isinstance(env, RobotEnv) else 0
    return state_bytes + engine_bytes + training.horizon * step_bytes


def _warp_bytes(model: mujoco.MjModel, num_envs: int) -> int:
    """Return the bytes that MuJoCo Warp allocates. Measured on the CPU, where the sizes are the same and no kernel is
    compiled."""
    if not find_spec("mujoco_warp"):
        return 0
    import mujoco_warp
    import warp

    def capacity(value: Any) -> int:
        if is_dataclass(value):
            return sum(capacity(getattr(value, field.name)) for field in fields(value))
        return value.capacity if isinstance(value, warp.array) else 0

    allocated = measure_capacity(model)
    warp.config.log_level = warp.LOG_ERROR
    with warp.ScopedDevice("cpu"):
        return capacity(mujoco_warp.make_data(model, num_envs, nconmax=allocated.contacts, njmax=allocated.constraints))


# Descriptions


def _versions() -> dict[str, str]:
    found = versions()
    found |= {name: found.get(name, "not installed") for name in ("mujoco-warp", "warp-lang")}
    return found | {"torch's CUDA": torch.version.cuda or "none", "NVIDIA driver": driver_version()}


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return f"{device}, {properties.name}, {decimal(properties.total_memory)}, {gpu_uuid(device)}"


def _reason(error: Exception, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {timeout:g} s"
    # Messages of gloo begin with a position in its source code.
    return re.sub(r"\[enforce fail at [^]]*\] ?", "", one_line(error))


def _with_place(findings: Iterable[Finding], place: str) -> list[Finding]:
    return [replace(finding, name=f"{finding.name}, {place}") for finding in findings]


def _join(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))
