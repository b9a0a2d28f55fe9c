"""Compare the arm with the published data of the UR5e, and check its contacts, tool and wrist camera."""

import itertools
from functools import cache

import mujoco
import numpy as np
import pytest

from paceline.robots.scene import load
from paceline.tasks.reach import Reach

LINKS = ("shoulder", "upper_arm", "forearm", "wrist_1", "wrist_2", "wrist_3")
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
RIGHT_ANGLE = 0.5 * np.pi
DH = (
    *((0.0, 0.1625, RIGHT_ANGLE), (-0.425, 0.0, 0.0), (-0.3922, 0.0, 0.0)),
    *((0.0, 0.1333, RIGHT_ANGLE), (0.0, 0.0997, -RIGHT_ANGLE), (0.0, 0.0996, 0.0)),
)
"""Denavit-Hartenberg parameters a and d, meters, and alpha, radians, of each link."""
MASS = (3.761, 8.058, 2.846, 1.37, 1.3, 0.365)
CENTER_OF_MASS = (
    *((0.0, -0.02561, 0.00193), (0.2125, 0.0, 0.11336), (0.15, 0.0, 0.0265)),
    *((0.0, -0.0018, 0.01634), (0.0, 0.0018, 0.01634), (0.0, 0.0, -0.001159)),
)
"""Centers of mass in the Denavit-Hartenberg frames, meters."""
INERTIA = (
    (0.0070021, 0.00648091, 0.00657286, 7.3e-07, -1.053e-05, 0.00049994),
    (0.01505885, 0.33388086, 0.33247207, -5.4e-05, 5.63e-06, -1.81e-06),
    (0.00399632, 0.07879254, 0.0784851, -1.365e-05, 0.00137272, -6.6e-06),
    (0.00165491, 0.00135962, 0.00126279, -2.82e-06, -4.38e-06, 0.00010157),
    (0.00135617, 0.00127827, 0.00096614, -2.74e-06, 4.44e-06, -5.048e-05),
    (0.00018694, 0.00018908, 0.00025756, 6e-08, -1.7e-07, -9.2e-07),
)
"""xx, yy, zz, xy, xz and yz of the inertias about the centers of mass, in the Denavit-Hartenberg frames, kg m^2."""
MAX_TORQUE = (150.0, 150.0, 150.0, 28.0, 28.0, 28.0)
MAX_ANGLE = (2 * np.pi, 2 * np.pi, np.pi, 2 * np.pi, 2 * np.pi, 2 * np.pi)
TABLE = 0.7
"""Height of the surface of the table, meters."""


@cache
def model() -> mujoco.MjModel:
    compiled = load("arm").compile()
    # Otherwise MuJoCo resets a simulation that diverges, and the test would not see it.
    compiled.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    return compiled


def at_home() -> mujoco.MjData:
    data = mujoco.MjData(model())
    mujoco.mj_resetDataKeyframe(model(), data, model().key("home").id)
    mujoco.mj_forward(model(), data)
    return data


def link_frames(angles: np.ndarray) -> list[np.ndarray]:
    """Return the Denavit-Hartenberg frames of the links as matrices, [4, 4]. The arm stands on the table, and its base
    is turned by 180 degrees, so that the zero pose points forward."""
    frame, frames = np.diag((-1.0, -1.0, 1.0, 1.0)), []
    frame[2, 3] = TABLE
    for angle, (a, d, alpha) in zip(angles, DH, strict=True):
        c, s, ca, sa = np.cos(angle), np.sin(angle), np.cos(alpha), np.sin(alpha)
        link = [[c, -s * ca, s * sa, a * c], [s, c * ca, -c * sa, a * s], [0.0, sa, ca, d], [0.0, 0.0, 0.0, 1.0]]
        frame = frame @ np.array(link)
        frames.append(frame)
    return frames


def random_poses(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).uniform(-np.pi, np.pi, (count, len(JOINTS))))


# Figures


def test_it_has_six_position_actuators_and_a_target():
    m = model()
    assert (m.nq, m.nv, m.nu, m.nmocap) == (6, 6, 6, 1)
    assert [m.joint(i).name for i in range(m.njnt)] == list(JOINTS)
    assert [m.actuator(i).name for i in range(m.nu)] == list(JOINTS)
    assert m.jnt_range == pytest.approx(np.array([(-angle, angle) for angle in MAX_ANGLE]))
    assert m.actuator_forcerange == pytest.approx(np.array([(-torque, torque) for torque in MAX_TORQUE]))
    assert m.geom("target").size[0] == 0.025


