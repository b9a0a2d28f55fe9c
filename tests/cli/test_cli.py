"""The command line in real processes."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from paceline.run import checkpoint
from tests.distributed.ranks import free_port, variables
from tests.forked import paceline
from tests.signals import DEFAULT_SIGNALS

PACELINE = [sys.executable, "-m", "paceline"]
SMALL = ["--num-envs", "8", "--ppo.horizon", "8", "--ppo.hidden", "8"]


@pytest.fixture
def existing_file(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_text("mine")
    return file


BAD = {
    "no such command": (["trian", "cartpole"], ["'trian'", "did you mean 'train'"]),
    "no task": (["train"], ["no task given", "paceline tasks"]),
    "unknown task": (["train", "cartpol"], ["'cartpol'", "did you mean 'cartpole'"]),
    "unknown learner": (["train", "cartpole", "--learner", "ppp"], ["'ppp'", "choose from ppo"]),
    "unknown engine": (["train", "cartpole", "--engine", "bullet"], ["--engine bullet", "mujoco, warp"]),
    "unknown logger": (["train", "cartpole", "--logger", "paper"], ["--logger paper", "tensorboard, wandb"]),
    "unknown option": (["train", "cartpole", "--num-env", "4"], ["'--num-env'", "did you mean '--num-envs'"]),
    "unknown task option": (["train", "cartpole", "--env.gravity", "4"], ["'--env.gravity'", "train cartpole --help"]),
    "unexpected argument": (["train", "cartpole", "ant"], ["unexpected argument 'ant'", "train cartpole --help"]),
    "discrete observations": (["train", "gymnasium:FrozenLake-v1"], ["Discrete(16)", "FlattenObservation"]),
    "missing robot file": (["train", "go1-velocity", "--env.robot", "no.xml"], ["--env.robot no.xml: no such file"]),
    "no envs": (["train", "cartpole", "--num-envs", "0"], ["--num-envs 0", "at least 1"]),
    "negative iterations": (["train", "cartpole", "--max-iterations", "-3"], ["--max-iterations -3", "at least 1"]),
    "uneven minibatches": (["train", "cartpole", "--ppo.minibatches", "7"], ["--ppo.minibatches 7", "divide"]),
    "bad discount": (["train", "cartpole", "--ppo.discount", "1.5"], ["--ppo.discount 1.5", "at most 1"]),
    "negative seed": (["train", "cartpole", "--seed", "-1"], ["--seed -1"]),
    "too many envs": (["train", "cartpole", "--num-envs", "2000000000"], ["--num-envs 2000000000", "at most"]),
    "a value that is not a number": (["train", "cartpole", "--num-envs", "many"], ["--num-envs", "'many'"]),
    "a value that is not an integer": (["train", "cartpole", "--seed", "1e3"], ["--seed", "'1e3'"]),
    "a missing value": (["train", "cartpole", "--resume"], ["--resume"]),
    "no physics steps": (["train", "cartpole", "--env.decimation", "0"], ["--env.decimation 0", "at least 1"]),
    "no time": (["train", "cartpole", "--env.episode-seconds", "0"], ["--env.episode-seconds 0", "above 0"]),
    "infinite force": (["train", "cartpole", "--env.max-force", "inf"], ["--env.max-force inf", "finite"]),
    "learning rate out of range": (
        ["train", "cartpole", "--ppo.learning-rate", "1"],
        ["--ppo.learning-rate 1", "0.01"],
    ),
    "options before the task": (["train", "--seed", "-1", "cartpole"], ["--seed -1"]),
    "missing GPU": (["train", "cartpole", "--gpu-ids", "3"], ["--gpu-ids 3", "no such GPU"]),
    "a GPU that is not a number": (["train", "cartpole", "--gpu-ids", "first"], ["--gpu-ids first", "all, or none"]),
    "resume without runs": (["train", "--resume", "auto"], ["no run with a checkpoint under runs"]),
    "resume a missing run": (["train", "--resume", "runs/none"], ["no run at runs/none"]),
    "run directory is a file": (["train", "cartpole", "--run-dir", "file/run"], ["file", "--run-dir"]),
    "distributed without a launcher": (["train", "cartpole", "--distributed"], ["torch.distributed.run"]),
    "play a missing run": (["play", "nowhere"], ["no run at nowhere"]),
    "export a missing run": (["export", "nowhere"], ["no run at nowhere"]),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_input_is_one_line_with_exit_code_2_and_changes_no_files(
    case: str, tmp_path: Path, existing_file: Path
):
    argv, messages = BAD[case]
    done = paceline(*argv, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for message in messages:
        assert message in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == [existing_file]
    assert existing_file.read_text() == "mine"


def test_an_unwritable_run_directory_is_refused(tmp_path: Path):
    # No user can create directories in /proc, not even root.
    done = paceline("train", "cartpole", "--run-dir", "/proc/paceline", cwd=tmp_path)
    assert done.returncode == 2
    assert "/proc" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_directory_that_is_not_empty_is_not_changed(tmp_path: Path, existing_file: Path):
    done = paceline("train", "cartpole", "--run-dir", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert "not empty" in done.stderr
    assert "--resume" in done.stderr
    assert list(tmp_path.iterdir()) == [existing_file]


def test_train_then_resume_then_tasks(tmp_path: Path):
    done = paceline("train", "cartpole", *SMALL, "--max-iterations", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / "cartpole").iterdir()
    for shown in (
        "completed after 3 iterations",
        str(run.relative_to(tmp_path)),
        "paceline play",
        "tensorboard --logdir",
    ):
        assert shown in done.stdout
    done = paceline("train", "--resume", "auto", "--max-iterations", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((run / "result.json").read_text())
    assert (result["iterations"], result["num_envs"]) == (5, 8)
    tasks = paceline("tasks", cwd=tmp_path).stdout
    assert "balance a pole on a cart" in tasks
    assert re.search(r"^ cartpole +Isaac-Cartpole-Direct-v0 *$", tasks, re.MULTILINE)
    assert max(map(len, tasks.splitlines())) <= 80


def test_the_summary_of_a_resumed_run_is_about_all_sessions(tmp_path: Path, tiny_run: Path):
    shutil.copytree(tiny_run, tmp_path / "run")
    done = paceline("train", "--resume", "run", "--max-iterations", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert f"{result['env_steps'] / result['train_seconds']:,.0f} steps/s" in done.stdout


def test_a_resumed_run_stays_in_its_directory(tmp_path: Path, tiny_run: Path):
    done = paceline("train", "--resume", str(tiny_run), "--run-dir", "elsewhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "--run-dir elsewhere with --resume" in done.stderr
    assert not list(tmp_path.iterdir())


def test_failed_training_prints_the_reason_and_exits_with_1(tmp_path: Path):
    argv = ["--ppo.learning-rate", "1e30", "--ppo.desired-kl", "0", "--max-iterations", "50", "--run-dir", "run"]
    done = paceline("train", "cartpole", *SMALL, *argv, cwd=tmp_path)
    assert done.returncode == 1
    assert "became" in done.stderr
    assert "smaller --ppo.learning-rate" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


def test_network_sizes_cannot_change_on_resume(tmp_path: Path, tiny_run: Path):
    done = paceline("train", "--resume", str(tiny_run), "--ppo.hidden", "5", "--max-iterations", "9", cwd=tmp_path)
    assert done.returncode == 2
    assert "--ppo.hidden 5 with --resume: it is 16 16 in this run" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("num_envs: abc", "num_envs 'abc' must be a whole number"),
        ("seed: 1.5", "seed 1.5 must be a whole number"),
        ("gpu_ids: 0", "gpu_ids 0 must be a list"),
        ("nun_envs: 4", "did you mean 'num_envs'"),
        ("settings: {activation: gelu}", "activation 'gelu' must be 'elu', 'relu' or 'tanh'"),
        ("settings: 3", "settings 3 must be a mapping"),
        ("task: [", "not valid YAML"),
    ],
)
def test_a_run_yaml_edited_by_hand_is_checked(line: str, message: str, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text(f"task: cartpole\nenv: {{}}\n{line}\n")
    done = paceline("train", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_runs_started_at_the_same_time_get_different_directories(tmp_path: Path):
    def train(seed: int) -> int:
        return paceline("train", "cartpole", *SMALL, "--max-iterations", "1", "--seed", seed, cwd=tmp_path).returncode

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(train, range(3))) == [0, 0, 0]
    ran = [(path / "run.yaml").read_text().split("seed: ")[1][0] for path in (tmp_path / "runs" / "cartpole").iterdir()]
    assert sorted(ran) == ["0", "1", "2"]


def test_a_run_that_is_in_training_cannot_be_resumed(tmp_path: Path):
    process = start(tmp_path, "--num-envs", "16", "--checkpoint-every", "1")
    try:
        done = paceline("train", "--resume", "run", cwd=tmp_path)
        assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "running"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert done.returncode == 2
    assert "being trained by another process" in done.stderr


def test_training_continues_when_its_output_is_closed(tmp_path: Path):
    argv = " ".join([*PACELINE, "train", "cartpole", *SMALL, "--max-iterations", "5", "--run-dir", "run"])
    done = subprocess.run(
        ["bash", "-c", f"{argv} | head -c 1"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"


def test_closing_the_output_of_a_help_page_is_not_an_error(tmp_path: Path):
    command = [*PACELINE, "train", "cartpole", "--help"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_command_line_of_isaac_lab_is_accepted(tmp_path: Path):
    argv = ["--task=Isaac-Cartpole-v0", "--num_envs", "8", "--max_iterations", "1"]
    switches = ["--headless", "--enable_cameras", "--distributed"]
    done = paceline(
        "train", *argv, *switches, "--run-dir", "run", cwd=tmp_path, **variables(index=0, count=1, port=free_port())
    )
    assert done.returncode == 0, done.stderr
    assert "Isaac-Cartpole-v0 is the task cartpole." in done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["num_envs"], result["task"]) == (8, "cartpole")
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["task"] == "cartpole"
    resumed = paceline(
        "train", "Isaac-Cartpole-v0", "--resume", "run", "--max_iterations", "2", "--gpu-ids", "none", cwd=tmp_path
    )
    assert resumed.returncode == 0, resumed.stderr


def test_warp_is_not_imported_on_a_cpu(tmp_path: Path):
    script = (
        "import sys; sys.argv = ['paceline', 'train', 'cartpole', '--num-envs', '4', '--max-iterations', '1']\n"
        "from paceline.cli.main import main\n"
        "try: main()\n"
        "finally: assert not [name for name in sys.modules if name.split('.')[0] in ('warp', 'mujoco_warp')]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def start(cwd: Path, *argv: str) -> subprocess.Popen[str]:
    """Start training and return when the first iteration has begun."""
    process = subprocess.Popen(
        [*DEFAULT_SIGNALS, *PACELINE, "train", "cartpole", "--run-dir", "run", "--max-iterations", "1000000", *argv],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(cwd.glob("run/tensorboard/*")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    return process


@pytest.mark.parametrize(
    ("number", "argv"),
    [(signal.SIGHUP, ["--num-envs", "16"]), (signal.SIGINT, ["--num-envs", "1024", "--ppo.horizon", "512"])],
    ids=["hangup in short iterations", "Ctrl-C in an iteration of many seconds"],
)
def test_ctrl_c_and_hangup_save_a_checkpoint_that_can_be_resumed(
    number: signal.Signals, argv: list[str], tmp_path: Path
):
    process = start(tmp_path, *argv)
    process.send_signal(number)
    sent = time.monotonic()
    stdout, stderr = process.communicate(timeout=60)
    # It takes two seconds on an idle machine; the limit allows for a busy one.
    assert time.monotonic() - sent < 10
    assert process.returncode == 130, stderr
    assert "paceline train --resume run" in stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "interrupted"
    resume = ["--resume", "run", "--max-iterations", result["iterations"] + 1, "--ppo.horizon", 8]
    done = paceline("train", *resume, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_signal_that_comes_twice_at_once_is_one_request(tmp_path: Path):
    process = start(tmp_path, "--num-envs", "1024", "--ppo.horizon", "512")
    # As `timeout` does, which signals its process and its process group.
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert "paceline train --resume run" in stdout, stderr
    iterations = json.loads((tmp_path / "run" / "result.json").read_text())["iterations"]
    newest = checkpoint.load(checkpoint.newest(tmp_path / "run" / "checkpoints"))
    assert newest["learner"]["iteration"] == iterations


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_imports_prints_one_line_and_exits_with_130(number: signal.Signals, tmp_path: Path):
    command = [*DEFAULT_SIGNALS, *PACELINE, "train", "cartpole", *SMALL, "--run-dir", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(number)
        _, message = process.communicate(timeout=60)
    assert (process.returncode, message) == (130, "paceline: interrupted\n")
    assert not (tmp_path / "run").exists()
