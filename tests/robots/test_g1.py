"""Compare the humanoid with the figures of mjlab's G1, and check its contacts, sensors and symmetry."""

import re
from collections.abc import Iterator

import mujoco
import numpy as np
import pytest

from paceline.robots.legged import G1
from paceline.view.camera import Camera

BODIES = {
    # mass, distance from the parent's joint
    "waist_yaw_link": (0.214, 0.0),
    "waist_roll_link": (0.086, 0.04418),
    "torso_link": (7.818, 0.0),
    "hip_pitch_link": (1.35, 0.12125),
    "hip_roll_link": (1.52, 0.06027),
    "hip_yaw_link": (1.702, 0.12661),
    "knee_link": (1.932, 0.19386),
    "ankle_pitch_link": (0.074, 0.30001),
    "ankle_roll_link": (0.608, 0.01756),
    "shoulder_pitch_link": (0.718, 0.26731),
    "shoulder_roll_link": (0.643, 0.04044),
    "shoulder_yaw_link": (0.734, 0.10339),
    "elbow_link": (0.6, 0.08205),
    "wrist_roll_link": (0.085445, 0.10052),
    "wrist_pitch_link": (0.48405, 0.038),
    "wrist_yaw_link": (0.254576, 0.046),
}
POSITIONS = {
    "left_hip_yaw_link": (0.04622, 0.11645, -0.25104),
    "left_knee_link": (0.0, 0.1186, -0.4393),
    "left_ankle_roll_link": (0.0, 0.11851, -0.75686),
    "torso_link": (-0.00396, 0.0, 0.044),
    "left_shoulder_pitch_link": (-0.00001, 0.10022, 0.29178),
    "left_elbow_link": (0.01577, 0.14681, 0.10524),
    "left_wrist_yaw_link": (0.19977, 0.14866, 0.09523),
}
"""Positions relative to the pelvis with all joints at zero, meters."""
JOINTS = {
    # axis, range on the left side, effort limit, armature, joint-space inertia in the home pose
    "hip_pitch": ("y", -2.5307, 2.8798, 88.0, 0.0101775, 0.86444),
    "hip_roll": ("x", -0.5236, 2.9671, 139.0, 0.0251019, 0.66486),
    "hip_yaw": ("z", -2.7576, 2.7576, 88.0, 0.0101775, 0.13975),
    "knee": ("y", -0.087267, 2.8798, 139.0, 0.0251019, 0.13657),
    "ankle_pitch": ("y", -0.87267, 0.5236, 50.0, 0.0072195, 0.01000),
    "ankle_roll": ("x", -0.2618, 0.2618, 50.0, 0.0072195, 0.00761),
    "waist_yaw": ("z", -2.618, 2.618, 88.0, 0.0101775, 0.29171),
    "waist_roll": ("x", -0.52, 0.52, 50.0, 0.0072195, 0.78167),
    "waist_pitch": ("y", -0.52, 0.52, 50.0, 0.0072195, 0.56158),
    "shoulder_pitch": ("y", -3.0892, 2.6704, 25.0, 0.0036097, 0.17846),
    "shoulder_roll": ("x", -1.5882, 2.2515, 25.0, 0.0036097, 0.13598),
    "shoulder_yaw": ("z", -2.618, 2.618, 25.0, 0.0036097, 0.03103),
    "elbow": ("y", -1.0472, 2.0944, 25.0, 0.0036097, 0.03806),
    "wrist_roll": ("x", -1.97222, 1.97222, 25.0, 0.0036097, 0.00398),
    "wrist_pitch": ("y", -1.61443, 1.61443, 5.0, 0.00425, 0.00905),
    "wrist_yaw": ("z", -1.61443, 1.61443, 5.0, 0.00425, 0.00609),
}
GAINS = {88.0: (40.179, 2.5579), 139.0: (99.098, 6.3088), 50.0: (28.501, 1.8144), 25.0: (14.251, 0.90722)}
GAINS[5.0] = (16.778, 1.0681)
"""kp and kd by effort limit."""
LEGS, TRUNK, ARMS = list(JOINTS)[:6], list(JOINTS)[6:9], list(JOINTS)[9:]
ORDER = [
    *(f"{side}_{name}_joint" for side in ("left", "right") for name in LEGS),
    *(f"{name}_joint" for name in TRUNK),
    *(f"{side}_{name}_joint" for side in ("left", "right") for name in ARMS),
]
HOME = {"hip_pitch": -0.312, "knee": 0.669, "ankle_pitch": -0.363}
HOME |= {"shoulder_pitch": 0.2, "shoulder_roll": 0.2, "elbow": 0.6}
SWAY = {
    0.2: (0.0118, 0.7379),
    0.4: (0.0466, 0.7353),
    0.6: (0.0952, 0.7303),
    0.8: (0.1673, 0.717),
    1.0: (0.2748, 0.6842),
}
"""x and z of the pelvis by time, on a floor, starting in the home pose with constant targets."""
FOOT_SENSORS = {"position": 3, "velocity": 3, "contact": 1}
SENSORS = {"gyro": 3, "velocity": 3, "upvector": 3, "torso_contact": 1, "pelvis_contact": 1}
SENSORS |= {f"{side}_foot_{name}": dim for side in ("left", "right") for name, dim in FOOT_SENSORS.items()}
SOLES = {f"{side}_foot_{edge}" for side in ("left", "right") for edge in ("inner", "outer")}
COLLIDES = SOLES | {"pelvis", "torso", "head"}
COLLIDES |= {f"{side}_{name}" for side in ("left", "right") for name in ("thigh", "shin", "forearm", "hand")}


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return G1.scene().compile()


