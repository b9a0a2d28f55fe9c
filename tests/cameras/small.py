"""A small camera and a small encoder, for tests that train on images."""

from dataclasses import replace
from typing import Any

from paceline.run.config import plain
from paceline.tasks.cartpole_camera import CartpoleCamera
from paceline.tasks.reach_camera import ReachCamera

SMALL_CAMERA = replace(CartpoleCamera().camera, width=24, height=16, frames=1)
SMALL_CAMERA_OF_ARM = replace(ReachCamera().camera, width=16, height=16)
SMALL_ENCODER: dict[str, Any] = {
    "image_channels": (4, 8),
    "image_kernels": (4, 3),
    "image_strides": (2, 2),
    "image_features": 16,
}
# Task and options of a run, as in `TrainConfig`.
SMALL_RUN: dict[str, Any] = {"task": "cartpole-camera", "env": plain(CartpoleCamera(camera=SMALL_CAMERA))}


def with_small_camera(task: Any) -> Any:
    """Return a task whose camera, if it has one, has few pixels, which are rendered quickly."""
    return replace(task, camera=replace(task.camera, width=8, height=8)) if hasattr(task, "camera") else task
