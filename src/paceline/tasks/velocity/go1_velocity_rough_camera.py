"""A quadruped follows a commanded velocity over rough terrain that it sees with a depth camera."""

import math
from dataclasses import dataclass, replace

import mujoco
from torch import Tensor

from paceline.cameras.camera import Camera, add_cameras, look_at
from paceline.env.policy_interface import ObservationPart
from paceline.env.task import EnvState
from paceline.tasks.registry import TaskEntry
from paceline.tasks.velocity import go1_velocity_rough
from paceline.tasks.velocity.go1_velocity_rough import NUM_SCAN_POINTS, Go1VelocityRough

_TILT = math.radians(50.0)
"""Angle of the camera below the horizon, rad. The lower edge of its image shows the ground below the head."""
_CAMERA = Camera(
    width=48,
    height=48,
    streams=("depth",),
    body="trunk",
    pos=(0.29, 0.0, 0.01),
    quat=look_at((0.0, 0.0, 0.0), (math.cos(_TILT), 0.0, -math.sin(_TILT))),
    fovy=90.0,
    far=2.5,
    geom_groups=(0,),
)


@dataclass(frozen=True)
class Go1VelocityRoughCamera(Go1VelocityRough):
    """`Go1VelocityRough` whose policy observes a depth camera on the trunk in place of the height scan.

    The image targets are the height scan. The critic observes it as before.
    """

    camera: Camera = _CAMERA

    def model(self) -> mujoco.MjModel:
        spec = self.scene()
        add_cameras(spec, self.cameras())
        return spec.compile()

    def cameras(self) -> dict[str, Camera]:
        return {"front": self.camera}

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        obs = super().observe(state)
        return {
            "policy": obs["policy"][:, :-NUM_SCAN_POINTS],
            "critic": obs["critic"],
            "image_targets": obs["critic"][:, -NUM_SCAN_POINTS:],
        }

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        groups = super().observation_parts(model)
        *policy, scan = groups["policy"]
        return groups | {"policy": tuple(policy), "image_targets": (scan,)}


ENTRY = TaskEntry(
    Go1VelocityRoughCamera,
    summary="a quadruped follows a commanded velocity on rough terrain, seen by a depth camera",
    training=replace(
        go1_velocity_rough.ENTRY.training,
        image_channels=(16, 32, 32),
        image_kernels=(5, 4, 3),
        image_strides=(2, 2, 2),
        image_training="targets",
    ),
    max_iterations=1500,
    cpu_envs=64,
)
