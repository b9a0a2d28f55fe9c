"""A hand turns a cube that it sees with a camera to one goal rotation after the other."""

from dataclasses import dataclass, replace
from itertools import product

import mujoco
import torch
from torch import Tensor

from paceline.cameras.camera import Camera, add_cameras, look_at
from paceline.env.policy_interface import QUATERNION, XYZ, ObservationPart
from paceline.env.task import EnvState
from paceline.errors import UserError
from paceline.robots import shadow_hand
from paceline.tasks import shadow_hand_repose
from paceline.tasks.registry import TaskEntry
from paceline.tasks.shadow_hand_repose import CUBE_POS, CUBE_ROTATION, ShadowHandRepose
from paceline.tensors import rotations

_POS, _TARGET = (0.0, -0.35, 1.0), (0.0, -0.35, 0.5)
_CAMERA = Camera(
    width=120,
    height=120,
    streams=("rgb", "depth", "classes"),
    pos=_POS,
    quat=look_at(_POS, _TARGET),
    fovy=47.2,
    far=1.0,
    geom_groups=(0, 1),
)
_HALF_EDGE = 0.03
"""Half of the edge of the cube, m."""
_CORNERS = tuple(product((-_HALF_EDGE, _HALF_EDGE), repeat=3))


@dataclass(frozen=True)
class ShadowHandReposeCamera(ShadowHandRepose):
    """`ShadowHandRepose` whose policy observes the hand, the goal, and a camera above the hand.

    The image targets are the keypoints of the cube, its center and its 8 corners, relative to its place on the palm.
    The critic observes the state of the cube as before.
    """

    camera: Camera = _CAMERA

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy_observations != "state":
            found = f"--env.policy-observations {self.policy_observations}"
            raise UserError(f"{found}: the policy of this task observes the hand and a camera; leave the option out")

    def model(self) -> mujoco.MjModel:
        spec = shadow_hand.scene(self.physics_hz)
        add_cameras(spec, self.cameras())
        return spec.compile()

    def cameras(self) -> dict[str, Camera]:
        return {"front": self.camera}

    def geom_classes(self) -> dict[str, int]:
        return {"robot0:.*": 1, "cube": 2}

    def constants(self) -> dict[str, tuple[float, ...]]:
        return super().constants() | {"cube_corners": tuple(x for corner in _CORNERS for x in corner)}

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        constants, full = state.constants, super().observe(state)
        corners = constants["cube_corners"].view(-1, 3)
        center = state.qpos[:, CUBE_POS] - constants["in_hand_pos"]
        cube = center.unsqueeze(1) + rotations.rotate(state.qpos[:, CUBE_ROTATION], corners)
        goal = rotations.rotate(state.task_state["goal"], corners)
        policy = torch.cat((*self.observe_hand(state), state.task_state["goal"], goal.flatten(1)), dim=1)
        return {
            "policy": policy,
            "critic": full["critic"],
            "image_targets": torch.cat((center, cube.flatten(1)), dim=1),
        }

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        labels = tuple(f"corner {number} {axis}" for number in range(len(_CORNERS)) for axis in XYZ)
        goal = "Goal for the rotation of the cube."
        goal = ObservationPart("goal_rotation", 4, labels=QUATERNION, description=goal)
        corners = "Corners of the cube in its goal rotation, relative to its center."
        corners = ObservationPart("goal_corners", len(labels), "m", labels=labels, description=corners)
        place = "Position relative to the place of the cube on the palm."
        center = ObservationPart("cube_center", 3, "m", labels=XYZ, description=place)
        cube = ObservationPart("cube_corners", len(labels), "m", labels=labels, description=place)
        return super().observation_parts(model) | {
            "policy": (*self.hand_parts(model), goal, corners),
            "image_targets": (center, cube),
        }


ENTRY = TaskEntry(
    ShadowHandReposeCamera,
    summary="a Shadow Hand turns a cube, seen by a camera, to a sequence of goal rotations",
    training=replace(
        shadow_hand_repose.ENTRY.training,
        image_channels=(16, 32, 64, 128),
        image_kernels=(6, 4, 4, 3),
        image_strides=(2, 2, 2, 2),
        image_training="targets",
    ),
    max_iterations=3000,
    cpu_envs=16,
    gpu_envs=4096,
)
