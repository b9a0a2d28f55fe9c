"""Compare the quadruped with the figures of a reference model, and check its contacts and sensors in the C engine."""

import copy
import itertools
from functools import cache

import mujoco
import numpy as np
import pytest

from paceline.robots.legged import GO1
from paceline.robots.legged import GO1_LEGS as LEGS
from paceline.tasks.velocity.go1_velocity import Go1Velocity

JOINTS = tuple(f"{leg}_{part}_joint" for leg in LEGS for part in ("hip", "thigh", "calf"))
TOTAL_MASS = 12.743448
MASS = {"trunk": 5.204, "hip": 0.68, "thigh": 1.009, "calf": 0.195862}
PRINCIPAL_INERTIA = {
    "trunk": (0.0168101, 0.0630105, 0.0716565),
    "hip": (0.000398719, 0.000468438, 0.000734064),
    "thigh": (0.000709268, 0.00460903, 0.00478717),
    "calf": (3.58427e-05, 0.00148468, 0.00149767),
}
CENTER_OF_FRONT_RIGHT = {
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
HOME_HEIGHT = HOME_TRUNK_ABOVE_FEET + 0.023
SETTLED_HEIGHT = 0.2580
"""Height of the base after 3 s in the home pose, meters. The soft gains let it sink."""


@cache
def model() -> mujoco.MjModel:
    model = GO1.scene().compile()
    # Otherwise MuJoCo resets a simulation that diverges, and the test would not see it.
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    return model


def at_home(model: mujoco.MjModel, height: float | None = None) -> mujoco.MjData:
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, model.key("home").id)
    if height is not None:
        data.qpos[2] = height
    mujoco.mj_forward(model, data)
    return data


def run(model: mujoco.MjModel, data: mujoco.MjData, seconds: float) -> None:
    mujoco.mj_step(model, data, round(seconds / model.opt.timestep))
    mujoco.mj_forward(model, data)


def touching(model: mujoco.MjModel, data: mujoco.MjData) -> set[str]:
    """Return the names of the geoms that touch the floor."""
    pairs = {frozenset((model.geom(c.geom1).name, model.geom(c.geom2).name)) for c in data.contact}
    assert all("floor" in pair for pair in pairs), pairs
    return {name for pair in pairs for name in pair - {"floor"}}


def part_of(name: str) -> str:
    """Return "hip" for "FR_hip_joint"."""
    return name.split("_")[1] if name[:2] in LEGS else name


# Figures


def test_body_masses_equal_the_reference():
    m = model()
    names = [m.body(i).name for i in range(1, m.nbody)]
    assert names == ["trunk"] + [f"{leg}_{part}" for leg in LEGS for part in ("hip", "thigh", "calf")]
    for name in names:
        assert m.body(name).mass[0] == pytest.approx(MASS[part_of(name)], abs=1e-6), name
    assert m.body_mass.sum() == pytest.approx(TOTAL_MASS, abs=1e-5)


def test_inertias_are_within_1_percent_and_centers_of_mass_within_2_mm_of_the_reference():
    m = model()
    for i in range(1, m.nbody):
        part = part_of(m.body(i).name)
        assert sorted(m.body(i).inertia) == pytest.approx(PRINCIPAL_INERTIA[part], rel=0.01), m.body(i).name
    for part, center in CENTER_OF_FRONT_RIGHT.items():
        name = part if part == "trunk" else f"FR_{part}"
        assert m.body(name).ipos == pytest.approx(center, abs=2.01e-3), name


@pytest.mark.parametrize("leg", LEGS)
def test_link_lengths_equal_the_reference(leg: str):
    m, side = model(), 1.0 if leg.endswith("L") else -1.0
    assert m.body(f"{leg}_hip").pos == pytest.approx(HIP_AT[leg], abs=1e-6)
    assert m.body(f"{leg}_thigh").pos == pytest.approx((0.0, side * LINK_LENGTHS["thigh"], 0.0), abs=1e-6)
    assert m.body(f"{leg}_calf").pos == pytest.approx((0.0, 0.0, -LINK_LENGTHS["calf"]), abs=1e-6)
    for foot in (m.site(f"{leg}_foot"), m.geom(f"{leg}_foot")):
        assert foot.pos == pytest.approx((0.0, 0.0, -LINK_LENGTHS["foot"]), abs=1e-6)
    assert m.geom(f"{leg}_foot").size[0] == pytest.approx(0.023, abs=1e-6)


