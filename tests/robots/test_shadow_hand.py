"""Check the hand and the cube in the C engine, and that the removed elements have no effect."""

import sys
from functools import cache
from importlib.metadata import distribution

import mujoco
import numpy as np
import pytest

from paceline.errors import UserError
from paceline.robots import shadow_hand
from paceline.robots.shadow_hand import FINGERS, NUM_ACTUATORS, NUM_JOINTS, scene

FINGER = {"J3": (-0.349, 0.349), "J2": (0.0, 1.571), "J1": (0.0, 1.571), "J0": (0.0, 1.571)}
RANGES = {
    "WRJ1": (-0.489, 0.14),
    "WRJ0": (-0.698, 0.489),
    **{f"{finger}{number}": limits for finger in ("FF", "MF", "RF") for number, limits in FINGER.items()},
    **{"LFJ4": (0.0, 0.785)} | {f"LF{number}": limits for number, limits in FINGER.items()},
    "THJ4": (-1.047, 1.047),
    "THJ3": (0.0, 1.222),
    "THJ2": (-0.209, 0.209),
    "THJ1": (-0.524, 0.524),
    "THJ0": (-1.571, 0.0),
}
"""Published ranges of the joints, radians, in the order of `qpos`."""
ACTUATED = [name for name in RANGES if name not in ("FFJ0", "MFJ0", "RFJ0", "LFJ0")]
START = (0.0, -0.39, 0.6)
"""Initial position of the cube, meters."""
MASS = 567.0 * 0.06**3
PALM = 0.5111
"""Height of the surface of the palm, meters."""
EFFORT_LIMITS = {"WRJ1": 4.785, "WRJ0": 2.175, "FFJ2": 0.9, "FFJ1": 0.7245, "LFJ4": 0.9, "THJ4": 2.3722, "THJ0": 0.81}
"""Published effort limits, N m."""


@cache
def model() -> mujoco.MjModel:
    compiled = scene().compile()
    # Otherwise MuJoCo resets a simulation that diverges, and the test would not see it.
    compiled.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    return compiled


@cache
def original() -> mujoco.MjModel:
    path = "gymnasium_robotics/envs/assets/hand/manipulate_block.xml"
    return mujoco.MjModel.from_xml_path(str(distribution(shadow_hand.WHEEL).locate_file(path)))


def joint(name: str) -> int:
    return model().joint(f"robot0:{name}").qposadr[0]


def run(
    seconds: float, targets: dict[str, float] | None = None, cube: tuple[float, float, float] = START
) -> mujoco.MjData:
    """Simulate the hand from its flat pose, with the cube starting at a position."""
    data = mujoco.MjData(model())
    data.qpos[24:27] = cube
    for name, angle in (targets or {}).items():
        data.actuator(f"robot0:A_{name}").ctrl[0] = angle
    mujoco.mj_step(model(), data, round(seconds / model().opt.timestep))
    mujoco.mj_forward(model(), data)
    assert np.isfinite(data.qpos).all()
    return data


# Figures


def test_it_has_24_joints_20_actuators_4_couplings_and_a_cube():
    m = model()
    assert (m.nq, m.nv, m.nu, m.ntendon, m.nmocap) == (31, 30, 20, 4, 1)
    assert m.opt.timestep == pytest.approx(1 / 120)
    assert [m.joint(i).name for i in range(m.njnt)] == [*(f"robot0:{name}" for name in RANGES), "cube"]
    assert [m.actuator(i).name for i in range(m.nu)] == [f"robot0:A_{name}" for name in ACTUATED]
    assert (len(RANGES), len(ACTUATED)) == (NUM_JOINTS, NUM_ACTUATORS)


def test_joints_and_targets_have_the_published_ranges():
    m = model()
    assert m.jnt_range[:24] == pytest.approx(np.array(list(RANGES.values())))
    assert m.jnt_limited[:24].all()
    assert m.actuator_ctrlrange == pytest.approx(np.array([RANGES[name] for name in ACTUATED]))


@pytest.mark.parametrize("name", EFFORT_LIMITS)
def test_actuators_have_the_published_gains_damping_and_effort_limits(name: str):
    m, motor = model(), model().actuator(f"robot0:A_{name}")
    wrist = name.startswith("WR")
    assert motor.gainprm[0] == -motor.biasprm[1] == (5.0 if wrist else 1.0)
    assert m.joint(f"robot0:{name}").damping[0] == (0.5 if wrist else 0.1)
    assert motor.forcerange == pytest.approx((-EFFORT_LIMITS[name], EFFORT_LIMITS[name]))


def test_the_cube_has_an_edge_of_6_cm_and_the_given_density():
    m = model()
    assert m.geom("cube").size == pytest.approx((0.03, 0.03, 0.03))
    assert m.body("cube").mass[0] == pytest.approx(MASS)
    assert m.body("cube").inertia == pytest.approx([MASS * 0.06**2 / 6] * 3)


# Removed elements


def test_removed_tendons_never_reach_their_limits():
    m, kept = original(), {model().tendon(i).name for i in range(model().ntendon)}
    assert kept == {f"robot0:T_{finger}J1c" for finger in ("FF", "MF", "RF", "LF")}
    removed = [i for i in range(m.ntendon) if m.tendon(i).name not in kept]
    assert len(removed) == 40
    for tendon in removed:
        wraps = range(m.tendon_adr[tendon], m.tendon_adr[tendon] + m.tendon_num[tendon])
        ends = np.array([m.wrap_prm[i] * m.jnt_range[m.wrap_objid[i]] for i in wraps])
        low, high = m.tendon_range[tendon]
        assert low < ends.min(axis=1).sum()
        assert ends.max(axis=1).sum() < high


