"""The ant and the humanoid of the Gymnasium wheel, with the joints and motors of Isaac Lab's tasks."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import mujoco

from paceline.errors import UserError
from paceline.robots.scene import load


def scene(name: str) -> mujoco.MjSpec:
    """Return `models/NAME.xml` with the bodies and geoms of Gymnasium's file of the same name. The robot collides with
    the floor and not with itself."""
    spec, robot = load(name), mujoco.MjSpec.from_file(_wheel_file(name))
    # Tendons and cameras are not used, and the motors are not in the order of the joints.
    for unused in (*robot.tendons, *robot.cameras, *robot.actuators):
        robot.delete(unused)
    for geom in robot.geoms:
        geom.contype, geom.conaffinity, geom.margin, geom.group = 0, 1, 0.0, 1
        geom.material, geom.rgba = "", [0.15, 0.35, 0.6, 1.0]
    for motor in spec.actuators:
        joint, given = robot.joint(motor.name), motor.classname.joint
        joint.range, joint.armature = given.range, given.armature
        joint.damping, joint.stiffness = given.damping, given.stiffness
    # Solver options, ground and light of Gymnasium's file are not used.
    for option in ("option", "nkey", "nuser_geom"):
        setattr(robot, option, getattr(spec, option))
    spec.worldbody.add_frame().attach_body(robot.body("torso"), f"{name}/", "")
    return spec


def _wheel_file(name: str) -> str:
    """Return the path of a model in the Gymnasium wheel, without importing it."""
    try:
        path = str(distribution("gymnasium").locate_file(f"gymnasium/envs/mujoco/assets/{name}.xml"))
    except PackageNotFoundError:
        raise UserError(
            f"the model of {name} comes with Gymnasium, which is not installed: pip install 'paceline[gymnasium]'"
        ) from None
    if not Path(path).is_file():
        raise UserError(f"Gymnasium has no {path}: install version 1.4, pip install 'paceline[gymnasium]'")
    return path
