"""Tasks with cameras: the images show what the image targets describe."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.tasks.reach_camera import ReachCamera
from paceline.tasks.shadow_hand_repose_camera import ShadowHandReposeCamera
from paceline.tasks.velocity.go1_velocity_rough import NUM_SCAN_POINTS
from paceline.tasks.velocity.go1_velocity_rough_camera import Go1VelocityRoughCamera


def pixels(points: Tensor, fovy: float, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows and columns at which points [env, 3] in the frame of a camera are seen, and which of them are in
    the image of `size` x `size` pixels."""
    x, y, z = points.unbind(1)
    scale = 0.5 * size / (math.tan(math.radians(0.5 * fovy)) * -z)
    column, row = (0.5 * size + x * scale).floor().long(), (0.5 * size - y * scale).floor().long()
    seen = (z < 0.0) & (column >= 0) & (column < size) & (row >= 0) & (row < size)
    return row.clamp(0, size - 1), column.clamp(0, size - 1), seen


def test_the_wrist_camera_shows_the_goal_where_its_target_is():
    task = ReachCamera()
    env = RobotEnv(task, 32)
    obs = env.reset()
    # Pose of the camera in the frame of the tool, from the model: it looks along the tool's y axis.
    goal = obs["image_targets"] - torch.tensor((0.0, 0.033 - 0.14, -0.055))
    in_camera = torch.stack((-goal[:, 0], -goal[:, 2], -goal[:, 1]), dim=1)
    row, column, seen = pixels(in_camera, 75.0, task.camera.height)
    assert seen.float().mean() > 0.9
    red, green, blue = obs["wrist_rgb"][torch.arange(32), :, row, column].float().unbind(1)
    assert ((red > 2.0 * green) & (red > 2.0 * blue))[seen].float().mean() > 0.9


def test_only_the_camera_shows_the_goal_to_the_policy():
    task = ReachCamera(camera=replace(ReachCamera().camera, width=8, height=8))
    first, second = (RobotEnv(replace(task, goal_z=(height, height)), 1).reset() for height in (0.8, 0.9))
    assert torch.equal(first["policy"], second["policy"])
    assert not torch.equal(first["critic"], second["critic"])


def test_the_hand_camera_shows_the_cube_where_its_keypoints_are():
    task = ShadowHandReposeCamera()
    env = RobotEnv(task, 8)
    obs = env.reset()
    keypoints = obs["image_targets"].unflatten(1, (9, 3)) + env.env_state.constants["in_hand_pos"]
    center, corners = keypoints[:, 0], keypoints[:, 1:]
    torch.testing.assert_close(center, env.env_state.qpos[:, 24:27])
    torch.testing.assert_close(corners.mean(1), center)
    torch.testing.assert_close((corners - center.unsqueeze(1)).norm(dim=2), torch.full((8, 8), 0.03 * math.sqrt(3.0)))
    row, column, seen = pixels(center - torch.tensor((0.0, -0.35, 1.0)), 47.2, task.camera.height)
    assert seen.all()
    assert (obs["front_classes"][torch.arange(8), 0, row, column] == 2).all()
    # The surface is nearer than the center of the cube by at most half of its diagonal.
    depth = 1.0 - center[:, 2] - obs["front_depth"][torch.arange(8), 0, row, column].float()
    assert ((depth > 0.02) & (depth < 0.055)).all()


def test_the_hand_camera_task_refuses_other_observations():
    with pytest.raises(UserError, match="leave the option out"):
        ShadowHandReposeCamera(policy_observations="fingertips")


def test_the_camera_of_the_quadruped_measures_its_height_over_flat_ground():
    task = Go1VelocityRoughCamera()
    # The ray in the middle of an image with an odd number of pixels is the axis of the camera.
    camera = replace(task.camera, width=9, height=9, pos=(0.0, 0.0, 0.0))
    env = RobotEnv(replace(task, camera=camera, initial_terrain_levels=1), 8)
    obs = env.reset()
    scan = obs["image_targets"]
    assert torch.equal(scan, obs["critic"][:, -NUM_SCAN_POINTS:])
    flat = (scan.std(1) < 1e-4) & (env.env_state.sensor("upvector")[:, 2] > 0.9999)
    assert flat.any()
    # The scan is the height of the ground relative to the ground under a standing robot.
    height = env.env_state.constants["default_height"].view(1) - scan[:, NUM_SCAN_POINTS // 2]
    depth = obs["front_depth"][:, 0, 4, 4].float()
    torch.testing.assert_close(depth[flat], (height / math.sin(math.radians(50.0)))[flat], atol=0.005, rtol=0.0)
