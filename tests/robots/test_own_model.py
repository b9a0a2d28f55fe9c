"""Robots from files that the tests write: ours, changed as another's model may differ."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.robots import g1, go1
from paceline.robots.own_model import with_robot
from paceline.robots.scene import FLOOR
from paceline.tasks.velocity.g1_velocity import G1Velocity
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from paceline.tasks.velocity.go1_velocity_rough import Go1VelocityRough

Tree = ET.Element


def written(robot: mujoco.MjSpec, file: Path, change: Callable[[Tree], None] = lambda tree: None) -> str:
    """The robot as an MJCF file, changed."""
    robot.compile()
    tree = ET.fromstring(robot.to_xml())
    change(tree)
    file.write_text(ET.tostring(tree, encoding="unicode"))
    return str(file)


def body(tree: Tree, name: str) -> Tree:
    return next(element for element in tree.iter("body") if element.get("name") == name)


def foot(tree: Tree, leg: str) -> Tree:
    return next(geom for geom in body(tree, f"{leg}_calf").findall("geom") if geom.get("name") == f"{leg}_foot")


def another_order(tree: Tree) -> None:
    """Rear before front, left before right; actuators as well."""
    trunk = body(tree, "trunk")
    legs = trunk.findall("body")
    for leg in legs:
        trunk.remove(leg)
    trunk.extend(reversed(legs))
    actuators = tree.find("actuator")
    assert actuators is not None
    actuators[:] = list(reversed(actuators))


def other_names(tree: Tree) -> None:
    """Of everything but joints."""
    for kind in ("body", "geom", "site", "camera", "light"):
        for number, element in enumerate(list(tree.iter(kind))):
            if element.get("name"):
                element.set("name", f"{kind}_{number}")
    for part in ("sensor", "contact", "keyframe"):
        for section in tree.findall(part):
            tree.remove(section)


def own_surroundings(tree: Tree) -> None:
    """A floor, a light, geoms that are only drawn, motors of another kind, and damping in the joints."""
    world = tree.find("worldbody")
    assert world is not None
    ET.SubElement(world, "geom", {"name": "floor", "type": "plane", "size": "5 5 1", "pos": "0 0 0.2"})
    ET.SubElement(world, "light", {"pos": "0 0 3"})
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
    """In links of their own, that are fixed to the calves, as files made from URDF have them."""
    for leg in go1.LEGS:
        calf, ball = body(tree, f"{leg}_calf"), foot(tree, leg)
        calf.remove(ball)
        ankle = ET.SubElement(calf, "body", {"name": f"{leg}_ankle", "pos": ball.get("pos", "")})
        ET.SubElement(ankle, "inertial", {"mass": "0.05", "pos": "0 0 0", "diaginertia": "1e-5 1e-5 1e-5"})
        ball.set("pos", "0 0 0")
        ankle.append(ball)


def bolted_down(tree: Tree) -> None:
    trunk = body(tree, "trunk")
    for joint in trunk.findall("freejoint") + [j for j in trunk.findall("joint") if j.get("type") == "free"]:
        trunk.remove(joint)


def standing(model: mujoco.MjModel, seconds: float = 2.0) -> mujoco.MjData:
    world = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, world, model.key("home").id)
    mujoco.mj_step(model, world, round(seconds / model.opt.timestep))
    mujoco.mj_forward(model, world)
    return world


def names(model: mujoco.MjModel) -> dict[str, list[str]]:
    return {
        "joints": [model.joint(i).name for i in range(model.njnt)],
        "actuators": [model.actuator(i).name for i in range(model.nu)],
        "sensors": [model.sensor(i).name for i in range(model.nsensor)],
        "cameras": [model.cam(i).name for i in range(model.ncam)],
    }


MOTORS = ("dof_armature", "dof_damping", "dof_frictionloss", "actuator_gainprm", "actuator_biasprm")


def test_without_a_path_the_scene_is_ours():
    ours = go1.scene()
    assert with_robot(ours, "") is ours


@pytest.mark.parametrize("robot", [go1, g1], ids=["go1", "g1"])
def test_our_own_model_from_a_file_is_our_model(robot, tmp_path: Path):
    ours = robot.scene().compile()
    own = with_robot(robot.scene(), written(robot.spec(), tmp_path / "robot.xml")).compile()
    assert names(own) == names(ours)
    for field in (*MOTORS, "jnt_range", "jnt_axis", "key_qpos", "key_ctrl"):
        assert getattr(own, field) == pytest.approx(getattr(ours, field), rel=1e-5, abs=1e-5), field
    for link in (ours.body(i).name for i in range(1, ours.nbody)):
        for what in ("mass", "pos", "ipos", "inertia", "subtreemass"):
            assert getattr(own.body(link), what) == pytest.approx(getattr(ours.body(link), what), rel=1e-4, abs=1e-6)
    worlds = standing(own, 0.5), standing(ours, 0.5)
    assert worlds[0].qpos == pytest.approx(worlds[1].qpos, abs=2e-3)


@pytest.mark.parametrize("change", [another_order, other_names, own_surroundings, feet_on_ankles, bolted_down])
def test_a_model_that_is_written_otherwise_has_our_order_names_motors_and_sensors(change, tmp_path: Path):
    ours = go1.scene().compile()
    own = with_robot(go1.scene(), written(go1.spec(), tmp_path / "robot.xml", change)).compile()
    assert names(own) == names(ours)
    for field in MOTORS:
        assert (getattr(own, field) == getattr(ours, field)).all(), field
    assert own.opt.timestep == ours.opt.timestep
    extra = 0.2 if change is feet_on_ankles else 0.0
    assert own.body_mass.sum() == pytest.approx(ours.body_mass.sum() + extra, rel=1e-5)
    world, expected = standing(own), standing(ours)
    assert world.qpos == pytest.approx(expected.qpos, abs=0.01)
    on_feet = [world.sensor(f"{leg}_foot_contact").data[0] for leg in go1.LEGS]
    assert on_feet == [1.0] * 4
    assert [world.sensor(f"{leg}_thigh_contact").data[0] for leg in go1.LEGS] == [0.0] * 4


def test_links_of_other_sizes_and_masses_are_the_files_and_the_robot_stands(tmp_path: Path):
    shorter = replace(go1.GO1, thigh_length=0.19, calf_length=0.18, foot_radius=0.03)
    shorter = replace(
        shorter, trunk=replace(shorter.trunk, mass=4.5), thigh_joint=replace(shorter.thigh_joint, range=(-1, 3))
    )
    own = with_robot(go1.scene(), written(go1.spec(shorter), tmp_path / "robot.xml", another_order)).compile()
    expected = go1.scene(shorter).compile()
    assert own.body("trunk").mass[0] == pytest.approx(4.5)
    assert own.joint("RL_thigh_joint").range == pytest.approx((-1.0, 3.0))
    assert own.key("home").qpos == pytest.approx(expected.key("home").qpos, abs=1e-5)
    assert own.site("FR_foot").pos == pytest.approx((0.0, 0.0, -0.18), abs=1e-6)
    world = standing(own)
    assert world.sensor("upvector").data[2] > 0.99
    assert world.qpos[2] == pytest.approx(standing(expected).qpos[2], abs=0.005)
    assert {own.geom(i).name for contact in world.contact for i in contact.geom} == {
        "floor",
        *(f"{leg}_foot" for leg in go1.LEGS),
    }


def test_a_humanoids_feet_are_told_by_their_soles_and_grip_as_ours_do(tmp_path: Path):
    def higher_heels(tree: Tree) -> None:
        for side in ("left", "right"):
            link = body(tree, f"{side}_ankle_roll_link")
            for geom in link.findall("geom"):
                link.remove(geom)
            for x in ("-.05", ".12"):
                ET.SubElement(link, "geom", {"type": "box", "size": ".02 .03 .01", "pos": f"{x} 0 -.06", "mass": "0"})

    own = with_robot(g1.scene(), written(g1.spec(), tmp_path / "g1.xml", higher_heels)).compile()
    ours = g1.scene().compile()
    feet = [own.geom(f"{side}_foot_{number}").id for side in ("left", "right") for number in (0, 1)]
    assert sorted(np.flatnonzero(own.geom_priority)) == sorted(feet)
    assert (own.geom_friction[feet] == ours.geom("left_foot_outer").friction).all()
    higher = own.key("home").qpos[2] - ours.key("home").qpos[2]
    assert higher == pytest.approx(0.035, abs=1e-3)
    world = standing(own, 0.02)
    assert world.sensor("left_foot_position").data[2] == pytest.approx(0.0, abs=2e-3)
    assert world.sensor("right_foot_contact").data[0] > 0.0


def test_contact_sensors_tell_feet_shins_thighs_and_trunk_apart(tmp_path: Path):
    """In random poses, against our own model's, to which these geoms are equal."""
    ours = go1.scene().compile()
    own = with_robot(go1.scene(), written(go1.spec(), tmp_path / "robot.xml", other_names)).compile()
    generator, seen = np.random.default_rng(0), set()
    contacts = [name for name in names(ours)["sensors"] if name.endswith("_contact")]
    for _ in range(100):
        attitude = generator.normal(size=4)
        angles = generator.uniform(*ours.jnt_range[1:].T)
        found = []
        for model in (ours, own):
            world = mujoco.MjData(model)
            world.qpos = (0.0, 0.0, 0.1, *(attitude / np.linalg.norm(attitude)), *angles)
            mujoco.mj_forward(model, world)
            found.append([name for name in contacts if world.sensor(name).data[0] > 0.0])
        assert found[0] == found[1]
        seen |= set(found[0])
    assert seen == set(contacts)


