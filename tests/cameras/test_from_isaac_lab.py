"""The code and the formulas of docs/from_isaac_lab_cameras.md."""

import math
import re
import sys
from pathlib import Path
from types import ModuleType

import mujoco
import numpy as np
import pytest

from paceline.env.robot_env import RobotEnv

PAGE = Path(__file__).parents[2] / "docs" / "from_isaac_lab_cameras.md"
BLOCKS = dict(re.findall(r'^```\w+ title="([^"]+)\.py"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL))
# Forward, left and up axes of a camera in the frames of each convention.
AXES = {
    "opengl": ((0, 0, -1), (-1, 0, 0), (0, 1, 0)),
    "ros": ((0, 0, 1), (-1, 0, 0), (0, -1, 0)),
    "world": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The code blocks of the page as modules."""
    found = {}
    for name, code in BLOCKS.items():
        found[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, found[name])
        exec(code, vars(found[name]))
    return found


def rotate(quat: tuple[float, ...], vector: tuple[float, ...]) -> np.ndarray:
    rotated = np.zeros(3)
    mujoco.mju_rotVecQuat(rotated, np.array(vector, dtype=float), np.array(quat))
    return rotated


@pytest.mark.parametrize("convention", AXES)
def test_converted_orientations_look_in_the_same_direction(convention: str, modules: dict[str, ModuleType]) -> None:
    rot = np.random.default_rng(0).normal(size=4)
    rot /= np.linalg.norm(rot)
    quat = modules["isaac_camera"].camera_quat(tuple(rot), convention)
    for axis, opengl_axis in zip(AXES[convention], AXES["opengl"], strict=True):
        np.testing.assert_allclose(rotate(quat, opengl_axis), rotate(tuple(rot), axis), atol=1e-12)


def test_the_camera_of_the_hand_sees_the_cube_where_isaac_labs_does(modules: dict[str, ModuleType]) -> None:
    task = modules["seen_hand"].SeenHand()
    assert f"{task.camera.fovy:.1f} degrees" in PAGE.read_text().replace("\n", " ")
    np.testing.assert_allclose(task.camera.quat, (math.sqrt(0.5), 0.0, 0.0, -math.sqrt(0.5)), atol=1e-4)
    env = RobotEnv(task, 2)
    obs = env.reset()
    assert {name: tuple(image.shape) for name, image in obs.items() if name.startswith("top")} == {
        "top_rgb": (2, 3, 120, 120),
        "top_depth": (2, 1, 120, 120),
        "top_classes": (2, 1, 120, 120),
    }
    assert obs["top_rgb"].permute(0, 2, 3, 1).is_contiguous()
    assert obs["top_classes"].unique().tolist() == [0, 1, 2]
    # Isaac Lab's camera projects the center of the cube with its own frame and intrinsic matrix.
    forward, left, up = (rotate((math.sqrt(0.5), 0.0, math.sqrt(0.5), 0.0), axis) for axis in AXES["world"])
    focal_pixels = 120 * 24.0 / 20.955
    for index in range(2):
        center = env.sim.qpos[index, 24:27].double().numpy() - np.array((0.0, -0.35, 1.0))
        depth = forward @ center
        pixel = np.array((60.0 - focal_pixels * (up @ center) / depth, 60.0 - focal_pixels * (left @ center) / depth))
        cube = obs["top_classes"][index, 0] == 2
        seen = cube.nonzero().double().mean(0).numpy() + 0.5
        np.testing.assert_allclose(seen, pixel, atol=2.0)
        # The nearest point of a cube with an edge of 6 cm is 3 to 5.2 cm in front of its center.
        assert 0.025 < depth - obs["top_depth"][index, 0][cube].min().item() < 0.055
    # The floor.
    assert obs["top_depth"].max().item() == pytest.approx(1.0, abs=1e-3)


def test_the_field_of_view_follows_the_aspect_ratio(modules: dict[str, ModuleType]) -> None:
    fovy = modules["isaac_camera"].camera_fovy(160, 90, focal_length=12.0, horizontal_aperture=16.0)
    # 4.5 units above the center at a distance of 12.
    assert fovy == pytest.approx(2.0 * math.degrees(math.atan2(4.5, 12.0)))
