"""Images that do not fit into memory are refused before they are allocated."""

from dataclasses import replace

import pytest

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.tasks.cartpole import Cartpole
from paceline.training.image_memory import check_image_memory
from tests.cameras.small import SMALL_CAMERA
from tests.cameras.test_tiled_camera import SmallTask


def test_the_size_of_all_streams_is_stated() -> None:
    env = RobotEnv(SmallTask(camera=replace(SMALL_CAMERA, streams=("rgb", "depth"))), 10)
    line = check_image_memory(env, horizon=7)
    # 10 envs, 7 + 3 steps, 16 x 24 pixels with 3 bytes of color and 2 bytes of depth.
    assert "10 envs, 7 steps; front_rgb 3x16x24, front_depth 1x16x24) need 192.0 kB of " in line


def test_a_task_without_images_needs_nothing() -> None:
    assert check_image_memory(RobotEnv(Cartpole(), 2), horizon=7) == ""


def test_too_many_images_are_refused() -> None:
    with pytest.raises(UserError, match=r"need 1\.2 PB, but cpu has .* free: use fewer envs"):
        check_image_memory(RobotEnv(SmallTask(), 10), horizon=10**11)
