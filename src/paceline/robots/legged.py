"""Legged robots under position control, read from MJCF files of one dialect.

A robot file has a free joint first, then one position actuator per hinge, in the order of the hinges; the keyframe
"home", in which the robot stands; the geom classes "collision" and "foot"; one site per foot; and the camera "track".
Sensors: "gyro", "velocity" and "upvector" in the frame of the base, and FOOT_contact and FOOT_velocity for each foot.
"""

from dataclasses import dataclass
from functools import cached_property

import mujoco

from paceline.robots.own_model import with_robot
from paceline.robots.scene import load


@dataclass(frozen=True)
class LeggedRobot:
    """A robot file of this package. Values per joint come from the compiled model, in the order of the actuators."""

    name: str
    """Name of the file in `models`, without the suffix."""
    torso: str
    """Body whose mass and center of mass are randomized."""
    feet: tuple[str, ...]
    """Names of the foot sites. The geoms of a foot have names that begin with it."""

    @property
    def foot_geoms(self) -> str:
        """Regular expression for the names of the geoms that stand on the ground."""
        return f"({'|'.join(self.feet)}).*"

    def scene(self, robot_file: str = "") -> mujoco.MjSpec:
        """Return the robot on a floor. `robot_file` is the path of an MJCF model that replaces the links."""
        return with_robot(load(self.name), robot_file)

    @cached_property
    def model(self) -> mujoco.MjModel:
        """The compiled robot on a floor; do not write to it."""
        return self.scene().compile()

    @cached_property
    def joint_names(self) -> tuple[str, ...]:
        return tuple(self.model.actuator(i).name for i in range(self.model.nu))

    @cached_property
    def default_height(self) -> float:
        """Height of the base in the pose "home", meters."""
        return float(self.model.key("home").qpos[2])

    @cached_property
    def default_joint_pos(self) -> tuple[float, ...]:
        """Joint positions in the pose "home", radians."""
        return tuple(self.model.key("home").qpos[7:].tolist())

    @cached_property
    def kp(self) -> tuple[float, ...]:
        """Position gains, N m/rad."""
        return tuple(self.model.actuator_gainprm[:, 0].tolist())

    @cached_property
    def kd(self) -> tuple[float, ...]:
        """Velocity gains, N m s/rad."""
        return tuple((-self.model.actuator_biasprm[:, 2]).tolist())

    @cached_property
    def effort_limit(self) -> tuple[float, ...]:
        """Maximum torques, N m."""
        return tuple(self.model.actuator_forcerange[:, 1].tolist())

    def action_scale(self, fraction: float) -> tuple[float, ...]:
        """Return the position offsets, in radians, that apply `fraction` of the maximum torques to joints at rest."""
        return tuple(fraction * limit / kp for limit, kp in zip(self.effort_limit, self.kp, strict=True))


GO1_LEGS = ("FR", "FL", "RR", "RL")
"""Front or rear, right or left."""
GO1 = LeggedRobot("go1", torso="trunk", feet=tuple(f"{leg}_foot" for leg in GO1_LEGS))
G1 = LeggedRobot("g1", torso="torso_link", feet=("left_foot", "right_foot"))
