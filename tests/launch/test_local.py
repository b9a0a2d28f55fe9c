"""Several ranks from one command or under a launcher, and what must be equal on all of them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed.faults import TASK, install, start
from tests.distributed.ranks import RankCommand, free_port, paceline_on_ranks, variables
from tests.forked import paceline, python_m

SMALL = ["--gpu-ids", "none", "--num-envs", "6", "--max-iterations", "3", "--ppo.horizon", "8", "--ppo.hidden", "8"]
SECONDS = 90.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


def run(command: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_one_command_trains_on_two_ranks_and_says_where(tmp_path: Path):
    done = paceline("train", "cartpole", *SMALL, "--ranks", "2", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "12 envs on 2 ranks" in done.stdout
    assert re.search(r"ranks 0 to 1 on \S+: the CPU, 6 envs each", done.stdout)
    assert "24 samples of all ranks per minibatch, over gloo" in done.stdout
    assert done.stdout.count("completed after 3 iterations") == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["world_size"], result["num_envs"], result["total_envs"]) == (2, 6, 12)
    assert result["env_steps"] == 3 * 8 * 12
    logs = [tmp_path / "run" / "workers" / f"rank_{index}.log" for index in (0, 1)]
    assert all("iteration 3/3" in log.read_text() for log in logs)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("seconds/collect", "seconds/update"):
        low, mean, high = ([e.value for e in events.Scalars(f"{name}/{kind}")] for kind in ("min", "mean", "max"))
        assert len(low) == 3
        assert all(a <= b <= c for a, b, c in zip(low, mean, high, strict=True))
    assert [e.step for e in events.Scalars("seconds/collect/max")] == [1, 2, 3]


def test_too_few_samples_on_the_smallest_rank_are_refused_by_all(tmp_path: Path):
    few = ["--total-envs", "3", "--skrl.rollouts", "2", "--skrl.mini-batches", "4", "--gpu-ids", "none"]
    rank: RankCommand = (["train", "cartpole", "--learner", "skrl", *few, "--run-dir", "run"], {})
    main, other = paceline_on_ranks(tmp_path, rank, rank)
    assert (main.returncode, other.returncode) == (2, 2)
    assert "--skrl.mini-batches 4 is more than 2 samples" in main.stderr
    assert "(envs x steps: 1 x 2)" in main.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.root
def test_a_launcher_that_is_process_1_as_in_a_container_trains_on_two_ranks(tmp_path: Path):
    container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    done = run(
        [*container, sys.executable, "-m", "paceline", "train", "cartpole", *SMALL, "--ranks", "2"], tmp_path, {}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("elastic", [["--standalone"], ["--nnodes=1", "--master_addr=127.0.0.1"]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_distributed_run_starts_the_ranks(elastic: list[str], ranks: int, tmp_path: Path):
    if "--standalone" not in elastic:
        elastic = [*elastic, f"--master_port={free_port()}"]
    argv = ["-m", "paceline", "train", "--task=cartpole", *SMALL, "--headless", "--distributed"]
    done = python_m("torch.distributed.run", *elastic, f"--nproc_per_node={ranks}", *argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs" / "cartpole").iterdir()
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["world_size"], result["total_envs"]) == ("completed", ranks, 6 * ranks)


def test_a_platforms_node_variables_are_not_taken_for_ranks(tmp_path: Path):
    platform = {"RANK": "0", "WORLD_SIZE": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    done = paceline("train", "cartpole", *SMALL, cwd=tmp_path, **platform)
    assert done.returncode == 2
    assert "--nnodes=$WORLD_SIZE --node_rank=$RANK --nproc_per_node=$NPROC_PER_NODE" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


# One rank, started as a launcher starts it, is enough: two ranks write logs in the first test.
@pytest.mark.parametrize(
    ("argv", "environment", "place"),
    [
        (["--worker-log-dir", "mine"], {}, "mine"),
        (["--torchrunx-log-dir", "mine"], {}, "mine"),
        (["--worker-log-dir", "mine"], {"PACELINE_WORKER_LOG_DIR": "variable"}, "variable"),
        (["--worker-log-dir", "mine"], {"TORCHRUNX_LOG_DIR": "variable"}, "variable"),
        (["--worker-log-dir", ""], {}, None),
    ],
    ids=["flag", "torchrunx flag", "variable", "torchrunx variable", "off"],
)
def test_worker_logs_are_in_the_given_directory(
    argv: list[str], environment: dict[str, str], place: str | None, tmp_path: Path
):
    environment = environment | variables(index=0, count=1, port=free_port())
    done = paceline("train", "cartpole", *SMALL, "--run-dir", "run", *argv, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    found = [str(log.relative_to(tmp_path)) for log in tmp_path.rglob("rank_*.log")]
    assert found == ([f"{place}/rank_0.log"] if place else [])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "0"], "--ranks 0 must be at least 1"),
        (["--max-restarts", "-1"], "must be at least 0"),
        (["--hosts", "a", "b"], "--launcher torchrunx"),
        (["--launcher", "torchrunx", "--max-restarts", "1"], "--launcher elastic"),
        (["--timeout", "0"], "--timeout 0 must be above 0"),
        (["--total-envs", "0"], "--total-envs 0 must be at least 1"),
        (["--ranks", "2", "--run-dir", "full"], "full is not empty"),
        (["--ranks", "2", "--resume", "nothing"], "no run at nothing"),
        (["--ranks", "2", "--ppo.clip", "-1"], "--ppo.clip -1 must be above 0"),
        (["--ranks", "3", "--total-envs", "2"], "2 envs for 3 ranks: each rank needs at least one"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_left_behind(argv: list[str], message: str, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    done = paceline("train", "cartpole", *SMALL, *argv, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["full", "full/mine"]


def of_two_ranks(cwd: Path, site: tuple[Path, Path], argv: tuple[list[str], list[str]]) -> list[tuple[int, str]]:
    """Return exit codes and error output of two ranks with different arguments."""
    ranks = [(["train", "faulty", "--run-dir", "run", *argv[i]], {"PYTHONPATH": str(site[i])}) for i in (0, 1)]
    return [(done.returncode, done.stderr) for done in paceline_on_ranks(cwd, *ranks)]


def test_settings_that_differ_between_ranks_are_named(site: Path, tmp_path: Path):
    ends = of_two_ranks(tmp_path, (site, site), (["--ppo.clip", "0.2"], ["--ppo.clip", "0.3"]))
    assert [code for code, _ in ends] == [2, 2]
    assert re.search(r"rank 1 on \S+ has setting ppo.clip 0.3, the main rank on \S+ has 0.2", ends[0][1])
    assert ends[1][1] == ""
    assert not (tmp_path / "run").exists()


def test_task_code_that_differs_between_ranks_is_named(site: Path, tmp_path: Path):
    other = install(tmp_path / "other", TASK + "\n# newer\n")
    ends = of_two_ranks(tmp_path, (site, other), ([], []))
    assert [code for code, _ in ends] == [2, 2]
    assert re.search(r"rank 1 on \S+ has code of task faulty \w+, the main rank", ends[0][1])


def test_versions_that_differ_between_ranks_are_named(site: Path, tmp_path: Path):
    other = install(tmp_path / "other")
    (other / "mujoco-3.9.dist-info").mkdir()
    (other / "mujoco-3.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mujoco\nVersion: 3.9\n")
    ends = of_two_ranks(tmp_path, (site, other), ([], []))
    assert [code for code, _ in ends] == [2, 2]
    assert re.search(r"has version of mujoco 3.9, the main rank on \S+ has 4", ends[0][1])


def test_what_one_rank_refuses_before_the_ranks_meet_is_printed_by_the_main_rank(site: Path, tmp_path: Path):
    ends = of_two_ranks(tmp_path, (site, site), ([], ["--num-envs", "0"]))
    assert [code for code, _ in ends] == [2, 2]
    assert re.fullmatch(r"paceline: --num-envs 0 must be at least 1; rank 1 on \S+\n", ends[0][1])
    assert ends[1][1] == ""


def test_what_all_ranks_refuse_before_they_meet_is_printed_once(site: Path, tmp_path: Path):
    ends = of_two_ranks(tmp_path, (site, site), (["--num-envs", "0"], ["--num-envs", "0"]))
    assert [code for code, _ in ends] == [2, 2]
    assert ends[0][1] == "paceline: --num-envs 0 must be at least 1\n"
    assert ends[1][1] == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_the_main_rank_ends_at_a_signal(number: signal.Signals, site: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(SECONDS)
        port = silent.getsockname()[1]
        process = start(tmp_path, site, "train", "faulty", **variables(1, 2, port))
        try:
            # The rank is then inside torch's store, which waits for an answer for minutes.
            connection, _ = silent.accept()
            process.send_signal(number)
            assert process.wait(10.0) == 130
            connection.close()
        finally:
            process.kill()
            process.communicate()
