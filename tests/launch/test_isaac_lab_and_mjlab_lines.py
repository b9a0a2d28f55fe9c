"""Command lines of the documentation of Isaac Lab, mjlab and OSMO. Only the program and the path of the script are
replaced; what is appended makes the runs short. Here they run on the CPU."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.namespaces import network
from tests.distributed.ranks import free_port, paceline_on_ranks
from tests.forked import paceline
from tests.waiting import until

SECONDS = 120.0
PROGRAM = Path(sys.executable).parent / "paceline"
SHORT = "--num_envs 16 --max_iterations 1 --logger none --run-dir run"
"""Appended to the lines; the last of several values of an option counts."""
TORCHRUN = "python -m torch.distributed.run"
SKRL_LAUNCHER = "python -m skrl.utils.distributed.jax"
FLAGS = "--task=Isaac-Cartpole-v0 --headless --distributed"
SCRIPTS = {name: f"scripts/reinforcement_learning/{name}/train.py" for name in ("rl_games", "rsl_rl", "skrl")}
CAMERAS = "./Examples/IsaacLab230/rsl_rl/train.py --task Isaac-Repose-Cube-Shadow-Vision-Direct-v0 --enable_cameras"

ONE_NODE = {
    **{name: f"{TORCHRUN} --nnodes=1 --nproc_per_node=2 {script} {FLAGS}" for name, script in SCRIPTS.items()},
    "skrl_jax": f"{SKRL_LAUNCHER} --nnodes=1 --nproc_per_node=2 {SCRIPTS['skrl']} {FLAGS} --ml_framework jax",
}
C10D = f"{TORCHRUN} --nproc_per_node=2 --nnodes=2 --node_rank=%d --rdzv_id=123 --rdzv_backend=c10d --rdzv_endpoint=%s"
JAX = f"{SKRL_LAUNCHER} --nproc_per_node=2 --nnodes=2 --node_rank=%d --coordinator_address=ip_of_master_machine:5555"
TWO_NODES = {
    **{
        name: [
            f"{C10D % (0, 'localhost:5555')} {script} {FLAGS}",
            f"{C10D % (1, 'ip_of_master_machine:5555')} {script} {FLAGS}",
        ]
        for name, script in SCRIPTS.items()
    },
    "skrl_jax": [f"{JAX % rank} {SCRIPTS['skrl']} {FLAGS} --ml_framework jax" for rank in (0, 1)],
}
"""Lines of the main node and of the other one."""


def replaced(line: str, appended: str = SHORT) -> str:
    """Return the line with Paceline in place of the script."""
    script = next(word for word in line.split() if word.endswith("train.py"))
    library = Path(script).parent.name
    # The framework alone selects skrl on JAX. Its launcher cannot start a module.
    learner = "" if "--ml_framework jax" in line else f" --learner {library}"
    program = str(PROGRAM) if SKRL_LAUNCHER in line else "-m paceline"
    line = line.replace(script, f"{program} train{learner}").replace("/workspace/isaaclab/isaaclab.sh -p", "python")
    return f"{line.replace('python ', f'{sys.executable} ', 1)} {appended}"


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "result.json").read_text())


def check(folder: Path, learner: str, ranks: int, envs: int, task: str = "cartpole") -> None:
    found = result(folder)
    assert (found["status"], found["task"], found["learner"]) == ("completed", task, learner)
    assert (found["world_size"], found["total_envs"], found["device"]) == (ranks, envs, "cpu")


def call(line: str, folder: Path, **environment: str) -> str:
    """Run a line with the shell. Return what it prints to stdout."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(
        line, shell=True, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("learner", ONE_NODE)
def test_isaac_labs_lines_for_one_node(learner: str, tmp_path: Path):
    printed = call(replaced(ONE_NODE[learner]), tmp_path)
    assert printed.count("Isaac-Cartpole-v0 is the task cartpole. Rewards, limits and the start of an episode") == 1
    # skrl's launcher always returns 0.
    assert printed.count("completed after 1 iteration,") == 1
    check(tmp_path, learner, ranks=2, envs=32)


@pytest.mark.root
@pytest.mark.parametrize("learner", TWO_NODES)
def test_isaac_labs_lines_for_two_nodes(learner: str, tmp_path: Path):
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    logs = [tmp_path / f"{number}.log" for number in (1, 2)]
    with network(2) as nodes:
        lines = [replaced(line).replace("ip_of_master_machine", nodes[0].address) for line in TWO_NODES[learner]]
        processes = [
            node.start("env", f"--chdir={tmp_path}", *shlex.split(line), output=log, **variables)
            for node, line, log in zip(nodes, lines, logs, strict=True)
        ]
        until(lambda: all(process.poll() is not None for process in processes), SECONDS)
    printed = [log.read_text() for log in logs]
    assert [process.returncode for process in processes] == [0, 0], printed
    check(tmp_path, learner, ranks=4, envs=64)
    # With c10d the main rank may be on either node.
    assert "".join(printed).count("completed after 1 iteration,") == 1


CAMERA_OPTIONS = "--max_iterations 24000 --num_envs 512"


