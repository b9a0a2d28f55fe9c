"""A humanoid of the Unitree G1's size, weight and strength: 29 joints, drawn and collided with primitive shapes.

Frames: x ahead, y left, z up; metres, kilograms, radians. A link's frame stands at its joint, and the tables hold the
left side only: the right side is its mirror image, exactly. The parts that say `collides` have conaffinity 1 and
contype 0, terrain has the reverse: only pairs of the two collide, never two parts of the robot.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import mujoco

from paceline.robots.scene import FLOOR, surroundings

Vector = tuple[float, float, float]

NATURAL_HZ, DAMPING_RATIO = 10.0, 2.0
STANDING_HEIGHT = 0.757
"""Of the pelvis, in the home pose."""


@dataclass(frozen=True)
class Motor:
    """A drive as its joint feels it.

    The gains let the joint's own rotors swing at `NATURAL_HZ` with `DAMPING_RATIO`, whatever hangs on the joint:
    kp = armature * w^2, kd = 2 * DAMPING_RATIO * armature * w, with w = 2 pi * NATURAL_HZ.
    """

    torque: float
    """The limit, in newton metres."""
    armature: float
    """The rotors' inertia behind the gears, in kg m^2."""

    @property
    def kp(self) -> float:
        return self.armature * (2.0 * math.pi * NATURAL_HZ) ** 2

    @property
    def kd(self) -> float:
        return 2.0 * DAMPING_RATIO * self.armature * 2.0 * math.pi * NATURAL_HZ

    def pair(self) -> "Motor":
        """Two of them on one joint, through a linkage of ratio 1."""
        return Motor(2.0 * self.torque, 2.0 * self.armature)


def _geared(torque: float, inertias: Vector, ratios: tuple[float, float]) -> Motor:
    """Inertias of the rotor, the first and the second planet carrier; the ratios of the two stages."""
    rotor, first, second = inertias
    return Motor(torque, rotor * (ratios[0] * ratios[1]) ** 2 + first * ratios[1] ** 2 + second)


# Armatures: 0.003610, 0.010178, 0.025102, 0.004250. So kp: 14.25, 40.18, 99.10, 16.78; kd: 0.907, 2.558, 6.309, 1.068.
M5020 = _geared(25.0, (0.139e-4, 0.017e-4, 0.169e-4), (1 + 46 / 18, 1 + 56 / 16))
M7520_14 = _geared(88.0, (0.489e-4, 0.098e-4, 0.533e-4), (4.5, 1 + 48 / 22))
M7520_22 = _geared(139.0, (0.489e-4, 0.109e-4, 0.738e-4), (4.5, 5.0))
M4010 = _geared(5.0, (0.068e-4, 0.0, 0.0), (5.0, 5.0))


@dataclass(frozen=True)
class Hinge:
    motor: Motor
    axis: str
    low: float
    high: float
    home: float = 0.0
    """The angle in the home pose."""


@dataclass(frozen=True)
class Weight:
    mass: float
    center: Vector
    inertia: tuple[float, float, float, float, float, float]
    """About the centre: xx, yy, zz, xy, xz, yz."""


@dataclass(frozen=True)
class Part:
    """A capsule from `at` to `to`, or a box around `at`."""

    material: str
    at: Vector
    to: Vector | None = None
    radius: float = 0.0
    half: Vector | None = None
    """A box's half sizes."""
    collides: str = ""
    """The geom's name, less the side; a part without one is only drawn."""


@dataclass(frozen=True)
class Link:
    """A body and the hinge that carries it."""

    name: str
    hinge: Hinge
    weight: Weight
    offset: Vector
    """Of the hinge, in the parent's frame."""
    parts: tuple[Part, ...] = ()
    tilt: Vector = (0.0, 0.0, 0.0)
    """Of the frame in the parent's, about one of the axes."""
    site: tuple[str, Vector] | None = None
    side: str = ""

    @property
    def joint(self) -> str:
        return f"{self.side}{self.name}_joint"

    @property
    def body(self) -> str:
        return "torso_link" if self.name == "waist_pitch" else f"{self.side}{self.name}_link"


# The thigh's frames lean back from the hip to the knee, and the shoulder's droops from the chest.
_HIP_TILT, _SHOULDER_TILT = 0.1749, 0.2793

