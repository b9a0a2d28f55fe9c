"""Loggers of real runs, read back from what they wrote."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from paceline.errors import UserError
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.loggers import background
from paceline.run.loggers.background import BackgroundLogger
from paceline.run.metrics_file import read_metrics
from paceline.train import train
from tests.distributed.ranks import paceline_on_ranks
from tests.signals import DEFAULT_SIGNALS
from tests.waiting import until

LOGGERS = ("tensorboard", "wandb", "mlflow")
SMALL = ["--gpu-ids", "none", "--num-envs", "8", "--ppo.horizon", "32", "--ppo.hidden", "8"]
PPO = {"horizon": 8, "epochs": 1, "minibatches": 1, "hidden": (8,)}
CONFIG = TrainConfig(task="cartpole", env={}, num_envs=2, max_iterations=3, settings=PPO)
OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_EXPERIMENT_NAME": "poles"}
UNREACHABLE = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of two ranks with all loggers, resumed on one rank and stopped by Ctrl-C."""
    folder = tmp_path_factory.mktemp("loggers")
    begin = ["train", "cartpole", *SMALL, "--run-dir", "run", "--max-iterations", "4", "--logger", *LOGGERS]
    for rank in paceline_on_ranks(folder, *[(begin, OFFLINE)] * 2):
        assert rank.returncode == 0, rank.stderr
    assert len(list((folder / "run/wandb").glob("offline-run-*"))) == 1
    resume = ["train", "--resume", "run", "--max-iterations", "100000", "--checkpoint-every", "100000"]
    command = [*DEFAULT_SIGNALS, sys.executable, "-m", "paceline", *resume]
    process = subprocess.Popen(command, cwd=folder, env=os.environ | OFFLINE, start_new_session=True)
    opened = RunDir(folder / "run")
    until(lambda: len(wandb_runs(opened)) == 2 and mlflow_metrics(opened, "loss/value")[-1][0] > 6, 120)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert opened.result()["status"] == "interrupted"
    assert processes_in(folder) == []
    return opened


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of all processes whose current directory is `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
    return [command for command in found if command]


def wandb_runs(run: RunDir) -> list[Path]:
    return sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb"))


def mlflow_metrics(run: RunDir, name: str) -> list[tuple[int, float]]:
    """Return the iterations and values of a metric in the store of the run."""
    with closing(sqlite3.connect(run.path / "mlflow.db")) as store:
        return store.execute("select step, value from metrics where key = ? order by step", (name,)).fetchall()


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run of wandb, which has the format of LevelDB's log files."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    content, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        rest_of_block = 32768 - position % 32768
        if rest_of_block < 7:
            position += rest_of_block
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def test_wandb_has_one_run_with_config_and_metrics_of_both_sessions(run: RunDir):
    first, second = (list(wandb_records(file)) for file in wandb_runs(run))
    ids = {record.run.run_id for record in (*first, *second) if record.HasField("run")}
    assert ids == {(run.path / "wandb.id").read_text().strip()}
    config = {item.key: json.loads(item.value_json) for r in first for item in r.run.config.update}
    assert config["task"] == "cartpole"
    assert config["ppo.horizon"] == 32
    metrics: dict[int, dict[str, float]] = defaultdict(dict)
    for record in first:
        row = {item.nested_key[0] or item.key: json.loads(item.value_json) for item in record.history.item}
        if "iteration" in row:
            metrics[row["iteration"]] |= row
    assert sorted(metrics) == [1, 2, 3, 4]
    expected = read_metrics(run.metrics_file)[0][2]
    assert {name: metrics[3][name] for name in expected} == pytest.approx(expected)


def test_mlflow_has_one_run_with_params_and_metrics_of_both_sessions(run: RunDir):
    with closing(sqlite3.connect(run.path / "mlflow.db")) as store:
        ((run_id, status, experiment),) = store.execute(
            "select run_uuid, status, e.name from runs join experiments e using (experiment_id)"
        )
        params = dict(store.execute("select key, value from params"))
    assert (run_id, status) == ((run.path / "mlflow.id").read_text().strip(), "KILLED")
    assert experiment == "poles"
    assert params["ppo.horizon"] == "32"
    logged = {metrics["iteration"]: metrics["loss/value"] for metrics in read_metrics(run.metrics_file)[0]}
    stored = dict(mlflow_metrics(run, "loss/value"))
    assert stored == {iteration: logged[iteration] for iteration in stored}
    assert {1, 4, max(logged)} <= stored.keys()


def test_tensorboard_has_curves_in_groups_and_hyperparameters(run: RunDir):
    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert [event.step for event in events.Scalars("loss/value")][:4] == [1, 2, 3, 4]
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {category.title: [chart.title for chart in category.chart] for category in layout.category}
    assert list(charts) == ["episode", "rewards", "losses", "speed"]
    assert charts["episode"] == ["return", "length, steps"]
    (seconds,) = (
        chart for category in layout.category for chart in category.chart if chart.title == "seconds per iteration"
    )
    # As TensorBoard selects the curves: the run began with two ranks and continued with one.
    patterns = [re.compile(pattern) for pattern in seconds.multiline.tag]
    shown = {name for name in events.Tags()["scalars"] if any(pattern.match(name) for pattern in patterns)}
    parts = ("collect", "update", "sync")
    expected = {f"seconds/{part}/mean" for part in parts} | {f"seconds/{part}" for part in (*parts, "physics")}
    assert shown == expected
    content = events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    options = parse_session_start_info_plugin_data(content).hparams
    assert options["ppo.horizon"].number_value == 32
    assert options["world_size"].number_value == 2


def test_training_continues_if_a_store_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////dev/null/store.db")
    monkeypatch.setattr(background, "CLOSE_SECONDS", 120.0)
    config = replace(CONFIG, logger=("mlflow",))
    result = train(config, RunDir(tmp_path / "run"), Console())
    assert (result["status"], result["iterations"]) == ("completed", 3)
    assert "The logger mlflow failed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_library_is_refused_with_the_extra_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, name, None)
    config = replace(CONFIG, logger=("tensorboard", name))
    with pytest.raises(UserError, match=rf"--logger {name} .* pip install 'paceline\[{name}\]'"):
        train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_wandb_without_an_api_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = replace(CONFIG, logger=("wandb",))
    with pytest.raises(UserError, match="WANDB_MODE=offline"):
        train(config, RunDir(tmp_path / "run"), Console(quiet=True))


def test_an_unreachable_server_neither_delays_calls_nor_keeps_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(background, "STOP_SECONDS", 3.0)
    for name, value in UNREACHABLE.items():
        monkeypatch.setenv(name, value)
    logger = BackgroundLogger("wandb", tmp_path, "run", {}, print)
    for iteration in range(1000):
        logger.log(iteration, {"a": 1.0})
    with pytest.raises(TimeoutError, match="did not end within 3 s"):
        logger.close("interrupted")
    monkeypatch.chdir("/")
    until(lambda: not processes_in(tmp_path), 30, lambda: str(processes_in(tmp_path)))


def test_a_logger_ends_with_a_killed_training_process(tmp_path: Path):
    script = f"""
import os, pathlib, time
from paceline.run.loggers.background import BackgroundLogger
logger = BackgroundLogger("wandb", pathlib.Path({str(tmp_path)!r}), "run", {{}}, print)
while not os.path.exists("wandb.id"):
    time.sleep(0.1)
logger.log(1, {{"a": 1.5}})
time.sleep(0.5)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=os.environ | OFFLINE, timeout=60)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not processes_in(tmp_path), 30, lambda: str(processes_in(tmp_path)))
    (file,) = wandb_runs(RunDir(tmp_path))
    assert any(item.value_json == "1.5" for record in wandb_records(file) for item in record.history.item)
