"""A quadruped of the Unitree Go1's class: 12.7 kg, 12 joints, drawn and collided with primitive geoms."""

import math
from dataclasses import dataclass
from itertools import product

import mujoco

from paceline.robots.scene import FLOOR, surroundings

LEGS = ("FR", "FL", "RR", "RL")
"""Front or rear, right or left; all joints, actuators and sensors come in this order, then hip, thigh, calf."""
JOINTS = tuple(f"{leg}_{part}_joint" for leg, part in product(LEGS, ("hip", "thigh", "calf")))
"""The order of the actuators, and of `qpos` after the trunk's seven numbers."""

ROTOR_INERTIA = 1.11842e-4
"""Of every motor, kg m^2, before the gear."""
NATURAL_HZ = 10.0
DAMPING_RATIO = 2.0


@dataclass(frozen=True)
class Link:
    """In the link's frame at zero angles: x forward, y left, z up; the origin is the link's joint."""

    mass: float
    """kg."""
    centre: tuple[float, float, float]
    """Of mass, metres."""
    inertia: tuple[float, float, float, float, float, float]
    """About the centre of mass, kg m^2: xx, yy, zz, xy, xz, yz."""

    def mirrored(self, x: int, y: int) -> "Link":
        """With x or y reversed where the sign is -1."""
        (cx, cy, cz), (xx, yy, zz, xy, xz, yz) = self.centre, self.inertia
        return Link(self.mass, (x * cx, y * cy, cz), (xx, yy, zz, x * y * xy, x * xz, y * yz))


@dataclass(frozen=True)
class Joint:
    """A geared motor under position control: torque = kp (target - angle) - kd speed, clamped at `torque`."""

    range: tuple[float, float]
    """Radians."""
    gear: float
    torque: float
    """Most it gives, N m."""

    @property
    def armature(self) -> float:
        """The rotor's inertia as felt at the joint, kg m^2: the rotor's times the gear's square."""
        return ROTOR_INERTIA * self.gear**2

    # The gains move the armature alone with the natural frequency and damping ratio above: soft enough that a policy's
    # targets act as torques, and the same for every motor in the motor's own terms.

    @property
    def kp(self) -> float:
        """armature w^2 with w = 2 pi NATURAL_HZ; N m/rad."""
        return self.armature * (2.0 * math.pi * NATURAL_HZ) ** 2

    @property
    def kd(self) -> float:
        """2 DAMPING_RATIO armature w; N m s/rad."""
        return 2.0 * DAMPING_RATIO * self.armature * (2.0 * math.pi * NATURAL_HZ)


@dataclass(frozen=True)
class Go1:
    """Published figures. Links are those of the front left leg; the others are its mirror images.

    The trunk and the calves are made symmetric: their centres of mass lie 2 mm and 1 mm to the left on the real robot.
    """

    hip_x: float = 0.1881
    """From the trunk's centre to the hips' axes, metres."""
    hip_y: float = 0.04675
    hip_length: float = 0.08
    """Sideways, from the hip's axis to the thigh's plane."""
    thigh_length: float = 0.213
    calf_length: float = 0.213
    """To the centre of the foot."""
    foot_radius: float = 0.023
    imu: tuple[float, float, float] = (-0.01592, -0.06659, -0.00617)
    """In the trunk's frame."""

    trunk: Link = Link(5.204, (0.0223, 0.0, -0.0005), (0.016813, 0.063010, 0.071655, 0.0, -2.9455e-4, 0.0))
    hip: Link = Link(
        0.68, (-0.0049166, -0.0076262, -8.865e-5), (3.9938e-4, 7.3342e-4, 4.6842e-4, -1.459e-5, 1.246e-6, 1.575e-6)
    )
    """Of a front leg; the rear ones are turned around."""
    thigh: Link = Link(
        1.009, (-0.0030472, -0.019315, -0.0305), (4.5988e-3, 4.6892e-3, 8.1745e-4, 6.137e-5, -2.2753e-4, 6.1081e-4)
    )
    calf: Link = Link(0.195862, (0.0042986, 0.0, -0.146197), (1.48449e-3, 1.49764e-3, 3.6068e-5, 0.0, -1.772e-5, 0.0))

    hip_joint: Joint = Joint((-0.863, 0.863), gear=6.0, torque=23.7)
    thigh_joint: Joint = Joint((-0.686, 4.501), gear=6.0, torque=23.7)
    calf_joint: Joint = Joint((-2.818, -0.888), gear=9.0, torque=35.55)

    home_hip: float = 0.1
    """Radians, towards the middle."""
    home_thigh: float = 0.9
    home_calf: float = -1.8
    foot_friction: float = 0.6

    @property
    def home_angles(self) -> tuple[float, ...]:
        """The joints' angles when standing, in the order of `JOINTS`."""
        return tuple(v for leg in LEGS for v in (-_left(leg) * self.home_hip, self.home_thigh, self.home_calf))

    @property
    def home_height(self) -> float:
        """Of the trunk's centre, metres, where the feet of the home pose touch flat ground."""
        thigh, calf = self.home_thigh, self.home_thigh + self.home_calf
        leg = self.thigh_length * math.cos(thigh) + self.calf_length * math.cos(calf)
        return leg * math.cos(self.home_hip) + self.hip_length * math.sin(self.home_hip) + self.foot_radius

    @property
    def home_qpos(self) -> tuple[float, ...]:
        return (0.0, 0.0, self.home_height, 1.0, 0.0, 0.0, 0.0, *self.home_angles)


