"""The ant and the humanoid of the Gymnasium wheel, with the joints and motors of Isaac Lab's tasks."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import mujoco

from paceline.errors import UserError
from paceline.robots.scene import load

PHYSICS_HZ = 120.0


@dataclass(frozen=True)
class Joint:
    """A hinge joint with a torque motor."""

    torque: float
    """Torque at an action of 1, N m."""
    range: tuple[float, float]
    """Minimum and maximum position, degrees."""
    armature: float
    """Rotor inertia, kg m^2."""
    damping: float
    """Damping, N m s/rad."""
    stiffness: float = 0.0
    """Stiffness of a spring with its equilibrium at zero, N m/rad."""
    start: float = 0.0
    """Position at the start of an episode, degrees."""


@dataclass(frozen=True)
class GymnasiumRobot:
    """A robot of Gymnasium: bodies, geoms and masses are those of its file; joints and motors are given here."""

    name: str
    """Name of the file in the Gymnasium wheel, without the suffix."""
    start_height: float
    """Height of the torso at the start of an episode, meters."""
    joints: dict[str, Joint]
    """Joints by name, in the order of `qpos`, actions and actuators."""


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


def scene(robot: GymnasiumRobot) -> mujoco.MjSpec:
    """Return the robot on a floor. It collides with the floor and not with itself. The camera "track" follows it."""
    spec = load("scene")
    spec.modelname, spec.stat.center = robot.name, (0.0, 0.0, robot.start_height)
    option = spec.option
    option.timestep, option.iterations, option.ls_iterations = 1.0 / PHYSICS_HZ, 10, 20
    option.integrator, option.cone = mujoco.mjtIntegrator.mjINT_IMPLICITFAST, mujoco.mjtCone.mjCONE_ELLIPTIC
    robot_spec = mujoco.MjSpec.from_file(_wheel_file(robot.name))
    _set_joints(robot_spec, robot)
    # Solver options, ground and light of Gymnasium's file are not used.
    for name in ("option", "nkey", "nuser_geom"):
        setattr(robot_spec, name, getattr(spec, name))
    torso = spec.worldbody.add_frame().attach_body(robot_spec.body("torso"), f"{robot.name}/", "")
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


def _set_joints(spec: mujoco.MjSpec, robot: GymnasiumRobot) -> None:
    """Replace the joint parameters and the motors of Gymnasium's model by those of `robot`."""
    # Tendons and cameras are not used, and the motors are not in the order of the joints.
    for unused in (*spec.tendons, *spec.cameras, *spec.actuators):
        spec.delete(unused)
    for geom in spec.geoms:
        geom.contype, geom.conaffinity, geom.margin, geom.group = 0, 1, 0.0, 1
        geom.material, geom.rgba = "", [0.15, 0.35, 0.6, 1.0]
    for name, joint in robot.joints.items():
        hinge = spec.joint(name)
        # Gymnasium's file is in degrees.
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


def _ant_leg(number: int, side: int) -> dict[str, Joint]:
    """Return the joints of a leg. `side` is the sign of the ankle's range."""
    ankle_range = sorted((side * 30.0, side * 100.0))
    return {
        f"hip_{number}": Joint(torque=7.5, range=(-40.0, 40.0), armature=0.01, damping=0.1),
        f"ankle_{number}": Joint(7.5, (ankle_range[0], ankle_range[1]), armature=0.01, damping=0.1, start=side * 45.0),
    }


ANT = GymnasiumRobot(
    "ant", start_height=0.5, joints=_ant_leg(1, 1) | _ant_leg(2, -1) | _ant_leg(3, -1) | _ant_leg(4, 1)
)


def _humanoid_leg(side: str) -> dict[str, Joint]:
    return {
        f"{side}_hip_x": Joint(torque=45.0, range=(-45.0, 15.0), armature=0.01, damping=5.0, stiffness=10.0),
        f"{side}_hip_z": Joint(45.0, (-60.0, 35.0), 0.01, 5.0, 10.0),
        f"{side}_hip_y": Joint(135.0, (-120.0, 45.0), 0.01, 5.0, 20.0),
        f"{side}_knee": Joint(90.0, (-160.0, 2.0), 0.007, 0.1, 5.0),
    }


def _humanoid_arm(side: str, shoulder: tuple[float, float]) -> dict[str, Joint]:
    """Return the joints of an arm. The shoulder axes of the two arms are mirrored, so their ranges are too."""
    return {
        f"{side}_shoulder1": Joint(67.5, shoulder, 0.01, 5.0, 10.0),
        f"{side}_shoulder2": Joint(67.5, shoulder, 0.01, 5.0, 10.0),
        f"{side}_elbow": Joint(45.0, (-90.0, 50.0), 0.006, 1.0, 2.0),
    }


_HUMANOID_TRUNK = {
    "abdomen_z": Joint(67.5, (-45.0, 45.0), 0.02, 5.0, 20.0),
    "abdomen_y": Joint(67.5, (-75.0, 30.0), 0.01, 5.0, 20.0),
    "abdomen_x": Joint(67.5, (-35.0, 35.0), 0.01, 5.0, 10.0),
}

HUMANOID = GymnasiumRobot(
    "humanoid",
    start_height=1.34,
    joints=_HUMANOID_TRUNK
    | _humanoid_leg("right")
    | _humanoid_leg("left")
    | _humanoid_arm("right", (-90.0, 70.0))
    | _humanoid_arm("left", (-70.0, 90.0)),
)