@pytest.fixture
def home(model: mujoco.MjModel) -> mujoco.MjData:
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, model.key("home").id)
    mujoco.mj_forward(model, data)
    return data


def one_side(name: str) -> str:
    return re.sub("^(left|right)_", "", name)


def other_side(name: str) -> str:
    return re.sub("^(left|right)", lambda found: "right" if found[0] == "left" else "left", name)


def bodies(model: mujoco.MjModel) -> Iterator[tuple[int, str]]:
    return ((index, model.body(index).name) for index in range(1, model.nbody))


def touching(model: mujoco.MjModel, data: mujoco.MjData) -> set[str]:
    """Return the geoms that touch the floor. Any other contact is an error."""
    pairs = [{model.geom(index).name for index in pair} for pair in data.contact.geom]
    assert all("floor" in pair for pair in pairs), pairs
    return set().union(*pairs) - {"floor"}


def mirrored(model: mujoco.MjModel, data: mujoco.MjData) -> mujoco.MjData:
    """Return the state and controls mirrored at the xz plane."""
    image = mujoco.MjData(model)
    image.qpos[:7] = data.qpos[:7] * (1, -1, 1, 1, -1, 1, -1)
    image.qvel[:6] = data.qvel[:6] * (1, -1, 1, -1, 1, -1)
    for index, name in enumerate(ORDER):
        other = ORDER.index(other_side(name))
        sign = 1.0 if JOINTS[one_side(name).removesuffix("_joint")][0] == "y" else -1.0
        image.qpos[7 + other], image.qvel[6 + other] = sign * data.qpos[7 + index], sign * data.qvel[6 + index]
        image.ctrl[other] = sign * data.ctrl[index]
    return image


def test_body_masses_equal_the_reference(model: mujoco.MjModel):
    assert model.body_mass.sum() == pytest.approx(33.341142, abs=1e-6)
    found = {name: model.body_mass[index] for index, name in bodies(model)}
    assert found == pytest.approx(
        {"pelvis": 3.813} | {name: BODIES[one_side(name)][0] for name in found if name != "pelvis"}, abs=1e-6
    )
    assert len(found) == 1 + len(ORDER)


def test_link_lengths_equal_the_reference(model: mujoco.MjModel):
    found = {name: np.linalg.norm(model.body_pos[index]) for index, name in bodies(model) if name != "pelvis"}
    assert found == pytest.approx({name: BODIES[one_side(name)][1] for name in found}, abs=1e-5)


def test_joint_positions_in_the_zero_pose_equal_the_reference(model: mujoco.MjModel):
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    for name, place in POSITIONS.items():
        assert data.body(name).xpos - data.body("pelvis").xpos == pytest.approx(place, abs=5e-5), name


def test_joint_order_axes_ranges_and_armatures_equal_the_reference(model: mujoco.MjModel):
    assert [model.joint(index).name for index in range(1, model.njnt)] == ORDER
    for name in ORDER:
        axis, low, high, _, armature, _ = JOINTS[one_side(name).removesuffix("_joint")]
        if name.startswith("right") and axis != "y":
            low, high = -high, -low
        joint = model.joint(name)
        assert joint.axis.tolist() == [float(letter == axis) for letter in "xyz"], name
        assert joint.range == pytest.approx((low, high), abs=1e-6), name
        assert joint.armature == pytest.approx(armature, rel=1e-4), name
        assert not joint.damping.any(), name
        assert not joint.frictionloss.any(), name


