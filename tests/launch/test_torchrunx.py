"""torchrunx as the launcher: ranks on this host, and on two hosts over SSH."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.run import checkpoint
from tests.distributed.faults import install, start
from tests.forked import paceline
from tests.launch.sshd import SshHosts, ssh_hosts
from tests.signals import processes_of_group
from tests.waiting import until

SECONDS = 60.0
# torchrunx waits 30 s for a rank that does not end.
SOON = 45.0
TORCHRUNX = ["--gpu-ids", "none", "--launcher", "torchrunx"]
SMALL = ["train", "cartpole", *TORCHRUNX, "--num-envs", "6", "--ppo.horizon", "8", "--ppo.hidden", "8"]
SMALL += ["--logger", "none"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


def result(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "run" / "result.json").read_text())


def on_this_host(cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Start two ranks."""
    return paceline(*SMALL, "--ranks", "2", "--run-dir", cwd / "run", *argv, cwd=cwd)


def test_two_ranks_on_this_host_need_no_ssh_and_the_main_rank_prints(tmp_path: Path):
    done = on_this_host(tmp_path, "--max-iterations", "3")
    assert done.returncode == 0, done.stderr
    assert "12 envs on 2 ranks" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    found = result(tmp_path)
    assert (found["status"], found["world_size"], found["total_envs"]) == ("completed", 2, 12)
    assert sorted(log.name for log in (tmp_path / "run" / "workers").iterdir()) == ["rank_0.log", "rank_1.log"]


def test_what_ranks_refuse_is_one_line_and_exit_2(tmp_path: Path):
    done = on_this_host(tmp_path, "--total-envs", "1")
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("paceline:")]
    assert lines == ["paceline: 1 env for 2 ranks: each rank needs at least one"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("to_group", [False, True], ids=["kill", "terminal"])
def test_ctrl_c_ends_all_ranks_with_a_checkpoint(to_group: bool, tmp_path: Path):
    run = tmp_path / "run"
    argv = ["--ranks", "2", "--run-dir", str(run), "--max-iterations", "100000", "--checkpoint-every", "50"]
    with start(tmp_path, tmp_path, *SMALL, *argv) as process:
        try:
            until(lambda: checkpoint.listing(run / "checkpoints"), SECONDS)
            # A terminal sends Ctrl-C to all processes of its foreground group: launcher, agent and ranks.
            (os.killpg if to_group else os.kill)(process.pid, signal.SIGINT)
            assert process.wait(SOON) == 130
            until(lambda: not processes_of_group(process.pid), SOON)
        finally:
            process.kill()
    found = result(tmp_path)
    assert found["status"] == "interrupted"
    newest = checkpoint.load(checkpoint.newest(run / "checkpoints"))
    assert newest["learner"]["iteration"] == found["iterations"]


def test_a_killed_launcher_leaves_no_process(tmp_path: Path):
    run = tmp_path / "run"
    argv = ["--ranks", "2", "--run-dir", str(run), "--max-iterations", "100000", "--checkpoint-every", "10"]
    with start(tmp_path, tmp_path, *SMALL, *argv) as process:
        until(lambda: checkpoint.listing(run / "checkpoints"), SECONDS)
        process.kill()
        try:
            until(lambda: not processes_of_group(process.pid), SOON)
        finally:
            for pid in processes_of_group(process.pid):
                os.kill(pid, signal.SIGKILL)


def call(hosts: SshHosts, tmp_path: Path, site: Path, *argv: str) -> tuple[int, str]:
    """Run the command that trains on two hosts. Return its exit code and output. Afterwards only sshd may run on
    them."""
    log = tmp_path / "printed.log"
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        *argv,
        *TORCHRUNX,
        "--ranks",
        "1",
        "--hosts",
        "node1",
        "node2",
    ]
    command += ["--timeout", "5", "--logger", "none", "--run-dir", str(tmp_path / "run")]
    # torchrunx may make a directory where it is started.
    command = ["env", f"--chdir={tmp_path}", *command]
    variables = {"HOME": str(hosts.home), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    process = hosts.caller.start(*command, output=log, **variables)
    code = process.wait(SECONDS)
    until(lambda: [len(node.processes()) for node in (*hosts.nodes, hosts.caller)] == [1, 1, 0], SOON)
    return code, log.read_text()


@pytest.mark.root
def test_two_hosts_train_as_one_over_ssh(site: Path, tmp_path: Path):
    with ssh_hosts(tmp_path, 2) as hosts:
        code, printed = call(hosts, tmp_path, site, "cartpole", "--num-envs", "6", "--max-iterations", "5")
    assert code == 0, printed
    found = result(tmp_path)
    assert (found["status"], found["world_size"], found["total_envs"]) == ("completed", 2, 12)
    for index in (0, 1):
        log = (tmp_path / "run" / "workers" / f"rank_{index}.log").read_text()
        assert "rank 0 on node1" in log
        assert "rank 1 on node2" in log


@pytest.mark.root
@pytest.mark.parametrize(("kind", "rank"), [("raise", 1), ("SIGKILL", 0)])
def test_a_rank_that_fails_on_a_host_ends_the_command_and_leaves_nothing(
    kind: str, rank: int, site: Path, tmp_path: Path
):
    with ssh_hosts(tmp_path, 2, FAULT=f"{kind}:{rank}:60:{tmp_path / 'fault'}") as hosts:
        code, printed = call(hosts, tmp_path, site, "faulty")
    assert (tmp_path / "fault").exists()
    assert code == 1, printed
    assert "paceline: training failed: " in printed
    assert result(tmp_path)["status"] == "failed"
    if kind == "raise":
        assert "ArithmeticError: the wheel came off" in result(tmp_path)["cause"]
        assert f"rank {rank} on node{rank + 1}" in result(tmp_path)["cause"]