@pytest.mark.parametrize("name", JOINTS)
def test_joints_and_actuators_equal_the_reference(name: str):
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


def test_actuators_and_joint_positions_have_the_same_order():
    m = model()
    assert [m.actuator(i).name for i in range(m.nu)] == list(JOINTS)
    assert [int(m.joint(name).qposadr[0]) for name in JOINTS] == list(range(7, 19))


def test_the_task_uses_the_gains_and_the_home_pose_of_the_model():
    parts, constants = [part_of(name) for name in JOINTS], Go1Velocity(action_scale=0.25).constants()
    assert constants["kp"] == pytest.approx([STIFFNESS[part] for part in parts], rel=1e-6)
    assert constants["kd"] == pytest.approx([DAMPING[part] for part in parts], rel=1e-6)
    assert constants["max_torque"] == pytest.approx([TORQUE[part] for part in parts])
    assert constants["default_joint_pos"] == pytest.approx(at_home(model()).qpos[7:])
    scale = [0.25 * TORQUE[part] / STIFFNESS[part] for part in parts]
    assert constants["action_scale"] == pytest.approx(scale, rel=1e-6)


def test_the_home_pose_equals_the_reference_with_the_feet_on_the_floor():
    m, data = model(), at_home(model())
    signs = {name: -1.0 if part_of(name) == "hip" and name[1] == "L" else 1.0 for name in JOINTS}
    assert data.qpos[7:] == pytest.approx([signs[name] * HOME_ANGLES[part_of(name)] for name in JOINTS])
    assert data.ctrl == pytest.approx(data.qpos[7:])
    for leg in LEGS:
        assert data.qpos[2] - data.site(f"{leg}_foot").xpos[2] == pytest.approx(HOME_TRUNK_ABOVE_FEET, abs=1e-4)
        assert data.geom(f"{leg}_foot").xpos[2] - m.geom(f"{leg}_foot").size[0] == pytest.approx(0.0, abs=1e-9)


# Standing


def test_after_a_drop_of_5_mm_it_stands_for_3_seconds_on_its_feet_only():
    m = model()
    data = at_home(m, HOME_HEIGHT + 0.005)
    feet = {f"{leg}_foot" for leg in LEGS}
    for _ in range(30):
        run(m, data, 0.1)
        assert touching(m, data) <= feet
        assert data.sensor("upvector").data[2] > 0.99
    assert touching(m, data) == feet
    assert data.qpos[2] == pytest.approx(SETTLED_HEIGHT, abs=0.003)
    assert np.abs(data.qvel).max() < 0.05
    assert np.abs(data.actuator_force).max() < 0.5 * min(TORQUE.values())


def test_the_feet_carry_the_weight():
    m = model()
    data = at_home(m)
    run(m, data, 3.0)
    forces = np.zeros((len(LEGS), 3))
    for index, contact in enumerate(data.contact):
        wrench = np.zeros(6)
        mujoco.mj_contactForce(m, data, index, wrench)
        # The normal points from the first geom, the floor, to the foot.
        assert m.geom(contact.geom1).name == "floor"
        forces[LEGS.index(m.geom(contact.geom2).name[:2])] += contact.frame.reshape(3, 3).T @ wrench[:3]
    assert forces[:, 2].min() > 5.0
    assert forces.sum(axis=0) == pytest.approx((0.0, 0.0, 9.81 * TOTAL_MASS), abs=1.0)


# Symmetry


def mirror_joints(values: np.ndarray) -> np.ndarray:
    front_right, front_left, rear_right, rear_left = values.reshape(4, 3) * (-1.0, 1.0, 1.0)
    return np.concatenate((front_left, front_right, rear_left, rear_right))