def test_actuators_have_the_order_of_the_joints_and_the_gains_and_effort_limits_of_the_reference(model: mujoco.MjModel):
    assert [model.joint(joint).name for joint in model.actuator_trnid[:, 0]] == ORDER
    for name in ORDER:
        torque = JOINTS[one_side(name).removesuffix("_joint")][3]
        kp, kd = GAINS[torque]
        actuator = model.actuator(name)
        assert actuator.forcerange.tolist() == [-torque, torque], name
        assert actuator.gainprm[0] == pytest.approx(kp, rel=1e-4), name
        assert actuator.biasprm[:3] == pytest.approx((0.0, -kp, -kd), rel=1e-4), name


def test_joint_space_inertias_equal_the_reference(model: mujoco.MjModel, home: mujoco.MjData):
    columns = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, home, columns)
    felt = np.diag(columns)
    for name in ORDER:
        inertia = JOINTS[one_side(name).removesuffix("_joint")][5]
        assert felt[model.joint(name).dofadr[0]] == pytest.approx(inertia, rel=2e-3), name
    assert felt[3:6] == pytest.approx((3.7791, 3.4486, 0.5734), rel=1e-3)
    assert home.subtree_com[1] - home.body("pelvis").xpos == pytest.approx((0.0306, 0.0, -0.0876), abs=2e-4)


def test_in_the_home_pose_it_stands_on_its_soles_at_the_reference_height(model: mujoco.MjModel, home: mujoco.MjData):
    for name in ORDER:
        angle = HOME.get(one_side(name).removesuffix("_joint"), 0.0)
        angle = -angle if name == "right_shoulder_roll_joint" else angle
        assert home.joint(name).qpos == pytest.approx(angle), name
        assert home.actuator(name).ctrl == pytest.approx(angle), name
    assert home.qpos[3:7].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert home.qpos[2] == pytest.approx(0.75702, abs=5e-4)
    assert home.ncon == 0
    home.qpos[2] -= 0.002
    mujoco.mj_forward(model, home)
    assert touching(model, home) == SOLES
    assert home.contact.dist == pytest.approx([-0.0015] * 8, abs=6e-4), "heels and toes, flat within a millimeter"


def test_open_loop_it_stays_upright_for_a_second_and_sways_like_the_reference(
    model: mujoco.MjModel, home: mujoco.MjData
):
    swayed = {}
    while home.time < 1.0 - 1e-9:
        mujoco.mj_step(model, home)
        assert touching(model, home) <= SOLES
        if round(home.time, 3) in SWAY:
            swayed[round(home.time, 3)] = (home.qpos[0], home.qpos[2])
    assert home.sensor("upvector").data[2] > 0.95
    assert home.qpos[2] > 0.67
    assert swayed.keys() == SWAY.keys()
    for time, place in SWAY.items():
        assert swayed[time] == pytest.approx(place, abs=0.008), time


def test_the_torso_contact_sensor_reports_a_fall(model: mujoco.MjModel, home: mujoco.MjData):
    reported = False
    while home.time < 3.0:
        mujoco.mj_step(model, home)
        reported |= bool(home.sensor("torso_contact").data[0] > 0.0)
    assert reported
    assert home.sensor("upvector").data[2] < 0.5
    assert home.qpos[2] < 0.3
    assert home.sensor("left_foot_contact").data[0] == 0.0


def test_left_and_right_move_as_mirror_images(model: mujoco.MjModel, home: mujoco.MjData):
    random = np.random.default_rng(0)
    home.qpos[7:] += random.uniform(-0.2, 0.2, 29)
    home.qvel[:] = random.uniform(-0.5, 0.5, 35)
    home.ctrl[:] += random.uniform(-0.5, 0.5, 29)
    image = mirrored(model, home)
    for _ in range(40):
        mujoco.mj_step(model, home)
        mujoco.mj_step(model, image)
    assert home.ncon > 0
    expected = mirrored(model, home)
    assert np.abs(home.qvel).max() > 0.5
    assert image.qpos == pytest.approx(expected.qpos, abs=1e-6)
    assert image.qvel == pytest.approx(expected.qvel, abs=1e-4)


def test_all_sensors_exist_with_their_dimensions(model: mujoco.MjModel):
    found = {model.sensor(index).name: int(model.sensor_dim[index]) for index in range(model.nsensor)}
    assert found == SENSORS


