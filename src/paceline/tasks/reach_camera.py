"""An arm moves its tool to a goal that only its wrist camera shows."""

from dataclasses import dataclass, replace

import mujoco
from torch import Tensor

from paceline.cameras.camera import Camera, add_cameras
from paceline.env.policy_interface import XYZ, ObservationPart
from paceline.env.task import EnvState
from paceline.robots.scene import load
from paceline.tasks import reach
from paceline.tasks.reach import Reach
from paceline.tasks.registry import TaskEntry

_CAMERA = Camera(width=64, height=64, far=2.0)


@dataclass(frozen=True)
class ReachCamera(Reach):
    """`Reach` whose policy sees the goal, a red sphere, through the camera on the gripper.

    The image targets are the position of the goal in the frame of the tool.
    """

    observe_goal: bool = False
    camera: Camera = _CAMERA

    def model(self) -> mujoco.MjModel:
        spec = load("arm")
        spec.add_sensor(
            name="goal_in_tool",
            type=mujoco.mjtSensor.mjSENS_FRAMEPOS,
            objtype=mujoco.mjtObj.mjOBJ_BODY,
            objname="target",
            reftype=mujoco.mjtObj.mjOBJ_SITE,
            refname="tool",
        )
        add_cameras(spec, self.cameras())
        return spec.compile()

    def cameras(self) -> dict[str, Camera]:
        return {"wrist": self.camera}

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return super().observe(state) | {"image_targets": state.sensor("goal_in_tool")}

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        goal = ObservationPart("goal_in_tool", 3, "m", labels=XYZ, description="Position in the frame of the tool.")
        return super().observation_parts(model) | {"image_targets": (goal,)}


ENTRY = TaskEntry(
    ReachCamera,
    summary="an arm moves its tool to a goal that its wrist camera shows",
    training=replace(
        reach.ENTRY.training, image_channels=(16, 32, 32), image_kernels=(6, 4, 3), image_strides=(3, 2, 2)
    ),
    max_iterations=300,
    cpu_envs=64,
    gpu_envs=2048,
)
