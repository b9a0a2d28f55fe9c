"""The Shadow Hand with a cube on its palm: the model of the gymnasium-robotics wheel, simplified for many envs."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path

import mujoco

from paceline.errors import UserError

WHEEL = "gymnasium-robotics"
FINGERS = ("ff", "mf", "rf", "lf", "th")
"""First, middle, ring and little finger, and thumb. Fingertip sensors are in this order."""
JOINTS = tuple(
    f"{part}J{number}"
    for part, count in (("WR", 2), ("FF", 4), ("MF", 4), ("RF", 4), ("LF", 5), ("TH", 5))
    for number in reversed(range(count))
)
"""Joint names in the order of `qpos`, which ends with the pose of the cube."""
COUPLED_JOINTS = ("FFJ0", "MFJ0", "RFJ0", "LFJ0")
"""Joints without an actuator. A tendon couples each of them to the previous joint of its finger."""
ACTUATED_JOINTS = tuple(joint for joint in JOINTS if joint not in COUPLED_JOINTS)
"""Joint names in the order of the actuators."""

_PREFIX = "robot0:"
# Geom groups. By default, MuJoCo's viewers show the groups 0 to 2.
_VISUAL_COLLISION, _VISUAL, _GOAL, _COLLISION = 0, 1, 2, 3
_COLORS = ("0.85 0.2 0.2", "0.95 0.6 0.1", "0.95 0.85 0.2", "0.25 0.65 0.3", "0.2 0.4 0.8", "0.55 0.3 0.65")

_FINGER_RANGES = {"J3": (-0.349, 0.349), "J2": (0.0, 1.571), "J1": (0.0, 1.571), "J0": (0.0, 1.571)}
_OTHER_RANGES = {
    "WRJ1": (-0.489, 0.14),
    "WRJ0": (-0.698, 0.489),
    "LFJ4": (0.0, 0.785),
    "THJ4": (-1.047, 1.047),
    "THJ3": (0.0, 1.222),
    "THJ2": (-0.209, 0.209),
    "THJ1": (-0.524, 0.524),
    "THJ0": (-1.571, 0.0),
}
RANGES = tuple(_OTHER_RANGES.get(joint) or _FINGER_RANGES[joint[2:]] for joint in JOINTS)
"""Ranges of the joints and of the actuator targets, radians, in the order of `JOINTS`."""


@dataclass(frozen=True)
class Cube:
    """The cube in the hand."""

    edge: float = 0.06
    """Edge length, meters."""
    density: float = 567.0
    """Density, kg/m^3."""
    start: tuple[float, float, float] = (0.0, -0.39, 0.6)
    """Start position, above the middle of the palm, meters."""
    goal_position: tuple[float, float, float] = (0.2, -0.4, 0.62)
    """Position of the cube that shows the goal orientation, meters."""


CUBE = Cube()


def scene(physics_hz: float = 120.0) -> mujoco.MjSpec:
    """Return the hand and the cube. The palm is at a height of half a meter, and the fingers point along -y.

    Geom group 1 has the visual geoms of hand and cube, group 2 the goal, and group 3 the collision primitives of the
    hand, which have far fewer triangles.
    """
    spec = mujoco.MjSpec.from_string(_mjcf(_assets(), physics_hz))
    _simplify(spec)
    return spec


def _assets() -> Path:
    try:
        # The package is not imported, because it would import all of its environments and their dependencies.
        path = Path(str(distribution(WHEEL).locate_file("gymnasium_robotics/envs/assets")))
    except PackageNotFoundError:
        raise UserError(f"the model of the Shadow Hand is part of {WHEEL}: pip install 'paceline[hand]'") from None
    if not (path / "hand" / "robot.xml").is_file():
        raise UserError(f"{path} has no hand/robot.xml: install {WHEEL} 1.4.2, pip install 'paceline[hand]'")
    return path


def _mjcf(assets: Path, physics_hz: float) -> str:
    cube = CUBE
    return f"""
    <mujoco model="shadow_hand">
      <compiler angle="radian" meshdir="{assets / "stls" / "hand"}"/>
      <!-- With this flag, box collisions of MuJoCo Warp equal those of the C engine; other pairs do not change. -->
      <option timestep="{1.0 / physics_hz!r}" integrator="implicitfast" cone="elliptic" impratio="10" iterations="10"
        ls_iterations="50"><flag nativeccd="disable"/></option>
      <include file="{assets / "hand" / "shared.xml"}"/>
      <asset>
        <include file="{assets / "hand" / "shared_asset.xml"}"/>
        <texture name="tiles" type="2d" builtin="checker" rgb1=".6 .62 .65" rgb2=".52 .55 .58" width="64" height="64"/>
        <material name="tiles" texture="tiles" texuniform="true" texrepeat="4 4"/>
      </asset>
      <visual>
        <headlight ambient=".4 .4 .4" diffuse=".3 .3 .3" specular=".1 .1 .1"/>
        <global offwidth="1280" offheight="720"/>
      </visual>
      <statistic extent="1.2" center="0 -.35 .5"/>
      <worldbody>
        <light directional="true" pos=".3 -.6 2" dir="-.25 .45 -1" diffuse=".5 .5 .5" specular=".1 .1 .1"/>
        <camera name="track" pos=".06 -.9 1" xyaxes="1 0 0 0 .68 .73" fovy="30"/>
        <geom name="floor" type="plane" size="2 2 1" material="tiles" contype="0" conaffinity="0"/>
        <include file="{assets / "hand" / "robot.xml"}"/>
        <body name="cube" pos="{_text(cube.start)}">
          <freejoint name="cube"/>
          <geom name="cube" type="box" size="{_text((cube.edge / 2,) * 3)}" density="{cube.density!r}"
            contype="1" conaffinity="1" condim="3" friction="1" group="{_VISUAL}" rgba=".93 .93 .93 1"/>
          {_faces(cube, "cube", _VISUAL)}
        </body>
        <body name="goal" mocap="true" pos="{_text(cube.goal_position)}">
          <geom name="goal" type="box" size="{_text((cube.edge / 2,) * 3)}" contype="0" conaffinity="0"
            group="{_GOAL}" rgba=".93 .93 .93 1"/>
          {_faces(cube, "goal", _GOAL)}
        </body>
      </worldbody>
      <sensor>
        <frameangvel name="cube_spin" objtype="body" objname="cube"/>
        {_fingertip_sensors()}
      </sensor>
    </mujoco>"""


def _faces(cube: Cube, name: str, group: int) -> str:
    """Return one colored plate per face, which show the orientation. Renderers differ in how they map a texture to a
    cube, so plates are used instead."""
    plates = []
    for color, (axis, sign) in zip(_COLORS, product(range(3), (1, -1)), strict=True):
        at, size = [0.0] * 3, [0.42 * cube.edge] * 3
        at[axis], size[axis] = sign * cube.edge / 2, 0.0004
        plates.append(
            f'<geom name="{name}_{"+-"[sign < 0]}{"xyz"[axis]}" type="box" pos="{_text(at)}" size="{_text(size)}" '
            f'mass="0" contype="0" conaffinity="0" group="{group}" rgba="{color} 1"/>'
        )
    return "".join(plates)


def _fingertip_sensors() -> str:
    """Return the fingertip sensors, sorted by kind and then by finger, so that a kind has adjacent columns."""
    kinds = {"position": "framepos", "rotation": "framequat", "velocity": "framelinvel", "spin": "frameangvel"}
    frames = "".join(
        f'<{sensor} name="{finger}_{kind}" objtype="site" objname="{_PREFIX}S_{finger}tip"/>'
        for kind, sensor in kinds.items()
        for finger in FINGERS
    )
    wrenches = "".join(
        f'<contact name="{finger}_wrench" geom2="{_PREFIX}C_{finger}distal" data="force torque" reduce="netforce"/>'
        for finger in FINGERS
    )
    return frames + wrenches


def _simplify(spec: mujoco.MjSpec) -> None:
    """Remove elements that cost time without an effect, and set what differs in the published task."""
    spec.body(f"{_PREFIX}hand mount").pos = (0.0, 0.0, 0.51)
    for body in spec.bodies:
        if body.name.startswith(_PREFIX):
            # Gravity does not act on the hand, as in the published task.
            body.gravcomp = 1.0
    for joint in spec.joints:
        # Joint friction costs one constraint row per joint, and is far below the damping.
        joint.margin, joint.frictionloss = 0.0, 0.0
    material = spec.material(f"{_PREFIX}MatViz")
    material.rgba, material.reflectance, material.specular = (0.7, 0.72, 0.75, 1.0), 0.0, 0.3
    for tendon in list(spec.tendons):
        # The other tendons have limits that are never reached within the joint ranges.
        if not tendon.name.endswith("c") or "TH" in tendon.name:
            spec.delete(tendon)
    for sensor in list(spec.sensors):
        if sensor.name.startswith(_PREFIX):
            spec.delete(sensor)
    for geom in list(spec.geoms):
        geom.margin = 0.0
        if geom.name.startswith(f"{_PREFIX}C_"):
            geom.condim, geom.group, geom.rgba, geom.material = 3, _COLLISION, (0.5, 0.55, 0.6, 1.0), ""
    pairs: set[frozenset[str]] = set()
    for pair in list(spec.pairs):
        # One pair is listed twice: the C engine would apply its contact twice, MuJoCo Warp once.
        names = frozenset((pair.geomname1, pair.geomname2))
        if names in pairs:
            spec.delete(pair)
        pairs.add(names)
    # The forearm has a visual mesh of 18,689 triangles and a collision mesh of 906. A capsule replaces both.
    spec.delete(spec.geom(f"{_PREFIX}V_forearm"))
    forearm = spec.geom(f"{_PREFIX}C_forearm")
    forearm.type, forearm.meshname = mujoco.mjtGeom.mjGEOM_CAPSULE, ""
    forearm.pos, forearm.quat = (0.0, 0.012, 0.14), (1.0, 0.0, 0.0, 0.0)
    forearm.size, forearm.group = (0.048, 0.075, 0.0), _VISUAL_COLLISION
    for mesh in list(spec.meshes):
        if mesh.name.startswith(f"{_PREFIX}forearm"):
            spec.delete(mesh)


def _text(numbers: tuple[float, ...] | list[float]) -> str:
    return " ".join(map(repr, numbers))