def test_sensors_report_gravity_velocity_and_foot_positions(model: mujoco.MjModel, home: mujoco.MjData):
    # The robot lies on its left side, moves forward and turns about the z axis of the base.
    home.qpos[2], home.qpos[3:7] = 2.0, (np.sqrt(0.5), -np.sqrt(0.5), 0.0, 0.0)
    home.qvel[:6] = 1.0, 0.0, 0.0, 0.0, 0.0, 0.5
    mujoco.mj_forward(model, home)
    assert home.sensor("upvector").data == pytest.approx((0.0, -1.0, 0.0), abs=1e-9)
    assert home.sensor("gyro").data == pytest.approx((0.0, 0.0, 0.5), abs=1e-9)
    assert home.sensor("velocity").data == pytest.approx((1.0, 0.5 * 0.04525, 0.0), abs=1e-9)
    for side in ("left", "right"):
        assert home.sensor(f"{side}_foot_position").data == pytest.approx(home.site(f"{side}_foot").xpos)
        assert home.sensor(f"{side}_foot_velocity").data[0] == pytest.approx(
            1.0 - 0.5 * (0.1185 if side == "left" else -0.1185), abs=1e-4
        )
        assert home.sensor(f"{side}_foot_contact").data[0] == 0.0


def test_standing_feet_report_contact_and_carry_the_weight(model: mujoco.MjModel, home: mujoco.MjData):
    while home.time < 0.5:
        mujoco.mj_step(model, home)
    assert home.sensor("left_foot_contact").data[0] == home.sensor("right_foot_contact").data[0] == 4.0
    wrenches = np.zeros((home.ncon, 6))
    for index, wrench in enumerate(wrenches):
        mujoco.mj_contactForce(model, home, index, wrench)
    # The floor is flat, so the normal force is vertical.
    assert wrenches[:, 0].sum() == pytest.approx(9.81 * 33.34, rel=0.05)
    assert home.sensor("torso_contact").data[0] == home.sensor("pelvis_contact").data[0] == 0.0


def test_the_robot_does_not_collide_with_itself(model: mujoco.MjModel):
    robot = np.flatnonzero(model.geom_bodyid > 0)
    assert not (model.geom_contype[robot][:, None] & model.geom_conaffinity[robot][None]).any()
    assert len(robot) > 40


def test_only_the_named_parts_collide_with_the_floor_and_the_friction_of_the_soles_is_used(
    model: mujoco.MjModel, home: mujoco.MjData
):
    home.qpos[2] = -2.0
    mujoco.mj_forward(model, home)
    assert touching(model, home) == COLLIDES
    for contact in home.contact:
        names = {model.geom(index).name for index in contact.geom}
        assert contact.friction[0] == (0.6 if names & SOLES else 1.0), names


def test_the_robot_stands_on_other_ground_geoms():
    scene = G1.scene()
    scene.delete(scene.geom("floor"))
    scene.worldbody.add_geom(
        name="floor", type=mujoco.mjtGeom.mjGEOM_BOX, size=(1.0, 1.0, 0.1), pos=(0.0, 0.0, -0.1), contype=1
    )
    model = scene.compile()
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    data.qpos[2] -= 0.001
    mujoco.mj_forward(model, data)
    assert touching(model, data) == SOLES


def test_every_joint_reaches_both_ends_of_its_range_within_its_effort_limit(model: mujoco.MjModel, home: mujoco.MjData):
    low, high = model.jnt_range[1:].T
    for index in range(29):
        mujoco.mj_resetDataKeyframe(model, home, 0)
        home.qpos[2] = 10.0  # no contact with the floor
        angles = []
        for target in [low[index]] * 80 + [high[index]] * 80:
            home.ctrl[index] = target
            mujoco.mj_step(model, home)
            angles.append(home.qpos[7 + index])
            assert (np.abs(home.actuator_force) <= model.actuator_forcerange[:, 1]).all()
        assert np.isfinite(home.qvel).all()
        assert not home.warning.number.any(), ORDER[index]
        assert (min(angles), max(angles)) == pytest.approx((low[index], high[index]), abs=0.12), ORDER[index]


def test_random_targets_on_the_floor_keep_the_state_finite(model: mujoco.MjModel, home: mujoco.MjData):
    random, (low, high) = np.random.default_rng(0), model.jnt_range[1:].T
    for step in range(1000):
        if step % 20 == 0:
            home.ctrl[:] = random.uniform(low, high)
        mujoco.mj_step(model, home)
        touching(model, home)
    assert np.isfinite(home.qpos).all()
    assert np.abs(home.qvel).max() < 60.0
    assert not home.warning.number.any()


def test_the_camera_follows_the_robot(model: mujoco.MjModel, home: mujoco.MjData):
    with Camera(model, 96, 96) as camera:
        near = camera.render(home).astype(float)
        home.qpos[0] += 4.0
        mujoco.mj_forward(model, home)
        far = camera.render(home).astype(float)
    dark = [(frame.max(axis=2) < 90.0).sum() for frame in (near, far)]
    assert min(dark) > 80, "only joints, feet and visor are dark"
    assert dark[0] == pytest.approx(dark[1], rel=0.1)
