"""The Shadow Hand, palm up, with a cube on it: the model of the gymnasium-robotics wheel, made fit for many worlds."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path

import mujoco

from paceline.errors import UserError

WHEEL = "gymnasium-robotics"
FINGERS = ("ff", "mf", "rf", "lf", "th")
"""First, middle, ring and little finger, and the thumb; all that is of the fingertips comes in this order."""
JOINTS = tuple(
    f"{part}J{number}"
    for part, count in (("WR", 2), ("FF", 4), ("MF", 4), ("RF", 4), ("LF", 5), ("TH", 5))
    for number in reversed(range(count))
)
"""The order of `qpos`, before the cube's seven numbers."""
FOLLOWERS = ("FFJ0", "MFJ0", "RFJ0", "LFJ0")
"""Joints without a motor: a tendon has each bend with the joint below it."""
MOTORS = tuple(joint for joint in JOINTS if joint not in FOLLOWERS)
"""The order of the actuators."""

_PREFIX = "robot0:"
# As MuJoCo's viewers have it, groups 0 to 2 are drawn and higher ones are not.
_BOTH, _DRAWN, _GOAL, _COLLIDED = 0, 1, 2, 3
_COLOURS = ("0.85 0.2 0.2", "0.95 0.6 0.1", "0.95 0.85 0.2", "0.25 0.65 0.3", "0.2 0.4 0.8", "0.55 0.3 0.65")

_FINGER = {"J3": (-0.349, 0.349), "J2": (0.0, 1.571), "J1": (0.0, 1.571), "J0": (0.0, 1.571)}
_OWN_RANGES = {
    "WRJ1": (-0.489, 0.14),
    "WRJ0": (-0.698, 0.489),
    "LFJ4": (0.0, 0.785),
    "THJ4": (-1.047, 1.047),
    "THJ3": (0.0, 1.222),
    "THJ2": (-0.209, 0.209),
    "THJ1": (-0.524, 0.524),
    "THJ0": (-1.571, 0.0),
}
RANGES = tuple(_OWN_RANGES.get(joint) or _FINGER[joint[2:]] for joint in JOINTS)
"""Of the joints, in their order, and for the motors' targets too; radians."""


@dataclass(frozen=True)
class Cube:
    """What lies in the hand."""

    edge: float = 0.06
    """Metres."""
    density: float = 567.0
    """kg/m^3."""
    start: tuple[float, float, float] = (0.0, -0.39, 0.6)
    """Where it is let go, above the middle of the palm."""
    goal_at: tuple[float, float, float] = (0.2, -0.4, 0.62)
    """Where the cube is drawn that shows how it should lie."""


CUBE = Cube()


def scene(physics_hz: float = 120.0) -> mujoco.MjSpec:
    """The palm's middle plane is at half a metre, and the fingers point along -y.

    Geom group 1 is how hand and cube look, group 3 the hand's primitives that collide, which draw it with far fewer
    triangles, and group 2 the goal.
    """
    spec = mujoco.MjSpec.from_string(_mjcf(_assets(), physics_hz))
    _simplify(spec)
    return spec


def _assets() -> Path:
    try:
        # Found by its path: importing it would bring all its environments, and what they need.
        found = Path(str(distribution(WHEEL).locate_file("gymnasium_robotics/envs/assets")))
    except PackageNotFoundError:
        raise UserError(f"the Shadow Hand's model is in {WHEEL}: pip install 'paceline[hand]'") from None
    if not (found / "hand" / "robot.xml").is_file():
        raise UserError(f"{found} has no hand/robot.xml: install {WHEEL} 1.4.2, pip install 'paceline[hand]'")
    return found


def _mjcf(assets: Path, physics_hz: float) -> str:
    cube = CUBE
    return f"""
    <mujoco model="shadow_hand">
      <compiler angle="radian" meshdir="{assets / "stls" / "hand"}"/>
      <!-- With this flag MuJoCo Warp collides boxes as the C engine does; no other pair here is the worse for it. -->
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
            contype="1" conaffinity="1" condim="3" friction="1" group="{_DRAWN}" rgba=".93 .93 .93 1"/>
          {_faces(cube, "cube", _DRAWN)}
        </body>
        <body name="goal" mocap="true" pos="{_text(cube.goal_at)}">
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
    """A colour for each face, so that one sees how it lies: thin plates, because a cube's texture is not drawn alike by
    all renderers."""
    plates = []
    for colour, (axis, sign) in zip(_COLOURS, product(range(3), (1, -1)), strict=True):
        at, size = [0.0] * 3, [0.42 * cube.edge] * 3
        at[axis], size[axis] = sign * cube.edge / 2, 0.0004
        plates.append(
            f'<geom name="{name}_{"+-"[sign < 0]}{"xyz"[axis]}" type="box" pos="{_text(at)}" size="{_text(size)}" '
            f'mass="0" contype="0" conaffinity="0" group="{group}" rgba="{colour} 1"/>'
        )
    return "".join(plates)


def _fingertip_sensors() -> str:
    """Of one kind for all fingers, then the next, so that a kind is one stretch of columns."""
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
    """Leave out what costs time and has no effect, or is other than in the published task."""
    spec.body(f"{_PREFIX}hand mount").pos = (0.0, 0.0, 0.51)
    for body in spec.bodies:
        if body.name.startswith(_PREFIX):
            # The hand feels no weight of its own, as in the published task.
            body.gravcomp = 1.0
    for joint in spec.joints:
        # A joint's friction is a constraint row at every moment, and far below its damping.
        joint.margin, joint.frictionloss = 0.0, 0.0
    look = spec.material(f"{_PREFIX}MatViz")
    look.rgba, look.reflectance, look.specular = (0.7, 0.72, 0.75, 1.0), 0.0, 0.3
    for tendon in list(spec.tendons):
        # Those that are not couplings have limits that no angle in the joints' ranges reaches.
        if not tendon.name.endswith("c") or "TH" in tendon.name:
            spec.delete(tendon)
    for sensor in list(spec.sensors):
        if sensor.name.startswith(_PREFIX):
            spec.delete(sensor)
    for geom in list(spec.geoms):
        geom.margin = 0.0
        if geom.name.startswith(f"{_PREFIX}C_"):
            geom.condim, geom.group, geom.rgba, geom.material = 3, _COLLIDED, (0.5, 0.55, 0.6, 1.0), ""
    seen: set[frozenset[str]] = set()
    for pair in list(spec.pairs):
        # One is named twice: the C engine would have its fingers push each other twice, MuJoCo Warp once.
        both = frozenset((pair.geomname1, pair.geomname2))
        if both in seen:
            spec.delete(pair)
        seen.add(both)
    # The forearm, drawn by 18,689 triangles and collided as a mesh of 906, becomes a capsule.
    spec.delete(spec.geom(f"{_PREFIX}V_forearm"))
    forearm = spec.geom(f"{_PREFIX}C_forearm")
    forearm.type, forearm.meshname = mujoco.mjtGeom.mjGEOM_CAPSULE, ""
    forearm.pos, forearm.quat = (0.0, 0.012, 0.14), (1.0, 0.0, 0.0, 0.0)
    forearm.size, forearm.group = (0.048, 0.075, 0.0), _BOTH
    for mesh in list(spec.meshes):
        if mesh.name.startswith(f"{_PREFIX}forearm"):
            spec.delete(mesh)


def _text(numbers: tuple[float, ...] | list[float]) -> str:
    return " ".join(map(repr, numbers))
