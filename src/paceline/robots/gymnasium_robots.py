"""The ant and the humanoid of the Gymnasium wheel, with the joints and motors of Isaac Lab's tasks."""

import mujoco

from paceline.robots.scene import load, wheel_file


def scene(name: str) -> mujoco.MjSpec:
    """Return `models/NAME.xml` with the bodies and geoms of Gymnasium's file of the same name. The robot collides with
    the floor and not with itself."""
    file = wheel_file("gymnasium", f"gymnasium/envs/mujoco/assets/{name}.xml", extra="gymnasium")
    spec, robot = load(name), mujoco.MjSpec.from_file(str(file))
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