def test_the_robot_touches_the_ground_but_never_itself(tmp_path: Path):
    def all_collide(tree: Tree) -> None:
        for geom in tree.iter("geom"):
            geom.set("contype", "1")
            geom.set("conaffinity", "1")

    own = with_robot(go1.scene(), written(go1.spec(), tmp_path / "robot.xml", all_collide)).compile()
    floor = own.geom("floor").id
    others = np.arange(own.ngeom) != floor
    assert (own.geom_contype[others] == 0).all()
    assert (own.geom_conaffinity[others] == 1).all()
    assert (own.geom_contype[floor], own.geom_conaffinity[floor]) == (1, 0)
    assert (own.geom_group[others] > 0).all()
    feet = [own.geom(f"{leg}_foot").id for leg in go1.LEGS]
    assert own.geom_friction[feet, 0] == pytest.approx([go1.GO1.foot_friction] * 4)
    assert sorted(np.flatnonzero(own.geom_priority)) == sorted(feet)


def test_meshes_stand_where_the_file_has_them(tmp_path: Path):
    """A tetrahedron, far from its own origin: compiling it twice must not move it twice."""
    corners = np.array(((0.1, 0.0, 0.0), (0.2, 0.0, 0.0), (0.1, 0.1, 0.0), (0.1, 0.0, 0.3)))

    def with_mesh(tree: Tree) -> None:
        asset = ET.SubElement(tree, "asset")
        ET.SubElement(asset, "mesh", {"name": "wedge", "vertex": " ".join(map(str, corners.ravel()))})
        look = {"type": "mesh", "mesh": "wedge", "contype": "0", "conaffinity": "0", "group": "2", "quat": "1 1 0 0"}
        ET.SubElement(body(tree, "trunk"), "geom", look)

    own = with_robot(go1.scene(), written(go1.spec(), tmp_path / "robot.xml", with_mesh)).compile()
    world = mujoco.MjData(own)
    mujoco.mj_forward(own, world)
    (mesh,) = np.flatnonzero(own.geom_type == mujoco.mjtGeom.mjGEOM_MESH.value)
    drawn = own.mesh_vert @ world.geom_xmat[mesh].reshape(3, 3).T + world.geom_xpos[mesh] - world.body("trunk").xpos
    # A quarter turn about x.
    expected = corners @ np.array(((1, 0, 0), (0, 0, 1), (0, -1, 0)))
    assert sorted(map(tuple, drawn.round(5))) == sorted(map(tuple, expected.round(5)))


