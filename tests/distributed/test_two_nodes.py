"""Two nodes: network namespaces with their own names and addresses, torch.distributed.run on each."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.run import checkpoint
from tests import waiting
from tests.distributed.namespaces import Node, network

pytestmark = pytest.mark.root

PORT = 29400
SECONDS = 90.0
SMALL = "--gpu-ids none --num-envs 8 --checkpoint-every 10 --timeout 5 --ppo.hidden 16 16"
# Missing heartbeats are detected within seconds here, not within the minutes that suit a cluster.
IMPATIENT = "--rdzv-conf=join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


def start(node: Node, main: Node, run: Path, iterations: int, nodes: str = "2", restarts: int = 3) -> Any:
    """Return the command line of torch.distributed.run with a c10d rendezvous at the main node."""
    options = f"--nnodes={nodes} --nproc_per_node=1 --rdzv_id=job --rdzv_backend=c10d --max-restarts={restarts}"
    options += f" --rdzv_endpoint={main.address}:{PORT} --local-addr={node.address} --monitor-interval=0.1 {IMPATIENT}"
    argv = f"-m torch.distributed.run {options} -m paceline train cartpole --distributed {SMALL}"
    argv += f" --max-iterations {iterations} --run-dir {run}"
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    return node.start(sys.executable, *shlex.split(argv), output=run.parent / f"{node.name}.log", **variables)


def until(condition: Callable[[], object], folder: Path, seconds: float = SECONDS) -> None:
    def logs() -> str:
        files = sorted([*folder.glob("*.log"), *folder.glob("run/workers/*.log")])
        return "\n".join(f"{log}\n{log.read_text()[-2000:]}" for log in files)

    waiting.until(condition, seconds, logs)


def ended(processes: list[subprocess.Popen[bytes]], folder: Path) -> list[int]:
    until(lambda: all(process.poll() is not None for process in processes), folder)
    return [process.returncode for process in processes]


def result(run: Path) -> dict[str, Any]:
    try:
        return json.loads((run / "result.json").read_text())
    except OSError:
        return {"status": "not begun", "world_size": 0}


def has_checkpoint(run: Path) -> bool:
    return bool(checkpoint.listing(run / "checkpoints"))


def has_worker(node: Node) -> bool:
    """Return whether ranks run on the node."""
    return len(node.processes()) > 1


def learned(run: Path) -> dict[str, torch.Tensor]:
    """Return all learned tensors by name."""
    state = checkpoint.load(checkpoint.newest(run / "checkpoints"))["learner"]
    parts = state["networks"], state["adam"], state["normalizers"]["policy"]
    return {name: tensor for part in parts for name, tensor in part.items()}


def iterations_logged(run: Path) -> list[int]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("loss/value")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed")
    with network(2) as nodes:
        processes = [start(node, nodes[0], path / "run", 150) for node in nodes]
        assert ended(processes, path) == [0, 0]
    return path / "run"


def test_two_nodes_train_as_one(undisturbed: Path):
    found = result(undisturbed)
    assert (found["status"], found["world_size"], found["total_envs"], found["restarts"]) == ("completed", 2, 16, 0)
    logs = [(undisturbed / "workers" / f"rank_{index}.log").read_text() for index in (0, 1)]
    for log in logs:
        assert "rank 0 on node" in log
        assert "rank 1 on node" in log
        assert "iteration 150/150" in log
    assert len(list((undisturbed / "tensorboard").iterdir())) == 1


def start_by_platform(nodes: list[Node], run: Path, iterations: int) -> list[subprocess.Popen[bytes]]:
    """Run one shell command on all nodes, with the variables that a platform sets."""
    options = "--nnodes=$WORLD_SIZE --node_rank=$RANK --nproc_per_node=$NPROC_PER_NODE --monitor-interval=0.1"
    options += " --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT --max-restarts=1"
    argv = f"-m paceline train --task=cartpole --headless --distributed {SMALL}"
    argv += f" --max-iterations {iterations} --run-dir {run}"
    command = f"exec {sys.executable} -m torch.distributed.run {options} {argv}"
    platform = {"WORLD_SIZE": "2", "NPROC_PER_NODE": "2", "MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29500"}
    return [
        node.start("sh", "-c", command, output=run.with_name(f"{node.name}.log"), RANK=str(index), **platform)
        for index, node in enumerate(nodes)
    ]


def test_with_a_platforms_variables_and_a_fixed_main_node_a_killed_rank_is_restarted(tmp_path: Path):
    run = tmp_path / "run"
    # A Debian host resolves its own name to a loopback address, which gloo by default offers to the other node.
    with network(2, own_name="127.0.1.1") as nodes:
        processes = start_by_platform(nodes, run, iterations=40)
        until(lambda: has_checkpoint(run), tmp_path)
        worker = next(pid for pid in nodes[1].processes() if pid != processes[1].pid)
        os.kill(worker, signal.SIGKILL)
        assert ended(processes, tmp_path) == [0, 0]
    found = result(run)
    assert (found["status"], found["world_size"], found["restarts"]) == ("completed", 4, 1)
    assert "ranks 2 to 3 on node2" in (run / "workers" / "rank_3.log").read_text()


def test_a_link_that_is_cut_costs_nothing_but_time(undisturbed: Path, tmp_path: Path):
    run = tmp_path / "run"
    with network(2) as nodes:
        processes = [start(node, nodes[0], run, 150) for node in nodes]
        until(lambda: has_checkpoint(run), tmp_path)
        nodes[1].cut()
        # All ranks must detect the failure by themselves before the link is restored.
        until(lambda: not any(has_worker(node) for node in nodes), tmp_path, 20.0)
        assert "rank 1 on node2" in result(run)["cause"]
        nodes[1].reconnect()
        assert ended(processes, tmp_path) == [0, 0]
    assert result(run)["status"] == "completed"
    assert result(run)["restarts"] >= 1
    expected = learned(undisturbed)
    for name, tensor in learned(run).items():
        assert torch.equal(tensor, expected[name]), name
    assert iterations_logged(run) == list(range(1, 151))


@pytest.mark.parametrize("lost", [1, 0], ids=["second", "main"])
def test_a_lost_node_lets_the_other_go_on_and_is_taken_in_again(lost: int, tmp_path: Path):
    run = tmp_path / "run"

    def trains_on(ranks: int) -> bool:
        """Return whether this number of ranks is training and has written a checkpoint."""
        files = checkpoint.listing(run / "checkpoints")
        found = result(run)
        running = (found["status"], found["world_size"]) == ("running", ranks)
        return bool(running and files and files[-1].stat().st_mtime > (run / "result.json").stat().st_mtime)

    with network(2) as nodes:
        # The rendezvous is on the node that stays.
        kept = nodes[1 - lost]
        processes = [start(node, kept, run, 10**6, nodes="1:2") for node in nodes]
        until(lambda: trains_on(2), tmp_path)
        processes[lost].kill()
        until(lambda: not nodes[lost].processes(), tmp_path, 5.0)
        until(lambda: trains_on(1), tmp_path)
        assert (result(run)["num_envs"], result(run)["total_envs"]) == (16, 16)
        processes[lost] = start(nodes[lost], kept, run, 10**6, nodes="1:2")
        until(lambda: trains_on(2), tmp_path)
        assert (result(run)["num_envs"], result(run)["total_envs"]) == (8, 16)
        for process in processes:
            process.terminate()
        ended(processes, tmp_path)
    found = result(run)
    assert found["status"] == "interrupted"
    assert found["restarts"] >= 2
    assert iterations_logged(run) == list(range(1, found["iterations"] + 1))
