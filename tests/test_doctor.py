"""Checks of `paceline doctor`, in this process and with real ranks over gloo."""

import io
import json
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline import doctor
from paceline.cli.commands import as_json, as_table
from paceline.distributed.network_check import missing_interfaces
from paceline.distributed.rank import Rank
from paceline.doctor import Finding, examine, min_bytes
from paceline.errors import UserError
from tests.distributed.ranks import free_port, variables
from tests.forked import paceline


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*variables(0, 1, 0), "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name != "OMP_NUM_THREADS":
            monkeypatch.delenv(name, raising=False)


def single_process(place: Path, task: str | None = None, num_envs: int | None = None) -> dict[str, Finding]:
    """Return the findings of a single process by name."""
    findings = examine(task, num_envs, ("none",), "auto", place, 5.0)
    assert findings is not None
    found = {finding.name: finding for finding in findings}
    assert len(found) == len(findings), "a name occurs twice"
    return found


def on_ranks(place: Path, environments: Sequence[dict[str, str]], seconds: float = 30.0) -> list[dict[str, Any] | None]:
    """Return what `paceline doctor --json` prints on each rank, None for nothing. All processes end within a minute."""
    options = ("--task", "cartpole", "--num-envs", 64, "--gpu-ids", "none", "--run-dir", "run", "--timeout", seconds)

    def run(environment: dict[str, str]) -> dict[str, Any] | None:
        done = paceline("doctor", *options, "--json", cwd=place, **environment)
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout) if done.stdout else None

    with ThreadPoolExecutor(len(environments)) as threads:
        return list(threads.map(run, environments))


def two_ranks(**second: str) -> list[dict[str, str]]:
    """Return the environment variables of two ranks, with additional ones for the second."""
    port = free_port()
    return [variables(0, 2, port), variables(1, 2, port) | second]


def statuses(report: dict[str, Any] | None) -> dict[str, str]:
    assert report is not None
    return {finding["name"].split(",")[0]: finding["status"] for finding in report["findings"]}


def the(report: dict[str, Any] | None, beginning: str) -> dict[str, str]:
    assert report is not None
    return next(finding for finding in report["findings"] if finding["name"].startswith(beginning))


def test_a_single_process_finds_no_failure_and_leaves_no_files(tmp_path: Path):
    found = single_process(tmp_path / "new" / "run")
    assert {"python", "paceline", "torch", "mujoco", "CPU", "rendezvous", "open files", "run directory"} <= set(found)
    assert found["torch"].value == torch.__version__
    assert found["rendezvous"].value.startswith("not needed")
    assert not [finding for finding in found.values() if finding.status == "fails"]
    assert "memory" not in found
    assert not list(tmp_path.iterdir())


