"""The hand and its cube, on the C engine: what was left out has no effect, and what is there does as it should."""

import sys
from functools import cache
from importlib.metadata import distribution

import mujoco
import numpy as np
import pytest

from paceline.errors import UserError
from paceline.robots import shadow_hand
from paceline.robots.shadow_hand import CUBE, FINGERS, FOLLOWERS, JOINTS, MOTORS, RANGES, scene

MASS = 567.0 * 0.06**3
PALM = 0.5111
"""Height of its surface."""
STRENGTH = {"WRJ1": 4.785, "WRJ0": 2.175, "FFJ2": 0.9, "FFJ1": 0.7245, "LFJ4": 0.9, "THJ4": 2.3722, "THJ0": 0.81}
"""N m, as published."""


@cache
def model() -> mujoco.MjModel:
    made = scene().compile()
    # Else a world that blows up starts anew, and looks sound.
    made.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    return made


@cache
def original() -> mujoco.MjModel:
    path = "gymnasium_robotics/envs/assets/hand/manipulate_block.xml"
    return mujoco.MjModel.from_xml_path(str(distribution(shadow_hand.WHEEL).locate_file(path)))


def joint(name: str) -> int:
    return model().joint(f"robot0:{name}").qposadr[0]


def run(
    seconds: float, targets: dict[str, float] | None = None, cube: tuple[float, float, float] = CUBE.start
) -> mujoco.MjData:
    """The hand from its flat pose, with the cube let go at a place."""
    world = mujoco.MjData(model())
    world.qpos[24:27] = cube
    for name, angle in (targets or {}).items():
        world.actuator(f"robot0:A_{name}").ctrl[0] = angle
    mujoco.mj_step(model(), world, round(seconds / model().opt.timestep))
    mujoco.mj_forward(model(), world)
    assert np.isfinite(world.qpos).all()
    return world


# Figures


def test_it_has_24_joints_20_motors_4_couplings_and_a_cube():
    m = model()
    assert (m.nq, m.nv, m.nu, m.ntendon, m.nmocap) == (31, 30, 20, 4, 1)
    assert m.opt.timestep == pytest.approx(1 / 120)
    assert [m.joint(i).name for i in range(m.njnt)] == [*(f"robot0:{name}" for name in JOINTS), "cube"]
    assert [m.actuator(i).name for i in range(m.nu)] == [f"robot0:A_{name}" for name in MOTORS]
    assert set(JOINTS) - set(MOTORS) == set(FOLLOWERS)


def test_joints_and_targets_have_the_published_ranges():
    m, ranges = model(), dict(zip(JOINTS, RANGES, strict=True))
    assert m.jnt_range[:24] == pytest.approx(np.array(RANGES))
    assert m.jnt_limited[:24].all()
    assert m.actuator_ctrlrange == pytest.approx(np.array([ranges[name] for name in MOTORS]))


@pytest.mark.parametrize("name", STRENGTH)
def test_motors_have_the_published_stiffness_damping_and_strength(name: str):
    m, motor = model(), model().actuator(f"robot0:A_{name}")
    wrist = name.startswith("WR")
    assert motor.gainprm[0] == -motor.biasprm[1] == (5.0 if wrist else 1.0)
    assert m.joint(f"robot0:{name}").damping[0] == (0.5 if wrist else 0.1)
    assert motor.forcerange == pytest.approx((-STRENGTH[name], STRENGTH[name]))


def test_the_cube_has_an_edge_of_6_cm_and_its_material():
    m = model()
    assert m.geom("cube").size == pytest.approx((0.03, 0.03, 0.03))
    assert m.body("cube").mass[0] == pytest.approx(MASS)
    assert m.body("cube").inertia == pytest.approx([MASS * 0.06**2 / 6] * 3)


# What was left out


def test_tendons_that_were_left_out_never_reach_their_limits():
    m, kept = original(), {model().tendon(i).name for i in range(model().ntendon)}
    assert kept == {f"robot0:T_{finger}J1c" for finger in ("FF", "MF", "RF", "LF")}
    left_out = [i for i in range(m.ntendon) if m.tendon(i).name not in kept]
    assert len(left_out) == 40
    for tendon in left_out:
        wraps = range(m.tendon_adr[tendon], m.tendon_adr[tendon] + m.tendon_num[tendon])
        ends = np.array([m.wrap_prm[i] * m.jnt_range[m.wrap_objid[i]] for i in wraps])
        low, high = m.tendon_range[tendon]
        assert low < ends.min(axis=1).sum()
        assert ends.max(axis=1).sum() < high


