"""Pictures of the cameras in TensorBoard."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.distributed.rank import Rank
from paceline.run import checkpoint
from paceline.run.config import TrainConfig, plain
from paceline.run.directory import RunDir
from paceline.run.metrics_file import read_metrics
from paceline.tasks.cartpole_camera import CartpoleCamera
from paceline.train import train
from paceline.training.build import make_env
from tests.cameras.small import SMALL_CAMERA, SMALL_ENCODER

CAMERA = replace(SMALL_CAMERA, streams=("rgb", "depth"), frames=2)
CONFIG = TrainConfig(
    task="cartpole-camera",
    env=plain(CartpoleCamera(camera=CAMERA)),
    num_envs=18,
    max_iterations=3,
    image_every=2,
    settings={"horizon": 4, "epochs": 1, "minibatches": 2, "hidden": (16,), **SMALL_ENCODER},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    directory = RunDir(tmp_path_factory.mktemp("pictures") / "run")
    train(CONFIG, directory, Console(quiet=True))
    return directory


def read(directory: RunDir) -> dict[str, dict[int, np.ndarray]]:
    """Return the pictures of a run by name and iteration, uint8 [height, width, 3]."""
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    return {
        name: {event.step: np.asarray(Image.open(BytesIO(event.encoded_image_string))) for event in events.Images(name)}
        for name in events.Tags()["images"]
    }


def test_the_time_of_physics_and_rendering_is_logged(run: RunDir) -> None:
    iterations, _ = read_metrics(run.metrics_file)
    for metrics in iterations:
        physics, rendering = metrics["seconds/physics"], metrics["seconds/rendering"]
        assert min(physics, rendering) > 0
        assert physics + rendering < metrics["seconds/collect"]


def test_tensorboard_shows_what_the_cameras_see(run: RunDir) -> None:
    pictures = read(run)
    assert {name: list(found) for name, found in pictures.items()} == {
        "cameras/front_rgb": [1, 3],
        "cameras/front_depth": [1, 3],
    }
    file = checkpoint.newest(run.checkpoints)
    assert file
    env = make_env(CONFIG, Rank(), range(18))
    env.load_state(checkpoint.load(file)["learner"]["envs"])
    obs = env.observe()
    for name, channels in (("front_rgb", slice(3, 6)), ("front_depth", slice(1, 2))):
        picture = pictures[f"cameras/{name}"][3]
        # Rows of four envs with 24 x 16 pixels.
        assert picture.shape == (64, 96, 3)
        row, column = 2, 3
        tile = torch.from_numpy(picture[16 * row : 16 * (row + 1), 24 * column : 24 * (column + 1)].copy())
        image = obs[name][4 * row + column, channels].permute(1, 2, 0).float()
        expected = image if name == "front_rgb" else 255.0 * (1.0 - image / CAMERA.far)
        torch.testing.assert_close(tile.float(), expected.expand(-1, -1, 3), rtol=0.0, atol=0.51)
        assert tile.float().std() > 1.0


def test_pictures_do_not_change_the_training(run: RunDir, tmp_path: Path) -> None:
    without = RunDir(tmp_path / "run")
    train(replace(CONFIG, image_every=0), without, Console(quiet=True))
    assert read(without) == {}
    files = [checkpoint.newest(directory.checkpoints) for directory in (run, without)]
    networks, expected = (checkpoint.load(file)["learner"]["networks"] for file in files if file)
    torch.testing.assert_close(networks, expected, rtol=0.0, atol=0.0)