def test_a_launcher_with_one_rank_equals_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in variables(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    assert single_process(tmp_path)["rendezvous"].value.startswith("not needed")


def test_an_unknown_task_is_an_error_and_not_a_finding(tmp_path: Path):
    with pytest.raises(UserError, match="cartpole"):
        single_process(tmp_path, "cartpol")


def test_too_many_envs_for_the_memory_fail_and_the_number_that_fits_is_named(tmp_path: Path):
    memory = single_process(tmp_path, "cartpole", 2**24)["memory"]
    assert memory.status == "fails"
    assert "at least" in memory.value
    fitting = int(memory.remedy.split()[-1])
    assert 0 < fitting < 2**24
    # Other processes may allocate memory in the meantime.
    assert single_process(tmp_path, "cartpole", fitting // 2)["memory"].status == "ok"


def test_each_rank_that_shares_a_memory_needs_its_part():
    assert doctor.check_fit(10, 100.0, 10.0, free=400, sharers=2).status == "ok"
    tight = doctor.check_fit(11, 100.0, 10.0, free=400, sharers=2)
    assert (tight.status, tight.remedy) == ("fails", "at most --num-envs 10")
    assert "not one" in doctor.check_fit(1, 100.0, 10.0, free=50, sharers=1).remedy


def test_on_warp_the_arrays_of_the_engine_count():
    assert min_bytes("cartpole", 16, "warp") > min_bytes("cartpole", 16, "mujoco") + 16 * 1000


def test_a_run_directory_that_cannot_be_created_fails(tmp_path: Path):
    (tmp_path / "file").touch()
    found = single_process(tmp_path / "file" / "run")["run directory"]
    assert found.status == "fails"
    assert "Not a directory" in found.value
    assert "--run-dir" in found.remedy


def test_an_unwritable_directory_is_only_advice_on_a_host_that_writes_logs(tmp_path: Path):
    (tmp_path / "file").touch()
    elsewhere = Rank(index=4, world_size=8, local_index=0, local_size=4)
    assert doctor.check_run_dir(tmp_path / "file" / "run", elsewhere).status == "advice"


def test_a_host_name_that_only_this_host_can_reach_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    found = single_process(tmp_path)["rendezvous"]
    assert found.status == "advice"
    assert "--local-addr" in found.remedy


def test_a_host_name_that_does_not_resolve_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    found = single_process(tmp_path)["rendezvous"]
    assert found.status == "advice"
    assert "does not resolve" in found.value


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_does_not_exist_fails_and_the_existing_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
):
    monkeypatch.setenv(variable, "lo")
    assert single_process(tmp_path)[variable].status == "ok"
    monkeypatch.setenv(variable, "nosuch0")
    found = single_process(tmp_path)[variable]
    assert (found.status, found.value) == ("fails", "nosuch0")
    assert "lo" in found.remedy


def test_interface_variables_follow_the_rules_of_gloo_and_nccl():
    here = ["lo", "eth0"]
    for value in ("eth", "ib,eth", "=eth0", "^docker"):
        assert not missing_interfaces("NCCL_SOCKET_IFNAME", value, here), value
    assert missing_interfaces("NCCL_SOCKET_IFNAME", "=eth", here) == ["eth"]
    assert missing_interfaces("GLOO_SOCKET_IFNAME", "eth0,ib0", here) == ["ib0"]


def test_a_low_limit_of_open_files_is_advice_for_several_ranks():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert doctor.check_open_files(Rank(world_size=2)).status == "advice"
        assert doctor.check_open_files(Rank()) == Finding("open files", "ok", "at most 512")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_small_shared_memory_and_missing_peer_access_are_advice():
    assert doctor.check_shared_memory(2**26, several_gpus=True).status == "advice"
    assert doctor.check_shared_memory(2**26, several_gpus=False).status == "ok"
    assert doctor.check_shared_memory(2**30, several_gpus=True).status == "ok"
    assert doctor.check_peer_access({(0, 1): True}).status == "ok"
    without = doctor.check_peer_access({(0, 1): True, (0, 2): False})
    assert (without.status, without.value) == ("advice", "not between GPUs 0-2")


def test_ranks_that_share_a_gpu_and_a_wrong_sum_are_named():
    def report(host: str, gpu: str, correct: bool) -> dict[str, Any]:
        all_reduce = ("gloo", 0.001, 4 * 2**20, 0.004, correct)
        return {"host": host, "gpu": gpu, "versions": {}, "findings": [], "all_reduce": all_reduce}

    reports = [report("a", "GPU-1", True), report("b", "GPU-1", True), report("b", "GPU-1", False)]
    sharing, sums = doctor.combine_reports(reports, "warp")
    assert sharing.status == "advice"
    assert sharing.value.startswith("ranks 1, 2 share GPU-1 on b")
    assert sums.status == "fails"
    assert sums.value.endswith("wrong sums on rank 2")


def test_two_ranks_connect_and_the_main_rank_reports_both(tmp_path: Path):
    main, other = on_ranks(tmp_path, two_ranks())
    assert other is None
    assert main is not None
    assert main["ok"]
    assert the(main, "all-reduce")["value"].startswith("gloo, 2 ranks: ")
    assert the(main, "all-reduce")["value"].endswith("all sums correct")
    host = the(main, "device, rank 0 on ")["name"].removeprefix("device, rank 0 on ")
    assert the(main, f"device, rank 1 on {host}")["value"] == "cpu"
    assert "2 ranks connected" in the(main, f"rendezvous, rank 1 on {host}")["value"]
    assert "127.0.0.1" in the(main, f"network, {host}")["value"]
    assert "on each of 2 ranks" in the(main, "memory")["value"]
    assert not (tmp_path / "run").exists()


def test_ranks_of_different_versions_fail_and_are_named(tmp_path: Path):
    older = tmp_path / "older" / "mujoco-3.9.9.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: mujoco\nVersion: 3.9.9\n")
    path = os.pathsep.join((str(older.parent), os.environ.get("PYTHONPATH", "")))
    main, _ = on_ranks(tmp_path, two_ranks(PYTHONPATH=path))
    assert main is not None
    assert not main["ok"]
    different = the(main, "mujoco, rank 1 on ")
    assert different["status"] == "fails"
    assert different["value"].startswith(f"3.9.9, but {version('mujoco')} on rank 0")


def test_a_wrong_interface_is_reported_by_its_rank_and_no_rank_hangs(tmp_path: Path):
    started = time.monotonic()
    main, other = on_ranks(tmp_path, two_ranks(GLOO_SOCKET_IFNAME="nosuch0"), seconds=5.0)
    assert time.monotonic() - started < 40.0
    assert statuses(other)["GLOO_SOCKET_IFNAME"] == "fails"
    assert statuses(other)["rendezvous"] == "fails"
    assert statuses(main)["rendezvous"] == "fails"


def test_a_rank_that_does_not_connect_is_named(tmp_path: Path):
    [main] = on_ranks(tmp_path, two_ranks()[:1], seconds=2.0)
    assert "rank 1 did not connect in 2 s" in the(main, "rendezvous")["value"]


def test_a_main_rank_that_cannot_be_reached_is_reported_by_the_others(tmp_path: Path):
    [other] = on_ranks(tmp_path, two_ranks()[1:], seconds=2.0)
    assert the(other, "rendezvous")["status"] == "fails"
    assert "not reached in 2 s" in the(other, "rendezvous")["value"]


def test_a_launcher_without_an_address_fails_at_once(tmp_path: Path):
    [main] = on_ranks(tmp_path, [two_ranks()[0] | {"MASTER_ADDR": ""}], seconds=30.0)
    assert "MASTER_ADDR not set" in the(main, "rendezvous")["value"]


def test_the_json_is_not_ok_if_and_only_if_something_fails():
    fine, advice, bad = Finding("a", "ok", "1"), Finding("b", "advice", "2", "do"), Finding("c", "fails", "3", "fix")
    assert json.loads(as_json([fine, advice]))["ok"] is True
    report = json.loads(as_json([fine, bad]))
    assert report["ok"] is False
    assert report["findings"][1] == {"name": "c", "status": "fails", "value": "3", "remedy": "fix"}


@pytest.mark.parametrize("soft_wrap", [False, True])
def test_the_table_fits_80_columns_and_is_complete(soft_wrap: bool):
    # These letters occur nowhere else.
    long = Finding("rendezvous, rank 12 on node-with-a-long-name", "fails", "Q" * 150, "try [bold] " + "Z" * 90)
    printed = io.StringIO()
    Console(width=80, soft_wrap=soft_wrap, file=printed).print(as_table([Finding("python", "ok", "3.12"), long]))
    text = printed.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert (text.count("Q"), text.count("Z"), text.count("[bold]")) == (150, 90, 1)