_FOOT_PARTS = (
    # Two runners: four contacts on a flat floor, and no gap along the foot for a step's edge to slip into.
    Part("dark", (-0.050, 0.024, -0.025), (0.126, 0.024, -0.025), 0.010, collides="foot_outer"),
    Part("dark", (-0.050, -0.024, -0.025), (0.126, -0.024, -0.025), 0.010, collides="foot_inner"),
    Part("dark", (0.038, 0.0, -0.0235), half=(0.095, 0.024, 0.0095)),
    Part("dark", (-0.020, 0.0, -0.010), (0.060, 0.0, -0.014), 0.016),
)
_LEG = (
    Link(
        "hip_pitch",
        Hinge(M7520_14, "y", -2.5307, 2.8798, home=-0.312),
        Weight(1.35, (0.002741, 0.047791, -0.02606), (0.001811, 0.0014193, 0.0012812, 3.68e-5, -3.44e-5, 1.71e-4)),
        (0.0, 0.064452, -0.1027),
        (Part("dark", (0.0, 0.005, 0.0), (0.0, 0.050, -0.005), 0.045),),
    ),
    Link(
        "hip_roll",
        Hinge(M7520_22, "x", -0.5236, 2.9671),
        Weight(1.52, (0.029812, -0.001045, -0.087934), (0.0023773, 0.0024123, 0.0016595, -3.8e-6, -3.908e-4, 1.84e-5)),
        (0.0, 0.052, -0.030465),
        (Part("shell", (0.012, 0.0, -0.010), (0.022, 0.0, -0.090), 0.054),),
        tilt=(0.0, -_HIP_TILT, 0.0),
    ),
    Link(
        "hip_yaw",
        Hinge(M7520_14, "z", -2.7576, 2.7576),
        Weight(
            1.702, (-0.057709, -0.010981, -0.15078), (0.0057774, 0.0076124, 0.003149, -5.411e-4, -0.0023948, -7.072e-4)
        ),
        (0.025001, 0.0, -0.12412),
        (Part("shell", (-0.004, 0.0, -0.030), (-0.062, 0.0, -0.150), 0.052, collides="thigh"),),
    ),
    Link(
        "knee",
        Hinge(M7520_22, "y", -0.087267, 2.8798, home=0.669),
        Weight(1.932, (0.005457, 0.003964, -0.12074), (0.011329, 0.011277, 0.0015168, 4.82e-5, -4.49e-5, -7.146e-4)),
        (-0.078273, 0.0021489, -0.17734),
        (
            Part("dark", (0.0, -0.028, 0.0), (0.0, 0.028, 0.0), 0.044),
            Part("shell", (0.018, 0.0, -0.040), (0.008, 0.0, -0.200), 0.042, collides="shin"),
            Part("dark", (0.004, 0.0, -0.220), (0.0, 0.0, -0.285), 0.028),
        ),
        tilt=(0.0, _HIP_TILT, 0.0),
    ),
    Link(
        "ankle_pitch",
        Hinge(M5020.pair(), "y", -0.87267, 0.5236, home=-0.363),
        Weight(0.074, (-0.007269, 0.0, 0.011137), (8.4e-6, 1.89e-5, 1.26e-5, 0.0, -2.9e-6, 0.0)),
        (0.0, -9.4445e-5, -0.30001),
        (Part("dark", (0.0, -0.018, 0.0), (0.0, 0.018, 0.0), 0.016),),
    ),
    Link(
        "ankle_roll",
        Hinge(M5020.pair(), "x", -0.2618, 0.2618),
        Weight(0.608, (0.026505, 0.0, -0.016425), (2.231e-4, 0.0016161, 0.0016667, 2e-7, 8.91e-5, -1e-7)),
        (0.0, 0.0, -0.017558),
        _FOOT_PARTS,
        site=("foot", (0.04, 0.0, -0.035)),
    ),
)
_PELVIS = Weight(3.813, (0.0, 0.0, -0.07605), (0.010549, 0.0093089, 0.0079184, 0.0, 2.1e-6, 0.0))
_PELVIS_PARTS = (
    Part("dark", (0.0, -0.045, -0.085), (0.0, 0.045, -0.085), 0.058, collides="pelvis"),
    Part("shell", (0.0, -0.030, -0.040), (0.0, 0.030, -0.040), 0.050),
)
_HEAD_PARTS = (
    Part("dark", (0.0, 0.0, 0.28), (0.0, 0.0, 0.33), 0.040),
    Part("shell", (-0.006, 0.0, 0.375), (0.0, 0.0, 0.430), 0.059, collides="head"),
    Part("visor", (0.016, 0.0, 0.378), (0.020, 0.0, 0.425), 0.051),
)
# The trunk's centres of mass lie within half a millimetre of its plane of symmetry: here, in it.
_WAIST = (
    Link(
        "waist_yaw",
        Hinge(M7520_14, "z", -2.618, 2.618),
        Weight(0.214, (0.003494, 0.0, 0.018034), (1.067e-4, 1.042e-4, 1.625e-4, 0.0, -7.6e-6, 0.0)),
        (0.0, 0.0, 0.0),
        (Part("dark", (0.0, 0.0, 0.0), (0.0, 0.0, 0.035), 0.046),),
    ),
    Link(
        "waist_roll",
        Hinge(M5020.pair(), "x", -0.52, 0.52),
        Weight(0.086, (0.0, 0.0, 0.0), (7.1e-6, 6.3e-6, 8.2e-6, 0.0, 0.0, 0.0)),
        (-0.0039635, 0.0, 0.044),
    ),
    Link(
        "waist_pitch",
        Hinge(M5020.pair(), "y", -0.52, 0.52),
        Weight(7.818, (0.0020316, 0.0, 0.184568), (0.1216984, 0.1098251, 0.027522, 0.0, -0.0037423, 0.0)),
        (0.0, 0.0, 0.0),
        (
            Part("shell", (0.010, -0.030, 0.205), (0.010, 0.030, 0.205), 0.082, collides="torso"),
            Part("shell", (0.006, -0.020, 0.125), (0.006, 0.020, 0.125), 0.072),
            Part("shell", (0.003, -0.008, 0.060), (0.003, 0.008, 0.060), 0.062),
            Part("dark", (0.075, 0.0, 0.215), half=(0.021, 0.026, 0.018)),
            Part("dark", (0.0, -0.085, 0.242), (0.0, 0.085, 0.242), 0.042),
            *_HEAD_PARTS,
        ),
    ),
)
_ARM = (
    Link(
        "shoulder_pitch",
        Hinge(M5020, "y", -3.0892, 2.6704, home=0.2),
        Weight(0.718, (0.0, 0.035892, -0.011628), (4.291e-4, 4.53e-4, 4.23e-4, -9.2e-6, 6.4e-6, 2.26e-5)),
        (0.0039563, 0.10022, 0.24778),
        (Part("shell", (0.0, 0.015, -0.003), (0.0, 0.042, -0.012), 0.040),),
        tilt=(_SHOULDER_TILT, 0.0, 0.0),
    ),
    Link(
        "shoulder_roll",
        Hinge(M5020, "x", -1.5882, 2.2515, home=0.2),
        Weight(0.643, (-2.27e-4, 0.00727, -0.063243), (6.177e-4, 6.912e-4, 3.894e-4, -1e-6, 8.7e-6, -5.3e-6)),
        (0.0, 0.038, -0.013831),
        (Part("shell", (0.0, 0.004, -0.015), (0.0, 0.006, -0.090), 0.036),),
        tilt=(-_SHOULDER_TILT, 0.0, 0.0),
    ),
    Link(
        "shoulder_yaw",
        Hinge(M5020, "z", -2.618, 2.618),
        Weight(0.734, (0.010773, -0.002949, -0.072009), (9.988e-4, 0.0010605, 4.354e-4, 7.9e-6, 1.412e-4, -2.86e-5)),
        (0.0, 0.00624, -0.1032),
        (Part("dark", (0.0, 0.0, -0.005), (0.012, 0.0, -0.070), 0.033),),
    ),
    Link(
        "elbow",
        Hinge(M5020, "y", -1.0472, 2.0944, home=0.6),
        Weight(0.6, (0.064956, 0.004454, -0.010062), (2.891e-4, 4.152e-4, 4.197e-4, 6.53e-5, 1.72e-5, -5.6e-6)),
        (0.015783, 0.0, -0.080518),
        (Part("shell", (0.005, 0.0, -0.008), (0.085, 0.0, -0.010), 0.033, collides="forearm"),),
    ),
    Link(
        "wrist_roll",
        Hinge(M5020, "x", -1.97222, 1.97222),
        Weight(0.085445, (0.0171394, 5.376e-4, 0.0), (4.82e-5, 3.72e-5, 5.48e-5, -4.2e-6, 0.0, 0.0)),
        (0.1, 0.0018879, -0.01),
        (Part("dark", (0.0, 0.0, 0.0), (0.030, 0.0, 0.0), 0.028),),
    ),
    Link(
        "wrist_pitch",
        Hinge(M4010, "y", -1.61443, 1.61443),
        Weight(0.48405, (0.0229999, -0.0011168, -0.0011166), (1.658e-4, 4.295e-4, 4.295e-4, -1.23e-5, 1.23e-5, 8e-7)),
        (0.038, 0.0, 0.0),
        (Part("shell", (0.0, 0.0, 0.0), (0.040, 0.0, 0.0), 0.030),),
    ),
    Link(
        "wrist_yaw",
        Hinge(M4010, "z", -1.61443, 1.61443),
        Weight(0.254576, (0.0708244, 1.917e-4, 0.0016174), (1.504e-4, 6.431e-4, 5.601e-4, 3.76e-5, -3.0e-6, 3.8e-6)),
        (0.046, 0.0, 0.0),
        (
            Part("dark", (0.020, 0.0, 0.0), (0.125, -0.008, 0.0), 0.027, collides="hand"),
            Part("dark", (0.060, -0.020, 0.012), (0.100, -0.034, 0.030), 0.012),
        ),
    ),
)


