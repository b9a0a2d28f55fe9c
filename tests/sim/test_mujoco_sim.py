"""Tests of `Sim` on MuJoCo's C engine."""

import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.sim.mujoco_sim import MujocoSim
from paceline.sim.simulation import sensor_columns
from paceline.tasks.cartpole import Cartpole
from tests.sim.models import BLOCK, block


def step_randomly(sim: MujocoSim, steps: int, seed: int = 0, substeps: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        sim.ctrl.copy_(torch.randn(sim.ctrl.shape, generator=generator))
        sim.step(substeps)
        sim.sense()


def mask(sim: MujocoSim, *envs: int) -> Tensor:
    selected = torch.zeros(sim.num_envs, dtype=torch.bool)
    selected[list(envs)] = True
    return selected


def sensor(sim: MujocoSim, name: str) -> Tensor:
    return sim.sensordata[:, sensor_columns(sim.model)[name]]


def test_a_masked_reset_sets_the_given_state_and_does_not_change_other_envs():
    sim, untouched = MujocoSim(block(), 4), MujocoSim(block(), 4)
    for s in (sim, untouched):
        step_randomly(s, 20)
    qpos, qvel = sim.qpos + 0.5, sim.qvel - 0.5
    before = sim.state()
    sim.reset(mask(sim, 1, 3), qpos, qvel)
    after = sim.state()
    for name in ("qpos", "qvel", "act", "time", "ctrl", "qacc_warmstart"):
        assert torch.equal(after[name][[0, 2]], before[name][[0, 2]]), name
    assert torch.equal(sim.qpos[[1, 3]], qpos[[1, 3]])
    assert torch.equal(sim.qvel[[1, 3]], qvel[[1, 3]])
    for name in ("act", "time", "ctrl", "qacc_warmstart"):
        assert before[name][[1, 3]].any(), name
        assert not after[name][[1, 3]].any(), name

    for s in (sim, untouched):
        s.sense()
        step_randomly(s, 20, seed=1)
    for name, tensor in sim.state().items():
        assert torch.equal(tensor[[0, 2]], untouched.state()[name][[0, 2]]), name


def test_a_reset_env_continues_like_a_new_one():
    used, new = MujocoSim(block(), 2), MujocoSim(block(), 2)
    step_randomly(used, 30)
    qpos, qvel = new.qpos + 0.1, new.qvel + 0.1
    for sim in (used, new):
        sim.reset(mask(sim, 0, 1), qpos, qvel)
        sim.sense()
        step_randomly(sim, 30, seed=1)
    for name, tensor in used.state().items():
        assert torch.equal(tensor, new.state()[name]), name


def test_inputs_written_before_a_reset_of_other_envs_are_kept():
    """A task may move a goal in one env while another env is reset. On a GPU the tensors are the engine's memory."""
    sim = MujocoSim(block(), 3)
    step_randomly(sim, 2)
    sim.ctrl.fill_(0.25)
    sim.mocap_pos.fill_(2.0)
    sim.reset(mask(sim, 1), sim.qpos.clone(), sim.qvel.clone())
    assert sim.ctrl.flatten().tolist() == [0.25, 0.0, 0.25]
    assert sim.mocap_pos[[0, 2]].eq(2.0).all()
    assert sim.mocap_pos[1].flatten().tolist() == [1.0, 0.0, 0.5]


def test_sense_uses_the_written_mocap_pose():
    sim = MujocoSim(block(), 2)
    sim.mocap_pos[1, 0] = torch.tensor([0.0, 3.0, 0.0])
    sim.sense()
    place = sim.qpos[1, :3]
    assert torch.allclose(sensor(sim, "target")[1], torch.tensor([0.0, 3.0, 0.0]) - place, atol=1e-6)


def test_a_loaded_state_continues_bit_identically_in_another_sim():
    first, second = MujocoSim(block(), 3), MujocoSim(block(), 3)
    step_randomly(first, 40)
    first.mocap_pos.add_(0.5)
    step_randomly(second, 7, seed=5)
    saved = first.state()
    second.load_state(saved)
    for name, tensor in second.state().items():
        assert torch.equal(tensor, saved[name]), name
    for sim in (first, second):
        step_randomly(sim, 40, seed=1)
    for name, tensor in first.state().items():
        assert torch.equal(tensor, second.state()[name]), name


def test_results_are_bit_identical_with_one_and_two_threads():
    one, two = (MujocoSim(block(), 9, threads=threads) for threads in (1, 2))
    for sim in (one, two):
        step_randomly(sim, 60)
        sim.reset(mask(sim, 2, 5), sim.qpos + 0.1, sim.qvel)
        sim.sense()
        step_randomly(sim, 20, seed=1)
    assert one.batch.nthread == 1
    assert two.batch.nthread == 2
    for name, tensor in one.state().items():
        assert torch.equal(tensor, two.state()[name]), name


def test_steps_equal_mj_step():
    model = block()
    sim, data = MujocoSim(model, 2), mujoco.MjData(model)
    data.qpos[:] = sim.qpos[1]
    for i in range(40):
        sim.ctrl.fill_(0.5 * (-1) ** i)
        sim.step(3)
        data.ctrl[:] = 0.5 * (-1) ** i
        mujoco.mj_step(model, data, nstep=3)
        np.testing.assert_array_equal(sim.state()["qpos"][1], data.qpos)
        # As after mj_step, sensor values are from the start of the last substep.
        np.testing.assert_array_equal(sim.sensordata[1], data.sensordata.astype(np.float32))
        sim.sense()


def test_position_and_velocity_sensors_lag_one_substep_after_step_and_are_current_after_sense():
    sim = MujocoSim(block(), 1)
    sim.step(1)
    sim.sense()
    before = sim.qpos.clone(), sim.qvel.clone()
    sim.step(1)
    assert not torch.equal(sim.qpos, before[0])
    assert torch.equal(sensor(sim, "place"), before[0][:, :3])
    sim.sense()
    assert torch.equal(sensor(sim, "place"), sim.qpos[:, :3])
    assert torch.allclose(sensor(sim, "gyro"), sim.qvel[:, 3:6], atol=1e-6)


def test_acceleration_sensors_keep_the_last_substep_and_are_zero_after_a_reset():
    sim = MujocoSim(block(), 2)
    step_randomly(sim, 60)
    sim.step(2)
    touch, accelerometer = sensor(sim, "touch").clone(), sensor(sim, "accelerometer").clone()
    weight = 9.81 * 1.2
    assert touch.flatten().tolist() == pytest.approx([weight, weight], rel=0.5)
    assert accelerometer[:, 2].tolist() == pytest.approx([9.81, 9.81], rel=0.5)
    sim.reset(mask(sim, 1), sim.qpos + 1.0, sim.qvel)
    sim.sense()
    for name, kept in (("touch", touch), ("accelerometer", accelerometer)):
        assert torch.equal(sensor(sim, name)[0], kept[0])
        assert not sensor(sim, name)[1].any()
    sim.step(1)
    assert sensor(sim, "touch")[0] > 0.0
    assert sensor(sim, "touch")[1] == 0.0


def test_per_env_fields_affect_the_motion_of_each_env():
    sim = MujocoSim(Cartpole().model(), 3, ("body_mass",))
    cart = sim.model.body("cart").id
    sim.field("body_mass")[:, cart] = torch.tensor([1.0, 2.0, 8.0])
    sim.refresh_constants()
    sim.ctrl.fill_(1.0)
    sim.step(1)
    model = Cartpole().model()
    for env, mass in enumerate((1.0, 2.0, 8.0)):
        model.body_mass[cart] = mass
        data = mujoco.MjData(model)
        mujoco.mj_setConst(model, data)
        data.ctrl[:] = 1.0
        mujoco.mj_step(model, data)
        np.testing.assert_array_equal(sim.state()["qvel"][env], data.qvel)
    assert sim.qvel[0, 0] > sim.qvel[1, 0] > sim.qvel[2, 0] > 0.0


def test_refresh_constants_updates_derived_constants():
    sim = MujocoSim(block(), 2, ("body_mass",))
    body = sim.model.body("block").id
    sim.field("body_mass")[1, body] = 4.0
    sim.refresh_constants()
    light, heavy = (sim.batch.get_model(env) for env in range(2))
    assert [light.body_subtreemass[0], heavy.body_subtreemass[0]] == pytest.approx([1.2, 4.2])
    assert light.body_invweight0[body, 0] > 2.0 * heavy.body_invweight0[body, 0]


def test_the_state_contains_per_env_fields():
    first, second = (MujocoSim(block(), 2, ("body_mass", "geom_friction")) for _ in range(2))
    first.field("body_mass")[1] *= 3.0
    first.field("geom_friction")[0] *= 0.1
    first.refresh_constants()
    step_randomly(first, 30)
    second.load_state(first.state())
    for sim in (first, second):
        step_randomly(sim, 30, seed=1)
    assert torch.equal(second.field("body_mass"), first.field("body_mass"))
    assert torch.equal(first.qpos, second.qpos)
    assert not torch.equal(first.qpos[0], first.qpos[1])


def test_an_error_names_a_field_that_is_not_per_env():
    sim = MujocoSim(block(), 2, ("body_mass",))
    with pytest.raises(KeyError, match=r"'geom_friction' is not per env.*body_mass"):
        sim.field("geom_friction")


def test_the_callers_model_is_not_changed():
    model = block()
    flags = model.opt.disableflags
    sim = MujocoSim(model, 1)
    assert model.opt.disableflags == flags
    assert sim.model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_AUTORESET


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e11, 1e300])
def test_failed_envs_are_marked_and_counted_until_reset(value: float, tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    sim = MujocoSim(block(), 3)
    start, state = sim.qpos.clone(), sim.state()
    state["qvel"][1, 0] = value
    sim.load_state(state)
    sim.step(2)
    assert sim.failed.tolist() == [False, True, False]
    sim.reset(sim.failed, start, torch.zeros_like(sim.qvel))
    sim.sense()
    sim.step(2)
    assert not sim.failed.any()
    assert sim.failures.tolist() == [0, 1, 0]
    assert torch.isfinite(sim.qpos).all()
    # Failures are counted, so they are neither printed nor written to MUJOCO_LOG.TXT, which is MuJoCo's default.
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_an_env_with_a_nan_control_fails():
    sim = MujocoSim(block(), 3)
    sim.ctrl[2] = torch.nan
    sim.step(1)
    assert sim.failed.tolist() == [False, False, True]
    sim.reset(sim.failed, sim.qpos.clone(), sim.qvel.clone())
    sim.step(1)
    assert not sim.failed.any()


def blocks(count: int, memory: str) -> mujoco.MjModel:
    """Return a model with a row of blocks, which have four contacts each on the floor, and with little memory."""
    rows = "".join(f'<body pos="{i} 0 1"><freejoint/><geom type="box" size=".1 .1 .1"/></body>' for i in range(count))
    return mujoco.MjModel.from_xml_string(f"""
    <mujoco>
      <size memory="{memory}"/>
      <worldbody><geom type="plane" size="9 9 .1"/>{rows}</worldbody>
    </mujoco>""")


def place_on_floor(sim: MujocoSim, *envs: int) -> None:
    """Place the blocks of some envs on the floor, with a small penetration."""
    qpos = sim.qpos.clone()
    qpos[:, 2::7] = 0.099
    sim.reset(mask(sim, *envs), qpos, torch.zeros_like(sim.qvel))
    sim.sense()


def test_envs_that_run_out_of_contacts_are_marked_and_counted_once_per_step(capfd):
    sim = MujocoSim(blocks(6, "16K"), 3)
    start = sim.qpos.clone()
    sim.step(4)
    assert not sim.overflowed.any()
    place_on_floor(sim, 0, 2)
    for _ in range(3):
        sim.step(4)
        assert sim.overflowed.tolist() == [True, False, True]
    assert sim.overflows.tolist() == [3, 0, 3]
    assert not sim.failed.any()
    sim.reset(mask(sim, 0), start, torch.zeros_like(sim.qvel))
    sim.step(1)
    assert sim.overflowed.tolist() == [False, False, True]
    assert capfd.readouterr() == ("", "")


def test_an_env_is_not_marked_after_its_contacts_end():
    sim = MujocoSim(blocks(6, "16K"), 1)
    qpos, qvel = sim.qpos.clone(), torch.zeros_like(sim.qvel)
    qpos[:, 2::7], qvel[:, 2::6] = 0.0999, 3.0  # a small penetration, moving up
    sim.reset(mask(sim, 0), qpos, qvel)
    overflowed = []
    for _ in range(3):
        sim.step(4)
        overflowed.append(sim.overflowed.item())
    assert overflowed == [True, False, False]
    assert sim.overflows.tolist() == [1]


def test_an_engine_error_fails_only_its_env_and_keeps_its_state():
    """With little memory the stack of the solver overflows, which is an error in MuJoCo."""
    sim = MujocoSim(blocks(1, "8K"), 3)
    place_on_floor(sim, 1)
    before = sim.qpos.clone()
    sim.step(2)
    assert "stack overflow" in sim.batch.error(1)
    assert sim.failed.tolist() == [False, True, False]
    assert sim.failures.tolist() == [0, 1, 0]
    assert torch.equal(sim.qpos[1], before[1])
    assert (sim.qpos[[0, 2], 2] < before[[0, 2], 2]).all()
    sim.reset(sim.failed, before + 1.0, torch.zeros_like(sim.qvel))
    sim.sense()
    sim.step(2)
    assert not sim.failed.any()


def test_sense_continues_after_an_engine_error_in_one_env():
    xml = BLOCK.replace("<worldbody>", '<size memory="6K"/><worldbody>')
    sim = MujocoSim(mujoco.MjModel.from_xml_string(xml), 2)
    qpos = sim.qpos.clone()
    qpos[1, 2] = 0.059
    sim.reset(mask(sim, 1), qpos, sim.qvel.clone())
    sim.sense()
    assert "stack overflow" in sim.batch.error(1)
    assert sensor(sim, "place")[0].tolist() == pytest.approx([0.0, 0.0, 0.2])
    sim.step(1)
    assert sim.failed.tolist() == [False, True]


def test_warp_is_not_imported_on_the_c_engine():
    code = """
import sys, torch
from paceline.env.robot_env import RobotEnv
from paceline.tasks import registry
env = RobotEnv(registry.find("cartpole").task(), 2)
env.step(env.reset()["policy"][:, :1])
print(sorted({name.split(".")[0] for name in sys.modules} & {"warp", "mujoco_warp", "jax"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