def test_no_mesh_collides_and_the_forearm_has_no_mesh():
    m = model()
    colliding = (m.geom_contype > 0) | (m.geom_conaffinity > 0)
    assert {mujoco.mjtGeom(kind).name for kind in m.geom_type[colliding]} == {"mjGEOM_BOX", "mjGEOM_CAPSULE"}
    assert not [i for i in range(m.nmesh) if "forearm" in m.mesh(i).name]
    assert m.mesh_facenum.max() < 7000
    assert (m.geom_margin == 0.0).all()
    assert (m.jnt_margin == 0.0).all()
    assert (m.dof_frictionloss == 0.0).all()


def test_contact_pairs_are_unique():
    pairs = [frozenset((int(a), int(b))) for a, b in zip(model().pair_geom1, model().pair_geom2, strict=True)]
    assert len(pairs) == len(set(pairs)) == original().npair - 1


def test_visual_collision_and_goal_geoms_are_in_different_groups():
    m = model()
    meshes = {m.geom(i).group[0] for i in range(m.ngeom) if m.geom_type[i] == mujoco.mjtGeom.mjGEOM_MESH}
    fingers = {m.geom(f"robot0:C_{finger}distal").group[0] for finger in FINGERS}
    goal = {m.geom(i).group[0] for i in range(m.ngeom) if m.geom(i).name.startswith("goal")}
    assert (meshes, fingers, goal) == ({1}, {3}, {2})


def test_the_goal_does_not_collide():
    m = model()
    parts = [i for i in range(m.ngeom) if m.geom(i).name.startswith("goal")]
    assert len(parts) == 7
    assert not m.geom_contype[parts].any()
    assert not m.geom_conaffinity[parts].any()


# Behavior


def test_the_cube_comes_to_rest_on_the_open_hand():
    data = run(3.0)
    x, y, z = data.body("cube").xpos
    assert (x, y) == pytest.approx(START[:2], abs=0.01)
    assert PALM + 0.02 < z < PALM + 0.035
    assert np.abs(data.qvel).max() < 1e-3


def test_without_a_cube_the_hand_reaches_its_targets():
    """Gravity does not act on the hand."""
    targets = {
        "WRJ1": -0.3,
        "WRJ0": 0.4,
        "FFJ3": 0.2,
        "MFJ2": 1.2,
        "MFJ1": 0.7,
        "LFJ4": 0.3,
        "THJ4": -0.5,
        "THJ0": -1.0,
    }
    data = run(2.0, targets, cube=(1.0, 0.0, 0.6))
    for name, angle in targets.items():
        assert data.qpos[joint(name)] == pytest.approx(angle, abs=0.02), name
    assert np.abs(data.qvel[:24]).max() < 0.05


@pytest.mark.parametrize("finger", ["FF", "MF", "RF", "LF"])
def test_the_last_joint_of_a_finger_follows_the_previous_joint(finger: str):
    data = run(1.5, {f"{finger}J1": 1.2}, cube=(1.0, 0.0, 0.6))
    previous, last = (data.qpos[joint(f"{finger}J{number}")] for number in (1, 0))
    assert previous > 1.0
    # The tendon has a slack of 1 mm in both directions.
    assert abs(0.00705 * last - 0.00805 * previous) < 0.0012


def test_random_extreme_targets_keep_the_state_finite():
    m, generator = model(), np.random.default_rng(0)
    data = mujoco.MjData(m)
    low, high = m.actuator_ctrlrange.T
    for _ in range(200):
        data.ctrl = np.where(generator.random(m.nu) < 0.5, low, high)
        mujoco.mj_step(m, data, 6)
        assert np.isfinite(data.qpos).all()
        assert np.abs(data.qvel[:24]).max() < 60.0
        assert (data.qpos[:24] > m.jnt_range[:24, 0] - 0.2).all()
        assert (data.qpos[:24] < m.jnt_range[:24, 1] + 0.2).all()


# Sensors


def test_sensors_of_one_kind_are_adjacent():
    m = model()
    names = [m.sensor(i).name for i in range(m.nsensor)]
    kinds = ("position", "rotation", "velocity", "spin", "wrench")
    assert names == ["cube_spin", *(f"{finger}_{kind}" for kind in kinds for finger in FINGERS)]


def test_position_sensors_report_the_fingertips():
    data = run(0.5, {"FFJ2": 1.0, "THJ4": 1.0})
    for finger in FINGERS:
        site = data.site(f"robot0:S_{finger}tip")
        assert data.sensor(f"{finger}_position").data == pytest.approx(site.xpos)


def test_wrench_sensors_report_contact_with_the_cube():
    loaded = run(0.15, cube=(0.0, -0.47, PALM + 0.03))
    pressed = [finger for finger in FINGERS if loaded.sensor(f"{finger}_wrench").data[2] < -0.01]
    assert {"mf", "rf"} <= set(pressed)
    assert "th" not in pressed
    free = run(0.15, cube=(1.0, 0.0, 0.6))
    assert not np.array([free.sensor(f"{finger}_wrench").data for finger in FINGERS]).any()


# The wheel


def test_the_wheel_is_not_imported():
    scene()
    assert "gymnasium_robotics" not in sys.modules


def test_the_error_for_a_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shadow_hand, "WHEEL", "gymnasium-robotics-missing")
    with pytest.raises(UserError, match=r"robotics-missing, which is not installed: pip install 'paceline\[hand\]'"):
        scene()
