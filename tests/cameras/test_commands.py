"""Commands on a run that was trained from images."""

from pathlib import Path

import av
import numpy as np
import onnxruntime
import pytest
import torch
from rich.console import Console

from paceline.errors import UserError
from paceline.evaluate import evaluate
from paceline.export import export
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.metrics_file import read_metrics
from paceline.train import train
from paceline.training.build import playable
from paceline.view.play import record
from tests.cameras.small import SMALL_ENCODER, SMALL_RUN


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "run"
    settings = {"horizon": 8, "epochs": 1, "minibatches": 2, "hidden": (16,), **SMALL_ENCODER}
    config = TrainConfig(**SMALL_RUN, num_envs=4, max_iterations=1, settings=settings, logger=("none",))
    train(config, RunDir(path), Console(quiet=True))
    return path


def test_the_time_of_rendering_is_a_part_of_the_collection(run: Path) -> None:
    (metrics,), _ = read_metrics(RunDir(run).metrics_file)
    assert 0.0 < metrics["seconds/render"] < metrics["seconds/collect"]


def test_the_video_shows_what_the_camera_sees(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "seen.mp4"
    record(str(run), file, seconds=0.2, width=96, height=64, seed=0, overlay=False, cameras=True)
    with av.open(str(file)) as container:
        frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
    env = playable(str(run), seed=0).env
    image = env.reset()["front_rgb"][0].permute(1, 2, 0).numpy()
    # The video is four times as large as the image, and compressed.
    seen = frame.reshape(16, 4, 24, 4, 3).mean((1, 3))
    assert np.abs(seen - image).mean() < 8.0


def test_a_task_without_cameras_has_nothing_to_show(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--cameras: the task cartpole has no cameras"):
        record(str(tiny_run), tmp_path / "video.mp4", seconds=0.1, width=96, height=64, seed=0, cameras=True)


@pytest.mark.parametrize("format", ["onnx", "torchscript"])
def test_an_exported_policy_takes_images_as_the_camera_gives_them(run: Path, format: str, tmp_path: Path) -> None:
    file = export(str(run), format, tmp_path / f"policy.{'onnx' if format == 'onnx' else 'pt'}")
    trained = playable(str(run))
    image = trained.env.reset()["front_rgb"].contiguous()
    assert image.dtype == torch.uint8
    if format == "onnx":
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(["actions"], {"front_rgb": image.numpy()})[0])
    else:
        found = torch.jit.load(str(file))(image)
    torch.testing.assert_close(found, trained.policy({"front_rgb": image}), rtol=1e-4, atol=1e-5)


def test_a_policy_with_a_camera_is_evaluated(run: Path) -> None:
    evaluation, _ = evaluate(str(run), episodes=3)
    assert evaluation.nominal is not None
    assert evaluation.nominal["length"].mean > 1.0