def test_no_mesh_collides_and_none_of_the_forearm_is_drawn():
    m = model()
    colliding = (m.geom_contype > 0) | (m.geom_conaffinity > 0)
    assert {mujoco.mjtGeom(kind).name for kind in m.geom_type[colliding]} == {"mjGEOM_BOX", "mjGEOM_CAPSULE"}
    assert not [i for i in range(m.nmesh) if "forearm" in m.mesh(i).name]
    assert m.mesh_facenum.max() < 7000
    assert (m.geom_margin == 0.0).all()
    assert (m.jnt_margin == 0.0).all()
    assert (m.dof_frictionloss == 0.0).all()


def test_fingers_that_meet_push_each_other_once():
    pairs = [frozenset((int(a), int(b))) for a, b in zip(model().pair_geom1, model().pair_geom2, strict=True)]
    assert len(pairs) == len(set(pairs)) == original().npair - 1


def test_cheap_primitives_look_and_goal_are_groups_of_their_own():
    m = model()
    meshes = {m.geom(i).group[0] for i in range(m.ngeom) if m.geom_type[i] == mujoco.mjtGeom.mjGEOM_MESH}
    fingers = {m.geom(f"robot0:C_{finger}distal").group[0] for finger in FINGERS}
    goal = {m.geom(i).group[0] for i in range(m.ngeom) if m.geom(i).name.startswith("goal")}
    assert (meshes, fingers, goal) == ({1}, {3}, {2})


def test_the_goal_touches_nothing():
    m = model()
    parts = [i for i in range(m.ngeom) if m.geom(i).name.startswith("goal")]
    assert len(parts) == 7
    assert not m.geom_contype[parts].any()
    assert not m.geom_conaffinity[parts].any()


# What it does


def test_a_cube_let_go_comes_to_rest_on_the_open_hand():
    world = run(3.0)
    x, y, z = world.body("cube").xpos
    assert (x, y) == pytest.approx(CUBE.start[:2], abs=0.01)
    assert PALM + 0.02 < z < PALM + 0.035
    assert np.abs(world.qvel).max() < 1e-3


def test_without_a_cube_the_hand_stays_where_its_targets_are():
    """It bears no weight of its own."""
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
    world = run(2.0, targets, cube=(1.0, 0.0, 0.6))
    for name, angle in targets.items():
        assert world.qpos[joint(name)] == pytest.approx(angle, abs=0.02), name
    assert np.abs(world.qvel[:24]).max() < 0.05


@pytest.mark.parametrize("finger", ["FF", "MF", "RF", "LF"])
def test_the_last_joint_of_a_finger_bends_with_the_one_below(finger: str):
    world = run(1.5, {f"{finger}J1": 1.2}, cube=(1.0, 0.0, 0.6))
    below, last = (world.qpos[joint(f"{finger}J{number}")] for number in (1, 0))
    assert below > 1.0
    # The tendon has a millimetre of slack on either side.
    assert abs(0.00705 * last - 0.00805 * below) < 0.0012


def test_targets_at_the_ends_of_all_ranges_stay_finite():
    m, generator = model(), np.random.default_rng(0)
    world = mujoco.MjData(m)
    low, high = m.actuator_ctrlrange.T
    for _ in range(200):
        world.ctrl = np.where(generator.random(m.nu) < 0.5, low, high)
        mujoco.mj_step(m, world, 6)
        assert np.isfinite(world.qpos).all()
        assert np.abs(world.qvel[:24]).max() < 60.0
        assert (world.qpos[:24] > m.jnt_range[:24, 0] - 0.2).all()
        assert (world.qpos[:24] < m.jnt_range[:24, 1] + 0.2).all()


# Sensors


def test_sensors_of_one_kind_stand_side_by_side():
    m = model()
    names = [m.sensor(i).name for i in range(m.nsensor)]
    kinds = ("position", "rotation", "velocity", "spin", "wrench")
    assert names == ["cube_spin", *(f"{finger}_{kind}" for kind in kinds for finger in FINGERS)]


def test_fingertips_are_told_where_they_are():
    world = run(0.5, {"FFJ2": 1.0, "THJ4": 1.0})
    for finger in FINGERS:
        site = world.site(f"robot0:S_{finger}tip")
        assert world.sensor(f"{finger}_position").data == pytest.approx(site.xpos)


def test_fingertips_feel_what_presses_on_them():
    lying = run(0.15, cube=(0.0, -0.47, PALM + 0.03))
    pressed = [finger for finger in FINGERS if lying.sensor(f"{finger}_wrench").data[2] < -0.01]
    assert {"mf", "rf"} <= set(pressed)
    assert "th" not in pressed
    free = run(0.15, cube=(1.0, 0.0, 0.6))
    assert not np.array([free.sensor(f"{finger}_wrench").data for finger in FINGERS]).any()


# The wheel


def test_the_wheel_is_read_and_not_imported():
    scene()
    assert "gymnasium_robotics" not in sys.modules


def test_a_missing_wheel_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shadow_hand, "WHEEL", "gymnasium-robotics-that-nobody-has")
    with pytest.raises(UserError, match=r"nobody-has: pip install 'paceline\[hand\]'"):
        scene()