def test_other_ground_is_kept(tmp_path: Path):
    step = (
        FLOOR.replace("/>", ' pos="0 0 -.5"/>')
        + '<geom name="step" type="box" size="1 1 .1" contype="1" conaffinity="0"/>'
    )
    own = with_robot(go1.scene(ground=step), written(go1.spec(), tmp_path / "robot.xml")).compile()
    assert own.geom("step").size == pytest.approx((1.0, 1.0, 0.1))
    assert own.key("home").qpos[2] == pytest.approx(go1.GO1.home_height, abs=1e-5)


def no_foot(tree: Tree) -> None:
    body(tree, "RR_calf").remove(foot(tree, "RR"))


def no_joint(tree: Tree) -> None:
    thigh = body(tree, "FL_thigh")
    thigh.remove(next(iter(thigh.findall("joint"))))
    for part in ("actuator", "keyframe"):
        for section in tree.findall(part):
            tree.remove(section)


def a_tail(tree: Tree) -> None:
    tail = ET.SubElement(body(tree, "trunk"), "body", {"name": "tail"})
    ET.SubElement(tail, "joint", {"name": "tail_joint"})
    ET.SubElement(tail, "geom", {"size": ".01"})
    for section in tree.findall("keyframe"):
        tree.remove(section)


def turned_around(tree: Tree) -> None:
    next(iter(body(tree, "FR_hip").findall("joint"))).set("axis", "-1 0 0")


