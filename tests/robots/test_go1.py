"""The quadruped against a reference model's figures, on the C engine; and what its contacts and sensors say."""

import copy
import itertools
from functools import cache

import mujoco
import numpy as np
import pytest

from paceline.robots.go1 import GO1, JOINTS, LEGS, scene, spec
from paceline.robots.scene import FLOOR

TOTAL_MASS = 12.743448
MASS = {"trunk": 5.204, "hip": 0.68, "thigh": 1.009, "calf": 0.195862}
PRINCIPAL_INERTIA = {
    "trunk": (0.0168101, 0.0630105, 0.0716565),
    "hip": (0.000398719, 0.000468438, 0.000734064),
    "thigh": (0.000709268, 0.00460903, 0.00478717),
    "calf": (3.58427e-05, 0.00148468, 0.00149767),
}
CENTRE_OF_FRONT_RIGHT = {
    "trunk": (0.0223, 0.002, -0.0005),
    "hip": (-0.0049166, 0.00762615, -8.865e-05),
    "thigh": (-0.00304722, 0.019315, -0.0305004),
    "calf": (0.00429862, 0.000976676, -0.146197),
}
HIP_AT = {
    "FR": (0.1881, -0.04675, 0.0),
    "FL": (0.1881, 0.04675, 0.0),
    "RR": (-0.1881, -0.04675, 0.0),
    "RL": (-0.1881, 0.04675, 0.0),
}
LINK_LENGTHS = {"thigh": 0.08, "calf": 0.213, "foot": 0.213}
JOINT_RANGES = {"hip": (-0.863, 0.863), "thigh": (-0.686, 4.501), "calf": (-2.818, -0.888)}
TORQUE = {"hip": 23.7, "thigh": 23.7, "calf": 35.55}
ARMATURE = {"hip": 0.004026312, "thigh": 0.004026312, "calf": 0.009059202}
STIFFNESS = {"hip": 15.895242653, "thigh": 15.895242653, "calf": 35.76429597}
DAMPING = {"hip": 1.011922576, "thigh": 1.011922576, "calf": 2.276825796}
HOME_ANGLES = {"hip": 0.1, "thigh": 0.9, "calf": -1.8}
HOME_TRUNK_ABOVE_FEET = 0.278 - 0.006530406
SETTLED_HEIGHT = 0.2580
"""After 3 s in the home pose under its own weight; the gains are soft."""


@cache
def model() -> mujoco.MjModel:
    model = scene().compile()
    # Else a world that blows up starts anew, and looks sound.
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    return model


def at_home(model: mujoco.MjModel, height: float | None = None) -> mujoco.MjData:
    world = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, world, model.key("home").id)
    if height is not None:
        world.qpos[2] = height
    mujoco.mj_forward(model, world)
    return world


def run(model: mujoco.MjModel, world: mujoco.MjData, seconds: float) -> None:
    mujoco.mj_step(model, world, round(seconds / model.opt.timestep))
    mujoco.mj_forward(model, world)


def touching(model: mujoco.MjModel, world: mujoco.MjData) -> set[str]:
    """Names of the geoms that touch the floor."""
    pairs = {frozenset((model.geom(c.geom1).name, model.geom(c.geom2).name)) for c in world.contact}
    assert all("floor" in pair for pair in pairs), pairs
    return {name for pair in pairs for name in pair - {"floor"}}


def part_of(name: str) -> str:
    """`FR_hip_joint` is a hip."""
    return name.split("_")[1] if name[:2] in LEGS else name


# Figures


def test_bodies_weigh_what_the_reference_weighs():
    m = model()
    names = [m.body(i).name for i in range(1, m.nbody)]
    assert names == ["trunk"] + [f"{leg}_{part}" for leg in LEGS for part in ("hip", "thigh", "calf")]
    for name in names:
        assert m.body(name).mass[0] == pytest.approx(MASS[part_of(name)], abs=1e-6), name
    assert m.body_mass.sum() == pytest.approx(TOTAL_MASS, abs=1e-5)


def test_inertias_are_the_references_within_a_percent_and_centres_of_mass_within_2_mm():
    m = model()
    for i in range(1, m.nbody):
        part = part_of(m.body(i).name)
        assert sorted(m.body(i).inertia) == pytest.approx(PRINCIPAL_INERTIA[part], rel=0.01), m.body(i).name
    for part, centre in CENTRE_OF_FRONT_RIGHT.items():
        name = part if part == "trunk" else f"FR_{part}"
        assert m.body(name).ipos == pytest.approx(centre, abs=2.01e-3), name


