from dataclasses import replace
from pathlib import Path

import av
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.loggers import background
from paceline.train import train
from paceline.view import training_videos
from paceline.view.training_videos import TrainingVideos
from tests.states import flat

CONFIG = TrainConfig(
    task="cartpole",
    env={},
    settings={"horizon": 8, "epochs": 1, "minibatches": 1, "hidden": (8,)},
    num_envs=4,
    max_iterations=2,
    video_every=2,
)


def test_a_video_is_recorded_and_logged_and_training_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_videos, "SECONDS", 0.5)
    monkeypatch.setattr(background, "CLOSE_SECONDS", 120.0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run, without = RunDir(tmp_path / "run"), RunDir(tmp_path / "without")
    config = replace(CONFIG, logger=("tensorboard", "wandb", "mlflow"))
    train(config, run, Console(quiet=True), callbacks=(TrainingVideos(),))
    train(CONFIG, without, Console(quiet=True))
    file = run.videos / "iteration_0002.mp4"
    with av.open(str(file)) as video:
        assert video.duration == pytest.approx(0.5 * av.time_base, rel=0.05)
    images = EventAccumulator(str(run.tensorboard)).Reload().Images("video")
    assert [(image.step, image.encoded_image_string[:4]) for image in images] == [(2, b"GIF8")]
    for pattern in ("wandb/offline-run-*/files/media/videos/*.mp4", "mlflow_artifacts/*/artifacts/videos/*.mp4"):
        (logged,) = run.path.glob(pattern)
        assert logged.read_bytes() == file.read_bytes()
    state, expected = (flat(checkpoint.load(checkpoint.newest(each.checkpoints))["learner"]) for each in (run, without))
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value, name


def test_training_continues_where_nothing_can_be_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    result = train(CONFIG, RunDir(tmp_path / "run"), Console(), callbacks=(TrainingVideos(),))
    assert result["status"] == "completed"
    assert "The recording of videos failed: MUJOCO_GL=disabled turns rendering off" in capsys.readouterr().out
