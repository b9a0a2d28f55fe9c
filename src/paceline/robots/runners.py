"""Robots that run: the ant and the humanoid of Gymnasium's wheel, with joints and motors that are given."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import mujoco

from paceline.errors import UserError
from paceline.robots.scene import FLOOR, surroundings

PHYSICS_HZ = 120.0


@dataclass(frozen=True)
class Joint:
    """A hinge with a motor."""

    torque: float
    """At an action of 1, N m."""
    range: tuple[float, float]
    """Degrees."""
    armature: float
    """kg m^2."""
    damping: float
    """N m s/rad."""
    stiffness: float = 0.0
    """N m/rad, towards an angle of zero."""
    start: float = 0.0
    """Degrees."""


@dataclass(frozen=True)
class Runner:
    """A robot of Gymnasium's: its bodies, and so its masses, are those of the file; its joints are given here."""

    name: str
    """Of the file in Gymnasium's wheel."""
    start_height: float
    """Of the torso, metres."""
    joints: dict[str, Joint]
    """By name, in the order of `qpos`, of actions and of actuators."""


def wheel_file(name: str) -> str:
    """Where the model lies in Gymnasium's wheel, which is not imported."""
    try:
        found = str(distribution("gymnasium").locate_file(f"gymnasium/envs/mujoco/assets/{name}.xml"))
    except PackageNotFoundError:
        raise UserError(
            f"the model of {name} comes with Gymnasium, which is not installed: pip install 'paceline[gymnasium]'"
        ) from None
    if not Path(found).is_file():
        raise UserError(f"Gymnasium has no {found}: install 1.4, pip install 'paceline[gymnasium]'")
    return found


def scene(robot: Runner) -> mujoco.MjSpec:
    """The robot on the ground; the camera "track" follows it. It collides with the ground and not with itself."""
    spec = mujoco.MjSpec.from_string(f"""
    <mujoco model="{robot.name}">
      <option timestep="{1.0 / PHYSICS_HZ!r}" integrator="implicitfast" cone="elliptic" iterations="10"
        ls_iterations="20"/>
      {surroundings(FLOOR, robot.start_height)}
    </mujoco>""")
    theirs = mujoco.MjSpec.from_file(wheel_file(robot.name))
    _fit(theirs, robot)
    # What stands in the file beside the body gives way: its solver, its ground, its light.
    for name in ("option", "nkey", "nuser_geom"):
        setattr(theirs, name, getattr(spec, name))
    torso = spec.worldbody.add_frame().attach_body(theirs.body("torso"), f"{robot.name}/", "")
    torso.add_camera(
        name="track",
        mode=mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM,
        pos=[1.3, -2.6, 0.9],
        xyaxes=[0.89, 0.45, 0.0, -0.13, 0.26, 0.95],
    )
    torso.add_light(
        mode=mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM,
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        pos=[0.5, -0.9, 2.0],
        dir=[-0.25, 0.45, -1.0],
        diffuse=[0.65] * 3,
        specular=[0.1] * 3,
    )
    return spec


def _fit(spec: mujoco.MjSpec, robot: Runner) -> None:
    """Give the model of the wheel the robot's joints and motors."""
    # Nothing pulls at its tendons, nobody looks through its cameras, and its motors have an order of their own.
    for replaced in (*spec.tendons, *spec.cameras, *spec.actuators):
        spec.delete(replaced)
    for geom in spec.geoms:
        geom.contype, geom.conaffinity, geom.margin, geom.group = 0, 1, 0.0, 1
        geom.material, geom.rgba = "", [0.15, 0.35, 0.6, 1.0]
    for name, joint in robot.joints.items():
        hinge = spec.joint(name)
        # In degrees, as all of the file.
        hinge.range, hinge.armature = joint.range, joint.armature
        hinge.damping[0], hinge.stiffness[0] = joint.damping, joint.stiffness
        spec.add_actuator(
            name=name,
            target=name,
            trntype=mujoco.mjtTrn.mjTRN_JOINT,
            gear=[joint.torque, 0.0, 0.0, 0.0, 0.0, 0.0],
            ctrlrange=[-1.0, 1.0],
            ctrllimited=True,
        )