@pytest.mark.parametrize("leg", LEGS)
def test_links_are_as_long_as_the_references(leg: str):
    m, side = model(), 1.0 if leg.endswith("L") else -1.0
    assert m.body(f"{leg}_hip").pos == pytest.approx(HIP_AT[leg], abs=1e-6)
    assert m.body(f"{leg}_thigh").pos == pytest.approx((0.0, side * LINK_LENGTHS["thigh"], 0.0), abs=1e-6)
    assert m.body(f"{leg}_calf").pos == pytest.approx((0.0, 0.0, -LINK_LENGTHS["calf"]), abs=1e-6)
    for foot in (m.site(f"{leg}_foot"), m.geom(f"{leg}_foot")):
        assert foot.pos == pytest.approx((0.0, 0.0, -LINK_LENGTHS["foot"]), abs=1e-6)
    assert m.geom(f"{leg}_foot").size[0] == pytest.approx(0.023, abs=1e-6)


@pytest.mark.parametrize("name", JOINTS)
def test_joints_and_motors_have_the_references_figures(name: str):
    m, part = model(), part_of(name)
    joint, motor = m.joint(name), m.actuator(name)
    assert joint.range == pytest.approx(JOINT_RANGES[part], abs=1e-6)
    assert joint.axis == pytest.approx((1.0, 0.0, 0.0) if part == "hip" else (0.0, 1.0, 0.0))
    assert joint.armature[0] == pytest.approx(ARMATURE[part], rel=1e-6)
    assert (m.jnt_limited[joint.id], m.actuator_forcelimited[motor.id]) == (True, True)
    assert motor.forcerange == pytest.approx((-TORQUE[part], TORQUE[part]), abs=1e-6)
    assert motor.trnid[0] == joint.id
    kp, kd = STIFFNESS[part], DAMPING[part]
    assert motor.gainprm[:3] == pytest.approx((kp, 0.0, 0.0), rel=1e-6)
    assert motor.biasprm[:3] == pytest.approx((0.0, -kp, -kd), rel=1e-6)


def test_actuators_and_joint_angles_come_in_one_order():
    m = model()
    assert [m.actuator(i).name for i in range(m.nu)] == list(JOINTS)
    assert [int(m.joint(name).qposadr[0]) for name in JOINTS] == list(range(7, 19))


def test_the_home_pose_is_the_references_with_the_feet_on_the_floor():
    m, world = model(), at_home(model())
    signs = {name: -1.0 if part_of(name) == "hip" and name[1] == "L" else 1.0 for name in JOINTS}
    assert world.qpos[7:] == pytest.approx([signs[name] * HOME_ANGLES[part_of(name)] for name in JOINTS])
    assert world.ctrl == pytest.approx(world.qpos[7:])
    for leg in LEGS:
        assert GO1.home_height - world.site(f"{leg}_foot").xpos[2] == pytest.approx(HOME_TRUNK_ABOVE_FEET, abs=1e-4)
        assert world.geom(f"{leg}_foot").xpos[2] - m.geom(f"{leg}_foot").size[0] == pytest.approx(0.0, abs=1e-9)


# Standing


def test_dropped_from_5_mm_it_stands_for_3_seconds_on_its_feet_alone():
    m = model()
    world = at_home(m, GO1.home_height + 0.005)
    feet = {f"{leg}_foot" for leg in LEGS}
    for _ in range(30):
        run(m, world, 0.1)
        assert touching(m, world) <= feet
        assert world.sensor("upvector").data[2] > 0.99
    assert touching(m, world) == feet
    assert world.qpos[2] == pytest.approx(SETTLED_HEIGHT, abs=0.003)
    assert np.abs(world.qvel).max() < 0.05
    assert np.abs(world.actuator_force).max() < 0.5 * min(TORQUE.values())


def test_standing_the_feet_carry_the_weight():
    m = model()
    world = at_home(m)
    run(m, world, 3.0)
    forces = np.array([world.sensor(f"{leg}_foot_force").data for leg in LEGS])
    assert forces[:, 2].min() > 5.0
    assert forces.sum(axis=0) == pytest.approx((0.0, 0.0, 9.81 * TOTAL_MASS), abs=1.0)


# Symmetry


def mirror_joints(values: np.ndarray) -> np.ndarray:
    front_right, front_left, rear_right, rear_left = values.reshape(4, 3) * (-1.0, 1.0, 1.0)
    return np.concatenate((front_left, front_right, rear_left, rear_right))


