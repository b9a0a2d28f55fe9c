"""Replace the links of the built-in robots with those of files, which are changed versions of the same robots."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.robots.legged import G1, GO1, GO1_LEGS, LeggedRobot
from paceline.robots.own_model import with_robot
from paceline.tasks.velocity.g1_velocity import G1Velocity
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from paceline.tasks.velocity.go1_velocity_rough import Go1VelocityRough

Tree = ET.Element
HOME = GO1.scene().compile().key("home").qpos
HIP, THIGH, CALF = HOME[7:10]
"""Joint angles of the first leg in the pose "home", radians."""


def written(robot: LeggedRobot, file: Path, change: Callable[[Tree], None] = lambda tree: None) -> str:
    """Write the robot without the floor to an MJCF file, with a change to its XML, and return the path."""
    spec = robot.scene()
    spec.delete(spec.geom("floor"))
    spec.compile()
    tree = ET.fromstring(spec.to_xml())
    change(tree)
    file.write_text(ET.tostring(tree, encoding="unicode"))
    return str(file)


def body(tree: Tree, name: str) -> Tree:
    return next(element for element in tree.iter("body") if element.get("name") == name)


def foot(tree: Tree, leg: str) -> Tree:
    return next(geom for geom in body(tree, f"{leg}_calf").findall("geom") if geom.get("name") == f"{leg}_foot")


def another_order(tree: Tree) -> None:
    """Reverse the order of the legs and of the actuators."""
    trunk = body(tree, "trunk")
    legs = trunk.findall("body")
    for leg in legs:
        trunk.remove(leg)
    trunk.extend(reversed(legs))
    actuators = tree.find("actuator")
    assert actuators is not None
    actuators[:] = list(reversed(actuators))


def other_names(tree: Tree) -> None:
    """Rename everything except joints."""
    for kind in ("body", "geom", "site", "camera", "light"):
        for number, element in enumerate(list(tree.iter(kind))):
            if element.get("name"):
                element.set("name", f"{kind}_{number}")
    for part in ("sensor", "contact", "keyframe"):
        for section in tree.findall(part):
            tree.remove(section)


def another_scene(tree: Tree) -> None:
    """Add a floor, a light, visual geoms and joint damping, and replace the actuators."""
    worldbody = tree.find("worldbody")
    assert worldbody is not None
    ET.SubElement(worldbody, "geom", {"name": "floor", "type": "plane", "size": "5 5 1", "pos": "0 0 0.2"})
    ET.SubElement(worldbody, "light", {"pos": "0 0 3"})
    for link in tree.iter("body"):
        look = {"type": "box", "size": ".02 .02 .02", "contype": "0", "conaffinity": "0", "group": "2", "mass": "0"}
        ET.SubElement(link, "geom", look)
    for joint in tree.iter("joint"):
        joint.set("damping", "3")
        joint.set("frictionloss", "0.2")
    for actuators in tree.findall("actuator"):
        tree.remove(actuators)
    motors = ET.SubElement(tree, "actuator")
    ET.SubElement(motors, "motor", {"name": "only", "joint": "RL_calf_joint", "gear": "7"})


def feet_on_ankles(tree: Tree) -> None:
    """Move each foot to a body without a joint, as in files that are converted from URDF."""
    for leg in GO1_LEGS:
        calf, ball = body(tree, f"{leg}_calf"), foot(tree, leg)
        calf.remove(ball)
        ankle = ET.SubElement(calf, "body", {"name": f"{leg}_ankle", "pos": ball.get("pos", "")})
        ET.SubElement(ankle, "inertial", {"mass": "0.05", "pos": "0 0 0", "diaginertia": "1e-5 1e-5 1e-5"})
        ball.set("pos", "0 0 0")
        ankle.append(ball)


def fixed_base(tree: Tree) -> None:
    trunk = body(tree, "trunk")
    for joint in trunk.findall("freejoint") + [j for j in trunk.findall("joint") if j.get("type") == "free"]:
        trunk.remove(joint)


def standing(model: mujoco.MjModel, seconds: float = 2.0) -> mujoco.MjData:
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, model.key("home").id)
    mujoco.mj_step(model, data, round(seconds / model.opt.timestep))
    mujoco.mj_forward(model, data)
    return data


def names(model: mujoco.MjModel) -> dict[str, list[str]]:
    return {
        "joints": [model.joint(i).name for i in range(model.njnt)],
        "actuators": [model.actuator(i).name for i in range(model.nu)],
        "sensors": [model.sensor(i).name for i in range(model.nsensor)],
        "cameras": [model.cam(i).name for i in range(model.ncam)],
    }


MOTORS = ("dof_armature", "dof_damping", "dof_frictionloss", "actuator_gainprm", "actuator_biasprm")


def test_an_empty_path_changes_nothing():
    built_in = GO1.scene()
    assert with_robot(built_in, "") is built_in


@pytest.mark.parametrize("robot", [GO1, G1], ids=["go1", "g1"])
def test_the_built_in_robot_from_a_file_equals_the_built_in_robot(robot, tmp_path: Path):
    built_in = robot.scene().compile()
    own = robot.scene(written(robot, tmp_path / "robot.xml")).compile()
    assert names(own) == names(built_in)
    for field in (*MOTORS, "jnt_range", "jnt_axis", "key_qpos", "key_ctrl"):
        assert getattr(own, field) == pytest.approx(getattr(built_in, field), rel=1e-5, abs=1e-5), field
    for link in (built_in.body(i).name for i in range(1, built_in.nbody)):
        for what in ("mass", "pos", "ipos", "inertia", "subtreemass"):
            assert getattr(own.body(link), what) == pytest.approx(
                getattr(built_in.body(link), what), rel=1e-4, abs=1e-6
            )
    assert standing(own, 0.5).qpos == pytest.approx(standing(built_in, 0.5).qpos, abs=2e-3)


@pytest.mark.parametrize("change", [another_order, other_names, another_scene, feet_on_ankles, fixed_base])
def test_order_names_actuators_and_sensors_do_not_depend_on_the_file(change, tmp_path: Path):
    built_in = GO1.scene().compile()
    own = GO1.scene(written(GO1, tmp_path / "robot.xml", change)).compile()
    assert names(own) == names(built_in)
    for field in MOTORS:
        assert (getattr(own, field) == getattr(built_in, field)).all(), field
    assert own.opt.timestep == built_in.opt.timestep
    extra = 0.2 if change is feet_on_ankles else 0.0
    assert own.body_mass.sum() == pytest.approx(built_in.body_mass.sum() + extra, rel=1e-5)
    data, expected = standing(own), standing(built_in)
    assert data.qpos == pytest.approx(expected.qpos, abs=0.01)
    on_feet = [data.sensor(f"{leg}_foot_contact").data[0] for leg in GO1_LEGS]
    assert on_feet == [1.0] * 4
    assert [data.sensor(f"{leg}_thigh_contact").data[0] for leg in GO1_LEGS] == [0.0] * 4


def smaller(tree: Tree) -> None:
    """Shorten thighs and calves, enlarge the feet, and change the mass of the trunk and a joint range."""
    for leg in GO1_LEGS:
        body(tree, f"{leg}_calf").set("pos", "0 0 -0.19")
        ball = foot(tree, leg)
        ball.set("pos", "0 0 -0.18")
        ball.set("size", "0.03")
        next(iter(body(tree, f"{leg}_thigh").findall("joint"))).set("range", "-1 3")
    trunk = body(tree, "trunk").find("inertial")
    assert trunk is not None
    trunk.set("mass", "4.5")


def test_links_have_the_sizes_and_masses_of_the_file_and_the_robot_stands(tmp_path: Path):
    def smaller_in_another_order(tree: Tree) -> None:
        smaller(tree)
        another_order(tree)

    own = GO1.scene(written(GO1, tmp_path / "robot.xml", smaller_in_another_order)).compile()
    leg = 0.19 * np.cos(THIGH) + 0.18 * np.cos(THIGH + CALF)
    home_height = leg * np.cos(HIP) + 0.08 * np.sin(HIP) + 0.03
    assert own.body("trunk").mass[0] == pytest.approx(4.5)
    assert own.joint("RL_thigh_joint").range == pytest.approx((-1.0, 3.0))
    home = (0.0, 0.0, home_height, 1.0, 0.0, 0.0, 0.0, *HOME[7:])
    assert own.key("home").qpos == pytest.approx(home, abs=1e-5)
    assert own.site("FR_foot").pos == pytest.approx((0.0, 0.0, -0.18), abs=1e-6)
    data = standing(own)
    assert data.sensor("upvector").data[2] > 0.99
    # The soft gains let the base sink.
    assert data.qpos[2] == pytest.approx(home_height - 0.0186, abs=0.001)
    assert {own.geom(i).name for contact in data.contact for i in contact.geom} == {
        "floor",
        *(f"{leg}_foot" for leg in GO1_LEGS),
    }


def test_all_colliding_geoms_of_a_humanoids_ankle_are_its_foot_with_the_friction_of_the_scene(tmp_path: Path):
    def thicker_soles(tree: Tree) -> None:
        for side in ("left", "right"):
            link = body(tree, f"{side}_ankle_roll_link")
            for geom in link.findall("geom"):
                link.remove(geom)
            for x in ("-.05", ".12"):
                sole = {"type": "box", "size": ".02 .03 .01", "pos": f"{x} 0 -.06", "mass": "0", "conaffinity": "1"}
                ET.SubElement(link, "geom", sole)

    own = G1.scene(written(G1, tmp_path / "g1.xml", thicker_soles)).compile()
    built_in = G1.scene().compile()
    feet = [own.geom(f"{side}_foot_{number}").id for side in ("left", "right") for number in (0, 1)]
    assert sorted(np.flatnonzero(own.geom_priority)) == sorted(feet)
    assert (own.geom_friction[feet] == built_in.geom("left_foot_outer").friction).all()
    higher = own.key("home").qpos[2] - built_in.key("home").qpos[2]
    assert higher == pytest.approx(0.035, abs=1e-3)
    data = standing(own, 0.02)
    assert data.sensor("left_foot_position").data[2] == pytest.approx(0.0, abs=2e-3)
    assert data.sensor("right_foot_contact").data[0] > 0.0


def test_contact_sensors_distinguish_feet_thighs_and_trunk(tmp_path: Path):
    """The geoms are the same, so both models must report the same contacts in random poses."""
    built_in = GO1.scene().compile()
    own = GO1.scene(written(GO1, tmp_path / "robot.xml", other_names)).compile()
    generator, seen = np.random.default_rng(0), set()
    contacts = [name for name in names(built_in)["sensors"] if name.endswith("_contact")]
    for _ in range(100):
        attitude = generator.normal(size=4)
        angles = generator.uniform(*built_in.jnt_range[1:].T)
        found = []
        for model in (built_in, own):
            data = mujoco.MjData(model)
            data.qpos = (0.0, 0.0, 0.1, *(attitude / np.linalg.norm(attitude)), *angles)
            mujoco.mj_forward(model, data)
            found.append([name for name in contacts if data.sensor(name).data[0] > 0.0])
        assert found[0] == found[1]
        seen |= set(found[0])
    assert seen == set(contacts)


def test_the_robot_collides_with_the_ground_and_not_with_itself(tmp_path: Path):
    def all_collide(tree: Tree) -> None:
        for geom in tree.iter("geom"):
            geom.set("contype", "1")
            geom.set("conaffinity", "1")

    own = GO1.scene(written(GO1, tmp_path / "robot.xml", all_collide)).compile()
    floor = own.geom("floor").id
    others = np.arange(own.ngeom) != floor
    assert (own.geom_contype[others] == 0).all()
    assert (own.geom_conaffinity[others] == 1).all()
    assert (own.geom_contype[floor], own.geom_conaffinity[floor]) == (1, 0)
    assert (own.geom_group[others] > 0).all()
    feet = [own.geom(f"{leg}_foot").id for leg in GO1_LEGS]
    assert own.geom_friction[feet, 0] == pytest.approx([0.6] * 4)
    assert sorted(np.flatnonzero(own.geom_priority)) == sorted(feet)


def test_meshes_keep_the_pose_of_the_file(tmp_path: Path):
    """The vertices are far from the mesh origin: compiling twice must not shift them twice."""
    corners = np.array(((0.1, 0.0, 0.0), (0.2, 0.0, 0.0), (0.1, 0.1, 0.0), (0.1, 0.0, 0.3)))

    def with_mesh(tree: Tree) -> None:
        asset = ET.SubElement(tree, "asset")
        ET.SubElement(asset, "mesh", {"name": "wedge", "vertex": " ".join(map(str, corners.ravel()))})
        look = {"type": "mesh", "mesh": "wedge", "contype": "0", "conaffinity": "0", "group": "2", "quat": "1 1 0 0"}
        ET.SubElement(body(tree, "trunk"), "geom", look)

    own = GO1.scene(written(GO1, tmp_path / "robot.xml", with_mesh)).compile()
    data = mujoco.MjData(own)
    mujoco.mj_forward(own, data)
    (mesh,) = np.flatnonzero(own.geom_type == mujoco.mjtGeom.mjGEOM_MESH.value)
    vertices = own.mesh_vert @ data.geom_xmat[mesh].reshape(3, 3).T + data.geom_xpos[mesh] - data.body("trunk").xpos
    # A quarter turn about x.
    expected = corners @ np.array(((1, 0, 0), (0, 0, 1), (0, -1, 0)))
    assert sorted(map(tuple, vertices.round(5))) == sorted(map(tuple, expected.round(5)))


def test_the_ground_of_the_scene_is_kept(tmp_path: Path):
    scene = GO1.scene()
    scene.geom("floor").pos = (0.0, 0.0, -0.5)
    box = mujoco.mjtGeom.mjGEOM_BOX
    scene.worldbody.add_geom(name="step", type=box, size=(1.0, 1.0, 0.1), contype=1, conaffinity=0)
    own = with_robot(scene, written(GO1, tmp_path / "robot.xml")).compile()
    assert own.geom("step").size == pytest.approx((1.0, 1.0, 0.1))
    assert own.key("home").qpos[2] == pytest.approx(HOME[2], abs=1e-5)


def no_foot(tree: Tree) -> None:
    body(tree, "RR_calf").remove(foot(tree, "RR"))


def no_joint(tree: Tree) -> None:
    thigh = body(tree, "FL_thigh")
    thigh.remove(next(iter(thigh.findall("joint"))))
    for part in ("actuator", "keyframe"):
        for section in tree.findall(part):
            tree.remove(section)


def with_tail(tree: Tree) -> None:
    tail = ET.SubElement(body(tree, "trunk"), "body", {"name": "tail"})
    ET.SubElement(tail, "joint", {"name": "tail_joint"})
    ET.SubElement(tail, "geom", {"size": ".01"})
    for section in tree.findall("keyframe"):
        tree.remove(section)


def reversed_axis(tree: Tree) -> None:
    next(iter(body(tree, "FR_hip").findall("joint"))).set("axis", "-1 0 0")


def another_parent(tree: Tree) -> None:
    hip = body(tree, "RL_hip")
    thigh = next(iter(hip.findall("body")))
    hip.remove(thigh)
    body(tree, "trunk").append(thigh)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_foot, r"the link of joint RR_calf_joint has no foot; add a sphere that collides \(.*: capsule\)$"),
        (no_joint, r"has no joint FL_thigh_joint; it has FR_hip_joint, FR_thigh_joint, .*RL_calf_joint"),
        (with_tail, r"has unsupported joints: tail_joint; remove them"),
        (reversed_axis, r"joint FR_hip_joint must have the axis 1 0 0, not -1 0 0"),
        (another_parent, r"the parent of .*RL_thigh_joint must be the link of joint RL_hip_joint, not the base"),
    ],
)
def test_an_error_names_what_is_missing_or_different(change, message: str, tmp_path: Path):
    file = written(GO1, tmp_path / "robot.xml", change)
    with pytest.raises(UserError, match=f"--env.robot {re.escape(file)}.*{message}"):
        with_robot(GO1.scene(), file)


def test_a_robot_of_another_family_is_rejected(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no joint FR_hip_joint, .*; it has left_hip_pitch_joint, "):
        with_robot(GO1.scene(), written(G1, tmp_path / "g1.xml"))


def test_a_humanoid_without_colliding_feet_is_rejected(tmp_path: Path):
    def without_feet(tree: Tree) -> None:
        link = body(tree, "left_ankle_roll_link")
        for geom in link.findall("geom"):
            geom.set("conaffinity", "0")

    with pytest.raises(UserError, match="left_ankle_roll_joint has no foot; add a geom that collides"):
        with_robot(G1.scene(), written(G1, tmp_path / "g1.xml", without_feet))


def test_missing_and_invalid_files_are_rejected(tmp_path: Path):
    with pytest.raises(UserError, match=r"--env.robot missing\.xml: no such file"):
        with_robot(GO1.scene(), "missing.xml")
    (tmp_path / "broken.xml").write_text("<mujoco><worldbody><body></worldbody></mujoco>")
    with pytest.raises(UserError, match=r"broken\.xml: MuJoCo says: .*XML"):
        with_robot(GO1.scene(), str(tmp_path / "broken.xml"))


def taller(tree: Tree) -> None:
    """Lengthen the thighs by a centimeter and make the trunk heavier."""
    for leg in GO1_LEGS:
        calf = body(tree, f"{leg}_calf")
        x, y, z = map(float, str(calf.get("pos")).split())
        calf.set("pos", f"{x} {y} {z - 0.01}")
    trunk = body(tree, "trunk").find("inertial")
    assert trunk is not None
    trunk.set("mass", "9.5")


@pytest.mark.parametrize("kind", [Go1Velocity, Go1VelocityRough])
def test_go1_tasks_use_the_robot_of_a_file(kind: type[Go1Velocity], tmp_path: Path):
    file = written(GO1, tmp_path / "go1.xml", taller)
    built_in, own = (RobotEnv(kind(robot=robot, randomize=False), 2) for robot in ("", file))
    assert own.sim.model.body("trunk").mass[0] == pytest.approx(9.5)
    higher = (own.sim.qpos[:, 2] - built_in.sim.qpos[:, 2]).tolist()
    assert higher == pytest.approx([0.01 * np.cos(HIP) * np.cos(THIGH)] * 2, abs=1e-4)


def test_the_g1_task_uses_the_robot_of_a_file(tmp_path: Path):
    def heavier(tree: Tree) -> None:
        pelvis = body(tree, "pelvis").find("inertial")
        assert pelvis is not None
        pelvis.set("mass", "5.5")

    env = RobotEnv(G1Velocity(robot=written(G1, tmp_path / "g1.xml", heavier)), 2)
    assert env.sim.model.body("pelvis").mass[0] == pytest.approx(5.5)


def test_the_g1_task_penalizes_the_joint_limits_of_the_file(tmp_path: Path):
    def stiff_elbow(tree: Tree) -> None:
        next(iter(body(tree, "left_elbow_link").findall("joint"))).set("range", "-0.2 0.4")

    file = written(G1, tmp_path / "g1.xml", stiff_elbow)
    terminated, bent = torch.zeros(2, dtype=torch.bool), torch.tensor([0.3, 1.0])
    terms = []
    for robot in ("", file):
        env = RobotEnv(G1Velocity(robot=robot), 2)
        elbow = env.sim.model.joint("left_elbow_joint").qposadr[0]
        state = env.state()
        state["sim/qpos"][:] = torch.from_numpy(env.sim.model.key("home").qpos)
        state["sim/qpos"][:, elbow] = bent
        env.load_state(state)
        terms.append(env.task.reward(env.env_state, terminated)["joint_limits"] / env.step_seconds)
    built_in, own = terms
    assert built_in.tolist() == [0.0, 0.0]
    # Twice the angle beyond 0.95 of the limit.
    assert own.tolist() == pytest.approx([0.0, -2.0 * (1.0 - 0.95 * 0.4)], abs=1e-5)
