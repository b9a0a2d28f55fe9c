"""Legged robots under position control, read from MJCF files with the same conventions.

A robot file has a free joint first, then one position actuator per hinge, in the order of the hinges; the keyframe
"home", in which the robot stands; the geom classes "collision" and "foot"; one site per foot; and the camera "track".
Sensors: "gyro", "velocity" and "upvector" in the frame of the base, and FOOT_contact and FOOT_velocity for each foot.
"""

from typing import NamedTuple

import mujoco

from paceline.robots.own_model import with_robot
from paceline.robots.scene import load


class LeggedRobot(NamedTuple):
    """A robot file of this package."""

    name: str
    """Name of the file in `models`, without the suffix."""
    torso: str
    """Body whose mass and center of mass are randomized."""
    feet: tuple[str, ...]
    """Names of the foot sites. The geoms of a foot have names that begin with it."""

    def scene(self, robot_file: str = "") -> mujoco.MjSpec:
        """Return the robot on a floor. `robot_file` is the path of an MJCF model that replaces the links."""
        return with_robot(load(self.name), robot_file)


GO1_LEGS = ("FR", "FL", "RR", "RL")
"""Front or rear, right or left."""
GO1 = LeggedRobot("go1", torso="trunk", feet=tuple(f"{leg}_foot" for leg in GO1_LEGS))
G1 = LeggedRobot("g1", torso="torso_link", feet=("left_foot", "right_foot"))