def _across(vector: Vector) -> Vector:
    return vector[0], -vector[1], vector[2]


def _left(link: Link) -> Link:
    return replace(link, side="left_")


def _right(link: Link) -> Link:
    """A mirror across the xz plane turns the rotations about x and z around, and keeps those about y."""
    hinge, weight = link.hinge, link.weight
    if hinge.axis != "y":
        hinge = replace(hinge, low=-hinge.high, high=-hinge.low, home=-hinge.home)
    xx, yy, zz, xy, xz, yz = weight.inertia
    return replace(
        link,
        hinge=hinge,
        weight=Weight(weight.mass, _across(weight.center), (xx, yy, zz, -xy, xz, -yz)),
        offset=_across(link.offset),
        parts=tuple(replace(part, at=_across(part.at), to=part.to and _across(part.to)) for part in link.parts),
        tilt=(-link.tilt[0], link.tilt[1], -link.tilt[2]),
        site=link.site and (link.site[0], _across(link.site[1])),
        side="right_",
    )


_LEFT_LEG, _RIGHT_LEG = tuple(map(_left, _LEG)), tuple(map(_right, _LEG))
_LEFT_ARM, _RIGHT_ARM = tuple(map(_left, _ARM)), tuple(map(_right, _ARM))

LINKS = (*_LEFT_LEG, *_RIGHT_LEG, *_WAIST, *_LEFT_ARM, *_RIGHT_ARM)
"""In the order of the joints, which is also that of the actuators."""
JOINTS = tuple(link.joint for link in LINKS)
HOME_QPOS = (0.0, 0.0, STANDING_HEIGHT, 1.0, 0.0, 0.0, 0.0, *(link.hinge.home for link in LINKS))


