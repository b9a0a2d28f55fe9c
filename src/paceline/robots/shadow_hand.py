"""The Shadow Hand with a cube on its palm: the model of the gymnasium-robotics wheel, simplified for many envs."""

from importlib.resources import files

import mujoco

from paceline.robots.scene import wheel_file

WHEEL = "gymnasium-robotics"
FINGERS = ("ff", "mf", "rf", "lf", "th")
"""First, middle, ring and little finger, and thumb. Fingertip sensors are in this order."""
NUM_JOINTS, NUM_ACTUATORS = 24, 20
"""The joints come first in `qpos`, before the pose of the cube. A tendon couples the last joint of each finger to the
previous one."""

_PREFIX = "robot0:"


def scene(physics_hz: float = 120.0) -> mujoco.MjSpec:
    """Return the hand and the cube, see `models/shadow_hand.xml`."""
    mjcf = (files("paceline.robots") / "models" / "shadow_hand.xml").read_text()
    hand = wheel_file(WHEEL, "gymnasium_robotics/envs/assets/hand/robot.xml", extra="hand").parent
    spec = mujoco.MjSpec.from_string(mjcf.replace("WHEEL", str(hand.parent)))
    spec.option.timestep = 1.0 / physics_hz
    _simplify(spec)
    return spec


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
    for geom in spec.geoms:
        geom.margin = 0.0
        if geom.name.startswith(f"{_PREFIX}C_"):
            geom.condim, geom.group, geom.rgba, geom.material = 3, 3, (0.5, 0.55, 0.6, 1.0), ""
    # The forearm has a visual mesh of 18,689 triangles and a collision mesh of 906. A capsule replaces both.
    forearm = spec.geom(f"{_PREFIX}C_forearm")
    forearm.type, forearm.meshname = mujoco.mjtGeom.mjGEOM_CAPSULE, ""
    forearm.pos, forearm.quat = (0.0, 0.012, 0.14), (1.0, 0.0, 0.0, 0.0)
    forearm.size, forearm.group = (0.048, 0.075, 0.0), 0
    unused = [spec.geom(f"{_PREFIX}V_forearm"), *(m for m in spec.meshes if m.name.startswith(f"{_PREFIX}forearm"))]
    unused += [sensor for sensor in spec.sensors if sensor.name.startswith(_PREFIX)]
    # These tendons have limits that are never reached within the joint ranges.
    unused += [tendon for tendon in spec.tendons if not tendon.name.endswith("c") or "TH" in tendon.name]
    # One pair is listed twice: the C engine would apply its contact twice, MuJoCo Warp once.
    pairs = {frozenset((pair.geomname1, pair.geomname2)): pair for pair in reversed(spec.pairs)}
    unused += [pair for pair in spec.pairs if pair not in pairs.values()]
    for element in unused:
        spec.delete(element)