def mirror(qpos: np.ndarray, qvel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mirror a state at the xz plane: rotations and angular velocities about x and z change sign."""
    trunk, speed = qpos[:7] * (1, -1, 1, 1, -1, 1, -1), qvel[:6] * (1, -1, 1, -1, 1, -1)
    return np.concatenate((trunk, mirror_joints(qpos[7:]))), np.concatenate((speed, mirror_joints(qvel[6:])))


def random_state(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample `qpos`, `qvel` and `ctrl`: any joint positions and orientation, near the floor."""
    m = model()
    low, high = m.jnt_range[1:].T
    attitude = generator.normal(size=4)
    angles, targets = generator.uniform(low, high, (2, m.nu))
    qpos = np.concatenate(((0.0, 0.0, 0.3), attitude / np.linalg.norm(attitude), angles))
    return qpos, generator.uniform(-1.0, 1.0, m.nv), targets


def test_left_and_right_move_as_mirror_images():
    """In 20 random falls, every colliding part touches the floor at least once."""
    m, generator, touched = model(), np.random.default_rng(0), set()
    for _ in range(20):
        qpos, qvel, ctrl = random_state(generator)
        pair = mujoco.MjData(m), mujoco.MjData(m)
        starts = (qpos, qvel, ctrl), (*mirror(qpos, qvel), mirror_joints(ctrl))
        for data, (data.qpos, data.qvel, data.ctrl) in zip(pair, starts, strict=True):
            run(m, data, 0.2)
        original, image = pair
        expected_qpos, expected_qvel = mirror(original.qpos, original.qvel)
        assert image.qpos == pytest.approx(expected_qpos, abs=1e-5)
        assert image.qvel == pytest.approx(expected_qvel, abs=1e-3)
        touched |= {part_of(name) for name in touching(m, original)}
    assert touched == {"trunk", "head", "hip", "thigh", "calf", "foot"}


def test_left_and_right_have_the_same_geoms():
    m, at = model(), at_home(model())
    for leg, other in (("FR", "FL"), ("RR", "RL")):
        for name in (g.name for g in map(m.geom, range(m.ngeom)) if g.name.startswith(leg)):
            twin = name.replace(leg, other)
            assert at.geom(twin).xpos == pytest.approx(at.geom(name).xpos * (1, -1, 1), abs=1e-9), name
            assert m.geom(twin).size == pytest.approx(m.geom(name).size, abs=1e-9), name


# Contacts


def test_the_robot_collides_with_the_ground_and_not_with_itself():
    m = model()
    robot = [i for i in range(m.ngeom) if m.geom(i).name != "floor"]
    visual = {i for i in robot if part_of(m.geom(i).name) in ("back", "face", "shoulder")}

    def collide(a: int, b: int) -> bool:
        return bool(m.geom_contype[a] & m.geom_conaffinity[b] or m.geom_contype[b] & m.geom_conaffinity[a])

    assert not [pair for pair in itertools.combinations(robot, 2) if collide(*pair)]
    floor = m.geom("floor").id
    assert {i for i in robot if collide(i, floor)} == set(robot) - visual
    assert not collide(floor, floor)
    assert (m.npair, m.nexclude) == (0, 0)


def test_legs_that_cross_make_no_contact():
    def contacts(robot: mujoco.MjModel) -> int:
        data, generator, count = mujoco.MjData(robot), np.random.default_rng(1), 0
        for _ in range(50):
            data.qpos, _, _ = random_state(generator)
            mujoco.mj_forward(robot, data)
            count += data.ncon
        return count

    robot = GO1.scene()
    robot.delete(robot.geom("floor"))
    assert contacts(robot.compile()) == 0
    for geom in robot.geoms:
        geom.contype = 1
    assert contacts(robot.compile()) > 0, "no legs cross in these poses"


def test_the_friction_of_the_feet_does_not_depend_on_the_ground():
    scene = GO1.scene()
    scene.geom("floor").friction[0] = 2.0
    m = scene.compile()
    data = at_home(m, HOME_HEIGHT - 0.001)
    assert [tuple(c.friction[:2]) for c in data.contact] == [(0.6, 0.6)] * 4
    assert [c.dim for c in data.contact] == [3] * 4


def test_feet_touch_other_ground_geoms():
    scene = GO1.scene()
    scene.delete(scene.geom("floor"))
    box = mujoco.mjtGeom.mjGEOM_BOX
    scene.worldbody.add_geom(type=box, pos=(0.19, 0.0, 0.0), size=(0.05, 0.5, 0.1), contype=1, conaffinity=0)
    m = scene.compile()
    data = at_home(m, HOME_HEIGHT + 0.0999)
    found = [data.sensor(f"{leg}_foot_contact").data[0] for leg in LEGS]
    assert found == [1, 1, 0, 0]


# Sensors


def test_all_sensors_exist_and_none_needs_the_constraint_solver():
    m = model()
    expected = {"gyro": 3, "velocity": 3, "upvector": 3, "trunk_contact": 1}
    for leg in LEGS:
        expected |= {f"{leg}_foot_velocity": 3, f"{leg}_foot_contact": 1, f"{leg}_thigh_contact": 1}
    assert {m.sensor(i).name: m.sensor_dim[i] for i in range(m.nsensor)} == expected
    assert not (m.sensor_needstage == mujoco.mjtStage.mjSTAGE_ACC.value).any()


def test_velocity_gyro_and_upvector_are_in_the_frame_of_the_trunk():
    m = model()
    data = at_home(m, 1.0)
    # Yaw of 90 degrees, then a pitch of 0.3 rad.
    mujoco.mju_mulQuat(
        data.qpos[3:7], np.array((np.sqrt(0.5), 0, 0, np.sqrt(0.5))), np.array((np.cos(0.15), 0, np.sin(0.15), 0))
    )
    data.qvel[:6] = (0.0, 2.0, 0.0, 0.1, 0.2, 0.3)
    mujoco.mj_forward(m, data)
    assert data.sensor("velocity").data == pytest.approx((2 * np.cos(0.3), 0.0, 2 * np.sin(0.3)))
    assert data.sensor("gyro").data == pytest.approx((0.1, 0.2, 0.3))
    assert data.sensor("upvector").data == pytest.approx((-np.sin(0.3), 0.0, np.cos(0.3)))


def test_foot_velocities_are_in_global_axes():
    m = model()
    data = at_home(m, 1.0)
    data.qvel[:3], data.qvel[m.joint("RL_hip_joint").dofadr] = (0.5, 0.0, -0.1), 2.0
    mujoco.mj_forward(m, data)
    assert data.sensor("FR_foot_velocity").data == pytest.approx((0.5, 0.0, -0.1))
    arm = data.geom("RL_foot").xpos - data.joint("RL_hip_joint").xanchor
    assert data.sensor("RL_foot_velocity").data == pytest.approx((0.5, -2.0 * arm[2], 2.0 * arm[1] - 0.1))


def test_contact_sensors_report_the_part_that_touches():
    """The robot penetrates the floor in random poses."""
    m, generator, seen = model(), np.random.default_rng(2), set()
    sensors = {f"{leg}_{part}": f"{leg}_{part}_contact" for leg in LEGS for part in ("foot", "thigh")}
    for _ in range(100):
        data = mujoco.MjData(m)
        data.qpos, _, _ = random_state(generator)
        data.qpos[2] = 0.1
        mujoco.mj_forward(m, data)
        touched = touching(m, data)
        reported = {geom for geom, sensor in sensors.items() if data.sensor(sensor).data[0] > 0}
        assert reported == touched & set(sensors)
        assert (data.sensor("trunk_contact").data[0] > 0) == bool(touched & {"trunk", "head"})
        seen |= touched
    assert set(sensors) | {"trunk", "head"} <= seen


# Limits


def sweep(m: mujoco.MjModel, name: str, height: float | None) -> tuple[float, float]:
    """Return the minimum and maximum position while the target moves through the range of the joint and back."""
    data, (low, high), angles = at_home(m, height), m.joint(name).range, []
    upwards = np.concatenate((np.linspace(low, high, 200), np.full(100, high)))
    for target in np.concatenate((upwards, low + high - upwards)):
        data.actuator(name).ctrl[0] = target
        mujoco.mj_step(m, data)
        assert np.isfinite(data.qpos).all()
        angles.append(data.joint(name).qpos[0])
    assert data.warning[mujoco.mjtWarning.mjWARN_BADQACC].number == 0
    return min(angles), max(angles)


@pytest.mark.parametrize("name", JOINTS)
def test_without_gravity_a_sweep_reaches_both_ends_of_the_range(name: str):
    m = copy.copy(model())
    m.opt.gravity[:] = 0.0
    assert sweep(m, name, height=2.0) == pytest.approx(JOINT_RANGES[part_of(name)], abs=0.05)


@pytest.mark.parametrize("name", JOINTS)
def test_a_sweep_on_the_floor_stays_finite_and_within_the_range(name: str):
    lowest, highest = sweep(model(), name, height=None)
    low, high = JOINT_RANGES[part_of(name)]
    assert low - 0.1 < lowest < highest < high + 0.1


def test_random_extreme_targets_stay_finite_and_within_the_effort_limits():
    m, generator = model(), np.random.default_rng(3)
    low, high = m.jnt_range[1:].T
    data = at_home(m)
    for _ in range(100):
        data.ctrl = np.where(generator.random(m.nu) < 0.5, low, high)
        run(m, data, 0.1)
        assert np.isfinite(data.qpos).all()
        assert np.abs(data.qvel).max() < 100.0
        assert (np.abs(data.actuator_force) <= m.actuator_forcerange[:, 1] + 1e-9).all()
        assert 0.0 < data.qpos[2] < 1.0