def spec() -> mujoco.MjSpec:
    """The robot alone, with its sensors and the pose "home" as a keyframe."""
    return mujoco.MjSpec.from_string(f'<mujoco model="g1">{_robot()}</mujoco>')


def scene(ground: str = FLOOR) -> mujoco.MjSpec:
    """The robot on the ground, given as MJCF, under a sky; the camera "track" follows it."""
    return mujoco.MjSpec.from_string(f'<mujoco model="g1">{_robot(_FOLLOWERS)}{surroundings(ground, 0.7)}</mujoco>')


# The light moves along, and stands where its direction comes from: shadows are drawn near its own axis alone.
_FOLLOWERS = """
          <camera name="track" mode="trackcom" pos="1.75 -1.55 .45" xyaxes="1.55 1.75 0 -.79 .7 5.47" fovy="40"/>
          <light mode="trackcom" directional="true" pos=".75 -1.35 3" dir="-.25 .45 -1" diffuse=".65 .65 .65"
            specular=".1 .1 .1"/>"""


def _robot(followers: str = "") -> str:
    torso = _chain(_WAIST, _chain(_LEFT_ARM) + _chain(_RIGHT_ARM))
    return f"""
      <compiler angle="radian"/>
      <option timestep=".005" integrator="implicitfast" iterations="10" ls_iterations="20"/>
      <default>
        <default class="drawn">
          <geom group="1" contype="0" conaffinity="0"/>
          <default class="collides"><geom conaffinity="1"/></default>
          <default class="foot"><geom conaffinity="1" priority="1" friction=".6"/></default>
        </default>
      </default>
      <asset>
        <material name="shell" rgba=".78 .8 .82 1"/>
        <material name="dark" rgba=".16 .17 .19 1"/>
        <material name="visor" rgba=".05 .07 .1 1" specular=".9" shininess=".9"/>
      </asset>
      <worldbody>
        <body name="pelvis" pos="0 0 {STANDING_HEIGHT}">
          <freejoint name="floating_base_joint"/>
          {_inertial(_PELVIS)}
          <site name="imu" pos=".04525 0 -.08339"/>
          {followers}{_geoms(_PELVIS_PARTS)}{_chain(_LEFT_LEG)}{_chain(_RIGHT_LEG)}{torso}
        </body>
      </worldbody>
      <actuator>{"".join(map(_actuator, LINKS))}</actuator>
      <sensor>
        <gyro name="gyro" site="imu"/>
        <velocimeter name="velocity" site="imu"/>
        <framezaxis name="upvector" objtype="body" objname="world" reftype="site" refname="imu"/>
        <contact name="torso_contact" body1="torso_link" data="found"/>
        <contact name="pelvis_contact" body1="pelvis" data="found"/>
        {_foot_sensors("left")}{_foot_sensors("right")}
      </sensor>
      <keyframe><key name="home" qpos="{_numbers(HOME_QPOS)}" ctrl="{_numbers(HOME_QPOS[7:])}"/></keyframe>"""