@pytest.mark.parametrize("angles", random_poses(5))
def test_frames_masses_and_inertias_are_those_of_the_published_data(angles: np.ndarray):
    m, data = model(), mujoco.MjData(model())
    data.qpos[:] = angles
    mujoco.mj_forward(m, data)
    frames = link_frames(angles)
    for link, frame, mass, center, inertia in zip(LINKS, frames, MASS, CENTER_OF_MASS, INERTIA, strict=True):
        body, (xx, yy, zz, xy, xz, yz), rotation = data.body(link), inertia, frame[:3, :3]
        assert m.body(link).mass[0] == mass
        assert body.xipos == pytest.approx(frame[:3, 3] + rotation @ center, abs=1e-9), link
        expected = rotation @ np.array(((xx, xy, xz), (xy, yy, yz), (xz, yz, zz))) @ rotation.T
        axes = body.ximat.reshape(3, 3)
        assert axes @ np.diag(m.body(link).inertia) @ axes.T == pytest.approx(expected, abs=1e-8), link
    assert data.body("gripper").xpos == pytest.approx(frames[-1][:3, 3], abs=1e-9)
    # The tool points along the z axis of the last frame.
    assert data.site("tool").xpos == pytest.approx(frames[-1][:3, 3] + 0.14 * frames[-1][:3, 2], abs=1e-9)


def test_the_tool_is_between_the_fingers():
    data, m = at_home(), model()
    left, right = (data.geom(f"{side}_finger").xpos for side in ("left", "right"))
    gap = data.site("tool").xpos - 0.5 * (left + right)
    assert np.linalg.norm(gap) < m.geom("left_finger").size[1]
    assert gap @ (left - right) == pytest.approx(0.0, abs=1e-9)


# Motion


def test_it_rests_in_the_home_pose():
    data, m = at_home(), model()
    mujoco.mj_step(m, data, 300)
    assert data.qpos == pytest.approx(m.key("home").qpos, abs=1e-6)
    assert data.ncon == 0
    assert data.site("tool").xpos[2] > TABLE + 0.4


def test_joints_reach_a_target_without_oscillation():
    data, m = at_home(), model()
    data.ctrl += 0.3
    moving = []
    for _ in range(100):
        mujoco.mj_step(m, data)
        moving.append(data.qpos - m.key("home").qpos)
    assert moving[-1] == pytest.approx(np.full(6, 0.3), abs=0.002)
    assert np.max(moving) < 0.32


def test_random_extreme_targets_stay_finite_and_within_the_effort_limits():
    m, generator, data = model(), np.random.default_rng(3), at_home()
    for _ in range(50):
        data.ctrl = generator.uniform(-np.pi, np.pi, m.nu)
        mujoco.mj_step(m, data, 10)
        assert np.isfinite(data.qpos).all()
        assert np.abs(data.qvel).max() < 100.0
        assert (np.abs(data.actuator_force) <= m.actuator_forcerange[:, 1] + 1e-9).all()


# Contacts


def test_the_robot_collides_with_table_and_floor_and_not_with_itself():
    m = model()

    def collide(a: int, b: int) -> bool:
        return bool(m.geom_contype[a] & m.geom_conaffinity[b] or m.geom_contype[b] & m.geom_conaffinity[a])

    pairs = [(a, b) for a, b in itertools.combinations(range(m.ngeom), 2) if collide(a, b)]
    fixed = {m.geom(name).id for name in ("table", "table_base", "floor")}
    assert pairs
    assert all((a in fixed) != (b in fixed) for a, b in pairs)
    moving = {m.geom(i).name for pair in pairs for i in pair if i not in fixed}
    assert {"upper_arm", "forearm", "wrist_1", "wrist_2", "palm", "left_finger", "right_finger"} <= moving
    assert "target" not in moving


def test_the_table_stops_the_tool():
    data, m = at_home(), model()
    for _ in range(300):
        data.ctrl[1] += 0.005
        mujoco.mj_step(m, data)
    touching = {m.geom(int(i)).name for contact in data.contact for i in contact.geom}
    assert "table" in touching
    assert min(contact.dist for contact in data.contact) > -0.02
    assert data.site("tool").xpos[2] > TABLE - 0.02


# Wrist camera


def test_the_wrist_camera_looks_along_the_tool():
    data, m = at_home(), model()
    assert m.cam("wrist").bodyid[0] == m.body("gripper").id
    forward = -data.cam("wrist").xmat.reshape(3, 3)[:, 2]
    tool = data.site("tool").xpos - data.body("gripper").xpos
    assert forward == pytest.approx(tool / np.linalg.norm(tool))
    assert forward == pytest.approx((0.0, 0.0, -1.0), abs=0.01)


@pytest.mark.parametrize("goal", list(itertools.product(Reach().goal_x, Reach().goal_y, Reach().goal_z)))
def test_the_wrist_camera_shows_every_goal_in_the_home_pose(goal: tuple[float, float, float]):
    """The target is in a square image, and nothing is between it and the camera."""
    data, m = at_home(), model()
    data.mocap_pos[0] = goal
    mujoco.mj_forward(m, data)
    camera, hit = data.cam("wrist"), np.zeros(1, dtype=np.int32)
    x, y, z = camera.xmat.reshape(3, 3).T @ (np.array(goal) - camera.xpos)
    radius = m.geom("target").size[0]
    assert max(abs(x), abs(y)) + radius < -z * np.tan(0.5 * np.radians(m.cam("wrist").fovy[0]))
    mujoco.mj_ray(m, data, camera.xpos, np.array(goal) - camera.xpos, None, 1, -1, hit)
    assert m.geom(int(hit[0])).name == "target"