@pytest.mark.parametrize(
    "line",
    [
        f"/workspace/isaaclab/isaaclab.sh -p {CAMERAS} {CAMERA_OPTIONS}",
        "/workspace/isaaclab/isaaclab.sh -p -m torch.distributed.run \\\n--nproc_per_node=${NPROC_PER_NODE} \\\n"
        "--nnodes=${WORLD_SIZE} \\\n--node_rank=${RANK} \\\n--master_addr=${MASTER_ADDR} \\\n"
        f"--master_port=${{MASTER_PORT}} \\\n{CAMERAS} --headless {CAMERA_OPTIONS} --distributed",
    ],
    ids=["one", "torchrun"],
)
def test_the_lines_that_train_with_cameras(line: str, tmp_path: Path):
    line = replaced(line, f"{SHORT} --num_envs 1 --rsl-rl.num-steps-per-env 4 --rsl-rl.num-mini-batches 1")
    platform = {"WORLD_SIZE": "1", "RANK": "0", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1"}
    printed = call(line, tmp_path, **platform | {"MASTER_PORT": str(free_port())} if "RANK" in line else {})
    assert "Isaac-Repose-Cube-Shadow-Vision-Direct-v0 is the task shadow-hand-repose-camera" in printed
    check(tmp_path, "rsl_rl", ranks=1, envs=1, task="shadow-hand-repose-camera")


def test_mjlabs_line_for_the_cpu(tmp_path: Path):
    short = shlex.split("--num-envs 2 --max-iterations 1 --logger none --run-dir run")
    done = paceline("train", "Mjlab-Velocity-Flat-Unitree-G1", "--gpu-ids", "None", *short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Mjlab-Velocity-Flat-Unitree-G1 is the task g1-velocity. The robot is Paceline's model" in done.stdout
    check(tmp_path, "ppo", ranks=1, envs=2, task="g1-velocity")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpu-ids 0", "--gpu-ids 0: no such GPU: torch sees none; use --gpu-ids none to train on the CPU"),
        ("--gpu-ids 0 1", "--gpu-ids 1: no such GPU: torch sees none; use --gpu-ids none to train on the CPU"),
        ("--gpu-ids all", "--gpu-ids all: torch sees no GPU here; use --gpu-ids none to train on the CPU"),
        ('--gpu-ids 0 1 --torchrunx-log-dir ""', "--gpu-ids 1: no such GPU"),
        ("--gpu-ids 0 1 --torchrunx-log-dir /path/to/logs", "--gpu-ids 1: no such GPU"),
    ],
)
def test_mjlabs_lines_for_gpus_name_the_gpu_that_is_missing(options: str, message: str, tmp_path: Path):
    argv = ["train", "Mjlab-Velocity-Flat-Unitree-G1", *shlex.split(options)]
    done = paceline(*argv, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.startswith(f"paceline: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "variables", "place"),
    [
        ('--torchrunx-log-dir ""', {}, None),
        ("--torchrunx-log-dir logs", {}, "logs"),
        ("--torchrunx-log-dir logs", {"TORCHRUNX_LOG_DIR": "variable"}, "variable"),
    ],
    ids=["off", "flag", "variable"],
)
def test_mjlabs_options_of_logs_on_two_ranks(
    options: str, variables: dict[str, str], place: str | None, tmp_path: Path
):
    # The GPUs 0 and 1 are replaced by two ranks on the CPU.
    argv = shlex.split(f"train Mjlab-Cartpole-Balance --gpu-ids None {options} --num-envs 8 --max-iterations 1")
    argv += shlex.split("--logger none --run-dir run --ppo.hidden 8")
    for done in paceline_on_ranks(tmp_path, (argv, variables), (argv, variables)):
        assert done.returncode == 0, done.stderr
    check(tmp_path, "ppo", ranks=2, envs=16)
    found = {str(log.relative_to(tmp_path)) for log in tmp_path.rglob("rank_*.log")}
    assert found == ({f"{place}/rank_0.log", f"{place}/rank_1.log"} if place else set())


@pytest.mark.parametrize(
    ("line", "num_gpu"),
    [
        ("osmo workflow submit train_policy.yaml", 2),
        ("osmo workflow submit train_policy.yaml --set num_gpu=4", 4),
    ],
)
def test_osmos_lines_submit_a_master_and_a_worker_with_the_gpus_of_the_line(line: str, num_gpu: int, tmp_path: Path):
    copied = paceline("launch", "--copy", "train_policy.yaml", cwd=tmp_path)
    assert copied.returncode == 0, copied.stderr
    argv = shlex.split(line.replace("osmo workflow submit", "launch"))
    done = paceline(*argv, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, _, commands = done.stdout.partition("\n# training: master (lead)\n")
    assert "\n# training: worker-1\n" in commands
    rendered = yaml.safe_load(file)["workflow"]
    assert rendered["resources"]["default"]["gpu"] == num_gpu
    ((master, worker),) = (group["tasks"] for group in rendered["groups"])
    for task, endpoint in ((master, "localhost:5555"), (worker, "{{host:master}}:5555")):
        (script,) = (each["contents"].split() for each in task["files"])
        options = {"--nnodes=2", f"--nproc-per-node={num_gpu}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"}
        assert options <= set(script)
    # The same line without --dry-run names what this machine lacks.
    refused = paceline(*argv, cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "this machine has" in refused.stderr