GO1 = Go1()


def spec(robot: Go1 = GO1) -> mujoco.MjSpec:
    """The robot alone, with its sensors and the pose "home" as a keyframe."""
    return mujoco.MjSpec.from_string(f'<mujoco model="go1">{_robot(robot)}</mujoco>')


def scene(robot: Go1 = GO1, ground: str = FLOOR) -> mujoco.MjSpec:
    """The robot on the ground, given as MJCF, under a sky; the camera "track" follows it."""
    return mujoco.MjSpec.from_string(
        f'<mujoco model="go1">{_robot(robot, _FOLLOWERS)}{surroundings(ground, 0.3)}</mujoco>'
    )


# The light moves along, for its shadows reach no further than a few lengths of the robot.
_FOLLOWERS = """
    <light mode="trackcom" directional="true" pos=".3 -.6 1.5" dir="-.25 .45 -1" diffuse=".65 .65 .65"
      specular=".1 .1 .1"/>
    <camera name="track" mode="trackcom" pos=".75 -1.05 .3" xyaxes=".82 .58 0 -.15 .21 .97" fovy="38"/>"""


def _robot(robot: Go1, followers: str = "") -> str:
    """`followers` are MJCF elements of the trunk."""
    legs = "".join(_leg(robot, leg) for leg in LEGS)
    joints = ("hip", robot.hip_joint), ("thigh", robot.thigh_joint), ("calf", robot.calf_joint)
    motors = "".join(_motor(f"{leg}_{part}_joint", joint) for leg, (part, joint) in product(LEGS, joints))
    return f"""
    <compiler angle="radian"/>
    <option timestep=".005" integrator="implicitfast" cone="elliptic" impratio="10" iterations="10" ls_iterations="20"/>
    <default>
      <default class="shell">
        <geom contype="0" conaffinity="1" condim="1" solref=".01 1" group="1" rgba=".15 .35 .6 1"/>
        <default class="limb"><geom type="capsule" rgba=".5 .55 .6 1"/></default>
        <default class="foot">
          <!-- The priority lets the foot's friction stand whatever the ground's is. -->
          <geom type="sphere" condim="3" priority="1" friction="{robot.foot_friction!r}" rgba=".9 .45 .1 1"/>
        </default>
        <default class="drawn"><geom conaffinity="0" rgba=".2 .22 .25 1"/></default>
      </default>
    </default>
    <worldbody>
      <body name="trunk" pos="0 0 {robot.home_height!r}" childclass="shell">
        <freejoint name="trunk"/>
        {_inertial(robot.trunk)}
        <geom name="trunk" type="box" size=".16 .075 .05"/>
        <geom name="head" type="box" pos=".235 0 .005" size=".045 .05 .04"/>
        <geom name="back" class="drawn" type="box" pos="-.01 0 .05" size=".13 .05 .008"/>
        <geom name="face" class="drawn" type="box" pos=".275 0 .012" size=".008 .043 .028"/>
        <site name="trunk"/>
        <site name="imu" pos="{_text(robot.imu)}"/>
        {followers}
        {legs}
      </body>
    </worldbody>
    <actuator>{motors}</actuator>
    <sensor>
      <gyro name="gyro" site="imu"/>
      <velocimeter name="velocity" site="trunk"/>
      <framezaxis name="upvector" objtype="body" objname="world" reftype="site" refname="trunk"/>
      <contact name="trunk_contact" body1="trunk" data="found"/>
      {"".join(_leg_sensors(leg) for leg in LEGS)}
    </sensor>
    <keyframe><key name="home" qpos="{_text(robot.home_qpos)}" ctrl="{_text(robot.home_angles)}"/></keyframe>"""