def _numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:.9g}" for value in values)


def _chain(links: tuple[Link, ...], inside: str = "") -> str:
    """Bodies: each link hangs on the one before it; `inside` hangs on the last."""
    for link in reversed(links):
        inside = _body(link, inside)
    return inside


def _body(link: Link, inside: str) -> str:
    hinge = link.hinge
    turns = f'axis="{_numbers(letter == hinge.axis for letter in "xyz")}" range="{hinge.low} {hinge.high}"'
    site = f'<site name="{link.side}{link.site[0]}" pos="{_numbers(link.site[1])}"/>' if link.site else ""
    return f"""
      <body name="{link.body}" pos="{_numbers(link.offset)}" euler="{_numbers(link.tilt)}">
        <joint name="{link.joint}" {turns} armature="{hinge.motor.armature:.9g}"/>
        {_inertial(link.weight)}
        {site}{_geoms(link.parts, link.side)}{inside}
      </body>"""


def _inertial(weight: Weight) -> str:
    inertia = _numbers(weight.inertia)
    return f'<inertial mass="{weight.mass}" pos="{_numbers(weight.center)}" fullinertia="{inertia}"/>'


def _geoms(parts: tuple[Part, ...], side: str = "") -> str:
    return "".join(_geom(part, side) for part in parts)


def _geom(part: Part, side: str) -> str:
    kind = 'class="drawn"'
    if part.collides:
        kind = f'name="{side}{part.collides}" class="{"foot" if part.collides.startswith("foot") else "collides"}"'
    if part.to:
        shape = f'type="capsule" fromto="{_numbers(part.at + part.to)}" size="{part.radius}"'
    else:
        shape = f'type="box" pos="{_numbers(part.at)}" size="{_numbers(part.half or ())}"'
    return f'<geom {kind} {shape} material="{part.material}"/>'


def _actuator(link: Link) -> str:
    # Targets are not limited: one beyond the joint's range is how a policy asks for torque at the range's end.
    motor = link.hinge.motor
    gains, limit = f'kp="{motor.kp:.9g}" kv="{motor.kd:.9g}"', f"{-motor.torque} {motor.torque}"
    return f'<position name="{link.joint}" joint="{link.joint}" {gains} forcerange="{limit}"/>'


def _foot_sensors(side: str) -> str:
    # Whether there is contact is known from positions alone, the force only after the solver: two sensors. As the
    # second of the two bodies, the foot is told the ground's force on it, in the world's axes.
    return f"""
        <framepos name="{side}_foot_position" objtype="site" objname="{side}_foot"/>
        <framelinvel name="{side}_foot_velocity" objtype="site" objname="{side}_foot"/>
        <contact name="{side}_foot_contact" body1="{side}_ankle_roll_link" data="found"/>
        <contact name="{side}_foot_force" body2="{side}_ankle_roll_link" data="force" reduce="netforce"/>"""