def mirror(qpos: np.ndarray, qvel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The state seen in a mirror that stands along x; the trunk's rotation and spin change sign about x and z."""
    trunk, speed = qpos[:7] * (1, -1, 1, 1, -1, 1, -1), qvel[:6] * (1, -1, 1, -1, 1, -1)
    return np.concatenate((trunk, mirror_joints(qpos[7:]))), np.concatenate((speed, mirror_joints(qvel[6:])))


def random_state(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Any angles, any attitude, near the floor: `qpos`, `qvel`, `ctrl`."""
    m = model()
    low, high = m.jnt_range[1:].T
    attitude = generator.normal(size=4)
    angles, targets = generator.uniform(low, high, (2, m.nu))
    qpos = np.concatenate(((0.0, 0.0, 0.3), attitude / np.linalg.norm(attitude), angles))
    return qpos, generator.uniform(-1.0, 1.0, m.nv), targets


def test_left_and_right_are_mirror_images_in_all_they_do():
    """Random falls: every part of the shell comes to touch the floor in some of them."""
    m, generator, touched = model(), np.random.default_rng(0), set()
    for _ in range(20):
        qpos, qvel, ctrl = random_state(generator)
        worlds = mujoco.MjData(m), mujoco.MjData(m)
        starts = (qpos, qvel, ctrl), (*mirror(qpos, qvel), mirror_joints(ctrl))
        for world, (world.qpos, world.qvel, world.ctrl) in zip(worlds, starts, strict=True):
            run(m, world, 0.2)
        seen, image = worlds
        expected_qpos, expected_qvel = mirror(seen.qpos, seen.qvel)
        assert image.qpos == pytest.approx(expected_qpos, abs=1e-5)
        assert image.qvel == pytest.approx(expected_qvel, abs=1e-3)
        touched |= {part_of(name) for name in touching(m, seen)}
    assert touched == {"trunk", "head", "hip", "thigh", "calf", "foot"}


def test_left_and_right_look_alike():
    m, at = model(), at_home(model())
    for leg, other in (("FR", "FL"), ("RR", "RL")):
        for name in (g.name for g in map(m.geom, range(m.ngeom)) if g.name.startswith(leg)):
            twin = name.replace(leg, other)
            assert at.geom(twin).xpos == pytest.approx(at.geom(name).xpos * (1, -1, 1), abs=1e-9), name
            assert m.geom(twin).size == pytest.approx(m.geom(name).size, abs=1e-9), name


# Contacts


def test_the_robot_touches_the_ground_but_never_itself():
    m = model()
    robot = [i for i in range(m.ngeom) if m.geom(i).name != "floor"]
    drawn = {i for i in robot if part_of(m.geom(i).name) in ("back", "face", "shoulder")}

    def collide(a: int, b: int) -> bool:
        return bool(m.geom_contype[a] & m.geom_conaffinity[b] or m.geom_contype[b] & m.geom_conaffinity[a])

    assert not [pair for pair in itertools.combinations(robot, 2) if collide(*pair)]
    floor = m.geom("floor").id
    assert {i for i in robot if collide(i, floor)} == set(robot) - drawn
    assert not collide(floor, floor)
    assert (m.npair, m.nexclude) == (0, 0)


def test_legs_that_cross_make_no_contact():
    def contacts(robot: mujoco.MjModel) -> int:
        world, generator, count = mujoco.MjData(robot), np.random.default_rng(1), 0
        for _ in range(50):
            world.qpos, _, _ = random_state(generator)
            mujoco.mj_forward(robot, world)
            count += world.ncon
        return count

    robot = spec()
    assert contacts(robot.compile()) == 0
    for geom in robot.geoms:
        geom.contype = 1
    assert contacts(robot.compile()) > 0, "the poses cross no legs"


def test_feet_grip_as_they_are_told_whatever_the_ground():
    rough = FLOOR.replace("/>", ' friction="2"/>')
    m = scene(ground=rough).compile()
    world = at_home(m, GO1.home_height - 0.001)
    assert [tuple(c.friction[:2]) for c in world.contact] == [(0.6, 0.6)] * 4
    assert [c.dim for c in world.contact] == [3] * 4


def test_ground_may_be_of_other_geoms():
    step = '<geom name="step" type="box" pos=".19 0 0" size=".05 .5 .1" contype="1" conaffinity="0"/>'
    m = scene(ground=step).compile()
    world = at_home(m, GO1.home_height + 0.0999)
    found = [world.sensor(f"{leg}_foot_contact").data[0] for leg in LEGS]
    assert found == [1, 1, 0, 0]


# Sensors


def test_all_sensors_are_there_and_contact_is_known_before_forces():
    m = model()
    expected = {"gyro": 3, "velocity": 3, "upvector": 3, "trunk_contact": 1}
    for leg in LEGS:
        expected |= {f"{leg}_foot_{what}": 3 for what in ("position", "velocity", "force")}
        expected |= {f"{leg}_{part}_contact": 1 for part in ("foot", "thigh", "calf")}
    assert {m.sensor(i).name: m.sensor_dim[i] for i in range(m.nsensor)} == expected
    late = {m.sensor(i).name for i in range(m.nsensor) if m.sensor_needstage[i] == mujoco.mjtStage.mjSTAGE_ACC}
    assert late == {f"{leg}_foot_force" for leg in LEGS}


def test_the_trunks_velocity_spin_and_upvector_are_in_its_own_frame():
    m = model()
    world = at_home(m, 1.0)
    # Turned to the left by a right angle, then nose down by 0.3.
    mujoco.mju_mulQuat(
        world.qpos[3:7], np.array((np.sqrt(0.5), 0, 0, np.sqrt(0.5))), np.array((np.cos(0.15), 0, np.sin(0.15), 0))
    )
    world.qvel[:6] = (0.0, 2.0, 0.0, 0.1, 0.2, 0.3)
    mujoco.mj_forward(m, world)
    assert world.sensor("velocity").data == pytest.approx((2 * np.cos(0.3), 0.0, 2 * np.sin(0.3)))
    assert world.sensor("gyro").data == pytest.approx((0.1, 0.2, 0.3))
    assert world.sensor("upvector").data == pytest.approx((-np.sin(0.3), 0.0, np.cos(0.3)))


def test_feet_positions_and_velocities_are_in_the_worlds_axes():
    m = model()
    world = at_home(m, 1.0)
    world.qvel[:3], world.qvel[m.joint("RL_hip_joint").dofadr] = (0.5, 0.0, -0.1), 2.0
    mujoco.mj_forward(m, world)
    for leg in LEGS:
        assert world.sensor(f"{leg}_foot_position").data == pytest.approx(world.geom(f"{leg}_foot").xpos)
    assert world.sensor("FR_foot_velocity").data == pytest.approx((0.5, 0.0, -0.1))
    arm = world.sensor("RL_foot_position").data - world.joint("RL_hip_joint").xanchor
    assert world.sensor("RL_foot_velocity").data == pytest.approx((0.5, -2.0 * arm[2], 2.0 * arm[1] - 0.1))


def test_contact_sensors_name_the_part_that_touches():
    """In random poses, sunk into the floor a little."""
    m, generator, seen = model(), np.random.default_rng(2), set()
    sensors = {f"{leg}_{part}": f"{leg}_{part}_contact" for leg in LEGS for part in ("foot", "thigh", "calf")}
    for _ in range(100):
        world = mujoco.MjData(m)
        world.qpos, _, _ = random_state(generator)
        world.qpos[2] = 0.1
        mujoco.mj_forward(m, world)
        touched = touching(m, world)
        said = {geom for geom, sensor in sensors.items() if world.sensor(sensor).data[0] > 0}
        assert said == touched & set(sensors)
        assert (world.sensor("trunk_contact").data[0] > 0) == bool(touched & {"trunk", "head"})
        seen |= touched
    assert set(sensors) | {"trunk", "head"} <= seen


# Limits


def sweep(m: mujoco.MjModel, name: str, height: float | None) -> tuple[float, float]:
    """The least and the greatest angle while the target goes through the joint's range, waits, goes back and waits."""
    world, (low, high), angles = at_home(m, height), m.joint(name).range, []
    upwards = np.concatenate((np.linspace(low, high, 200), np.full(100, high)))
    for target in np.concatenate((upwards, low + high - upwards)):
        world.actuator(name).ctrl[0] = target
        mujoco.mj_step(m, world)
        assert np.isfinite(world.qpos).all()
        angles.append(world.joint(name).qpos[0])
    assert world.warning[mujoco.mjtWarning.mjWARN_BADQACC].number == 0
    return min(angles), max(angles)


@pytest.mark.parametrize("name", JOINTS)
def test_a_sweep_in_weightlessness_reaches_both_ends_of_the_joints_range(name: str):
    m = copy.copy(model())
    m.opt.gravity[:] = 0.0
    assert sweep(m, name, height=2.0) == pytest.approx(JOINT_RANGES[part_of(name)], abs=0.05)


@pytest.mark.parametrize("name", JOINTS)
def test_a_sweep_on_the_floor_stays_finite_and_within_the_joints_range(name: str):
    least, greatest = sweep(model(), name, height=None)
    low, high = JOINT_RANGES[part_of(name)]
    assert low - 0.1 < least < greatest < high + 0.1


def test_targets_at_the_ends_of_all_ranges_stay_finite_and_within_the_motors_torque():
    m, generator = model(), np.random.default_rng(3)
    low, high = m.jnt_range[1:].T
    world = at_home(m)
    for _ in range(100):
        world.ctrl = np.where(generator.random(m.nu) < 0.5, low, high)
        run(m, world, 0.1)
        assert np.isfinite(world.qpos).all()
        assert np.abs(world.qvel).max() < 100.0
        assert (np.abs(world.actuator_force) <= m.actuator_forcerange[:, 1] + 1e-9).all()
        assert 0.0 < world.qpos[2] < 1.0