def _leg(robot: Go1, leg: str) -> str:
    front, left = _front(leg), _left(leg)
    hip, thigh, calf = robot.hip.mirrored(front, left), robot.thigh.mirrored(1, left), robot.calf.mirrored(1, left)
    return f"""
    <body name="{leg}_hip" pos="{front * robot.hip_x!r} {left * robot.hip_y!r} 0">
      {_inertial(hip)}
      {_hinge(f"{leg}_hip_joint", "1 0 0", robot.hip_joint)}
      <geom name="{leg}_hip" class="limb" fromto="0 0 0 0 {left * 0.03!r} 0" size=".045"/>
      <body name="{leg}_thigh" pos="0 {left * robot.hip_length!r} 0">
        {_inertial(thigh)}
        {_hinge(f"{leg}_thigh_joint", "0 1 0", robot.thigh_joint)}
        <geom name="{leg}_shoulder" class="drawn" type="cylinder" fromto="0 {left * -0.015!r} 0 0 {left * 0.02!r} 0"
          size=".042"/>
        <geom name="{leg}_thigh" class="limb" fromto="0 0 -.01 0 0 {0.015 - robot.thigh_length!r}" size=".02"
          rgba=".15 .35 .6 1"/>
        <body name="{leg}_calf" pos="0 0 {-robot.thigh_length!r}">
          {_inertial(calf)}
          {_hinge(f"{leg}_calf_joint", "0 1 0", robot.calf_joint)}
          <geom name="{leg}_calf" class="limb" fromto="0 0 0 0 0 {0.02 - robot.calf_length!r}" size=".011"/>
          <geom name="{leg}_foot" class="foot" pos="0 0 {-robot.calf_length!r}" size="{robot.foot_radius!r}"/>
          <site name="{leg}_foot" pos="0 0 {-robot.calf_length!r}"/>
        </body>
      </body>
    </body>"""


def _leg_sensors(leg: str) -> str:
    # Whether there is contact is known from positions alone, the force only after the solver: two sensors. As the
    # second of the two geoms, the foot is told the ground's force on it, in the world's axes.
    return f"""
    <framepos name="{leg}_foot_position" objtype="site" objname="{leg}_foot"/>
    <framelinvel name="{leg}_foot_velocity" objtype="site" objname="{leg}_foot"/>
    <contact name="{leg}_foot_contact" geom1="{leg}_foot" data="found"/>
    <contact name="{leg}_foot_force" geom2="{leg}_foot" data="force" reduce="netforce"/>
    <contact name="{leg}_thigh_contact" geom1="{leg}_thigh" data="found"/>
    <contact name="{leg}_calf_contact" geom1="{leg}_calf" data="found"/>"""


def _inertial(link: Link) -> str:
    return f'<inertial mass="{link.mass!r}" pos="{_text(link.centre)}" fullinertia="{_text(link.inertia)}"/>'


def _hinge(name: str, axis: str, joint: Joint) -> str:
    return f'<joint name="{name}" axis="{axis}" range="{_text(joint.range)}" armature="{joint.armature!r}"/>'


def _motor(name: str, joint: Joint) -> str:
    # Targets are not limited: one beyond the joint's range is how a policy asks for torque at the range's end.
    return (
        f'<position name="{name}" joint="{name}" kp="{joint.kp!r}" kv="{joint.kd!r}" '
        f'forcerange="{-joint.torque!r} {joint.torque!r}"/>'
    )


def _front(leg: str) -> int:
    return 1 if leg[0] == "F" else -1


def _left(leg: str) -> int:
    return 1 if leg[1] == "L" else -1


def _text(numbers: tuple[float, ...]) -> str:
    return " ".join(map(repr, numbers))