def another_tree(tree: Tree) -> None:
    hip = body(tree, "RL_hip")
    thigh = next(iter(hip.findall("body")))
    hip.remove(thigh)
    body(tree, "trunk").append(thigh)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_foot, r"the link of joint RR_calf_joint has no foot: give it a sphere that collides; .*: capsule$"),
        (no_joint, r"has no joint FL_thigh_joint; it has FR_hip_joint, FR_thigh_joint, .*RL_calf_joint"),
        (a_tail, r"has joints that the task does not know: tail_joint; remove them"),
        (turned_around, r"joint FR_hip_joint must turn about 1 0 0 of its link, not -1 0 0"),
        (another_tree, r"RL_thigh_joint must hang on the link of joint RL_hip_joint; it hangs on the trunk"),
    ],
)
def test_what_is_missing_or_different_is_named(change, said: str, tmp_path: Path):
    file = written(go1.spec(), tmp_path / "robot.xml", change)
    with pytest.raises(UserError, match=f"--env.robot {re.escape(file)}.*{said}"):
        with_robot(go1.scene(), file)


def test_another_robot_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no joint FR_hip_joint, .*; it has left_hip_pitch_joint, "):
        with_robot(go1.scene(), written(g1.spec(), tmp_path / "g1.xml"))


def test_a_humanoid_without_soles_is_refused(tmp_path: Path):
    def barefoot(tree: Tree) -> None:
        link = body(tree, "left_ankle_roll_link")
        for geom in link.findall("geom"):
            geom.set("conaffinity", "0")

    with pytest.raises(UserError, match="left_ankle_roll_joint has no foot: give it a geom that collides"):
        with_robot(g1.scene(), written(g1.spec(), tmp_path / "g1.xml", barefoot))


def test_no_file_and_no_model_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"--env.robot missing\.xml: no such file"):
        with_robot(go1.scene(), "missing.xml")
    (tmp_path / "broken.xml").write_text("<mujoco><worldbody><body></worldbody></mujoco>")
    with pytest.raises(UserError, match=r"broken\.xml: MuJoCo says: .*XML"):
        with_robot(go1.scene(), str(tmp_path / "broken.xml"))


def taller(tree: Tree) -> None:
    """With thighs that are longer by a centimetre, and a heavier trunk."""
    for leg in go1.LEGS:
        calf = body(tree, f"{leg}_calf")
        x, y, z = map(float, str(calf.get("pos")).split())
        calf.set("pos", f"{x} {y} {z - 0.01}")
    trunk = body(tree, "trunk").find("inertial")
    assert trunk is not None
    trunk.set("mass", "9.5")


@pytest.mark.parametrize("kind", [Go1Velocity, Go1VelocityRough])
def test_a_task_takes_the_robot_of_a_file(kind: type[Go1Velocity], tmp_path: Path):
    file = written(go1.spec(), tmp_path / "go1.xml", taller)
    ours, theirs = (RobotEnv(kind(robot=robot, randomize=False), 2) for robot in ("", file))
    assert theirs.sim.model.body("trunk").mass[0] == pytest.approx(9.5)
    higher = (theirs.sim.qpos[:, 2] - ours.sim.qpos[:, 2]).tolist()
    assert higher == pytest.approx([0.01 * np.cos(go1.GO1.home_thigh) * np.cos(go1.GO1.home_hip)] * 2, abs=1e-4)


def test_the_humanoid_task_takes_the_robot_of_a_file(tmp_path: Path):
    def heavier(tree: Tree) -> None:
        pelvis = body(tree, "pelvis").find("inertial")
        assert pelvis is not None
        pelvis.set("mass", "5.5")

    env = RobotEnv(G1Velocity(robot=written(g1.spec(), tmp_path / "g1.xml", heavier)), 2)
    assert env.sim.model.body("pelvis").mass[0] == pytest.approx(5.5)


def test_the_humanoid_is_penalized_at_the_joint_limits_of_the_file(tmp_path: Path):
    def stiff_elbow(tree: Tree) -> None:
        next(iter(body(tree, "left_elbow_link").findall("joint"))).set("range", "-0.2 0.4")

    file = written(g1.spec(), tmp_path / "g1.xml", stiff_elbow)
    nobody, bent = torch.zeros(2, dtype=torch.bool), torch.tensor([0.3, 1.0])
    terms = []
    for robot in ("", file):
        env = RobotEnv(G1Velocity(robot=robot), 2)
        elbow = env.sim.model.joint("left_elbow_joint").qposadr[0]
        state = env.state()
        state["sim/qpos"][:] = torch.from_numpy(env.sim.model.key("home").qpos)
        state["sim/qpos"][:, elbow] = bent
        env.load_state(state)
        terms.append(env.task.reward(env.env_state, nobody)["joint_limits"] / env.step_seconds)
    ours, theirs = terms
    assert ours.tolist() == [0.0, 0.0]
    # Twice the angle beyond 0.95 of the limit.
    assert theirs.tolist() == pytest.approx([0.0, -2.0 * (1.0 - 0.95 * 0.4)], abs=1e-5)
