"""The C engine as a `Sim`."""

import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.sim.model import sensor_columns
from paceline.sim.mujoco_sim import MujocoSim
from paceline.tasks.cartpole import Cartpole
from tests.sim.models import BLOCK, block


def push(sim: MujocoSim, steps: int, seed: int = 0, substeps: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        sim.ctrl.copy_(torch.randn(sim.ctrl.shape, generator=generator))
        sim.step(substeps)
        sim.sense()


def mask(sim: MujocoSim, *worlds: int) -> Tensor:
    chosen = torch.zeros(sim.worlds, dtype=torch.bool)
    chosen[list(worlds)] = True
    return chosen


def sensor(sim: MujocoSim, name: str) -> Tensor:
    return sim.sensordata[:, sensor_columns(sim.model)[name]]


def test_masked_reset_gives_the_state_asked_for_and_leaves_other_worlds_alone():
    sim, untouched = MujocoSim(block(), 4), MujocoSim(block(), 4)
    for s in (sim, untouched):
        push(s, 20)
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
        push(s, 20, seed=1)
    for name, tensor in sim.state().items():
        assert torch.equal(tensor[[0, 2]], untouched.state()[name][[0, 2]]), name


def test_a_reset_world_is_as_good_as_new():
    used, new = MujocoSim(block(), 2), MujocoSim(block(), 2)
    push(used, 30)
    qpos, qvel = new.qpos + 0.1, new.qvel + 0.1
    for sim in (used, new):
        sim.reset(mask(sim, 0, 1), qpos, qvel)
        sim.sense()
        push(sim, 30, seed=1)
    for name, tensor in used.state().items():
        assert torch.equal(tensor, new.state()[name]), name


def test_inputs_written_before_a_reset_of_other_worlds_are_kept():
    """A task may move a goal while another world ends; on a GPU the tensors are the engine's own memory."""
    sim = MujocoSim(block(), 3)
    push(sim, 2)
    sim.ctrl.fill_(0.25)
    sim.mocap_pos.fill_(2.0)
    sim.reset(mask(sim, 1), sim.qpos.clone(), sim.qvel.clone())
    assert sim.ctrl.flatten().tolist() == [0.25, 0.0, 0.25]
    assert sim.mocap_pos[[0, 2]].eq(2.0).all()
    assert sim.mocap_pos[1].flatten().tolist() == [1.0, 0.0, 0.5]


def test_sense_sees_a_mocap_body_where_it_was_put():
    sim = MujocoSim(block(), 2)
    sim.mocap_pos[1, 0] = torch.tensor([0.0, 3.0, 0.0])
    sim.sense()
    place = sim.qpos[1, :3]
    assert torch.allclose(sensor(sim, "target")[1], torch.tensor([0.0, 3.0, 0.0]) - place, atol=1e-6)


def test_state_continues_bit_by_bit_in_another_sim():
    first, second = MujocoSim(block(), 3), MujocoSim(block(), 3)
    push(first, 40)
    first.mocap_pos.add_(0.5)
    push(second, 7, seed=5)
    saved = first.state()
    second.load_state(saved)
    for name, tensor in second.state().items():
        assert torch.equal(tensor, saved[name]), name
    for sim in (first, second):
        push(sim, 40, seed=1)
    for name, tensor in first.state().items():
        assert torch.equal(tensor, second.state()[name]), name


def test_one_thread_and_two_give_the_same_bits():
    one, two = (MujocoSim(block(), 9, threads=threads) for threads in (1, 2))
    for sim in (one, two):
        push(sim, 60)
        sim.reset(mask(sim, 2, 5), sim.qpos + 0.1, sim.qvel)
        sim.sense()
        push(sim, 20, seed=1)
    assert one._batch.nthread == 1
    assert two._batch.nthread == 2
    for name, tensor in one.state().items():
        assert torch.equal(tensor, two.state()[name]), name


def test_steps_are_those_of_plain_mujoco():
    model = block()
    sim, data = MujocoSim(model, 2), mujoco.MjData(model)
    data.qpos[:] = sim.qpos[1]
    for i in range(40):
        sim.ctrl.fill_(0.5 * (-1) ** i)
        sim.step(3)
        data.ctrl[:] = 0.5 * (-1) ** i
        mujoco.mj_step(model, data, nstep=3)
        np.testing.assert_array_equal(sim.state()["qpos"][1], data.qpos)
        # As after mj_step, sensors are of the last substep's start.
        np.testing.assert_array_equal(sim.sensordata[1], data.sensordata.astype(np.float32))
        sim.sense()


def test_position_and_velocity_sensors_are_a_substep_old_after_step_and_current_after_sense():
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
    push(sim, 60)
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


def test_model_fields_differ_between_worlds_and_take_effect():
    sim = MujocoSim(Cartpole().model(), 3, ("body_mass",))
    cart = sim.model.body("cart").id
    sim.field("body_mass")[:, cart] = torch.tensor([1.0, 2.0, 8.0])
    sim.refresh_constants()
    sim.ctrl.fill_(1.0)
    sim.step(1)
    model = Cartpole().model()
    for world, mass in enumerate((1.0, 2.0, 8.0)):
        model.body_mass[cart] = mass
        data = mujoco.MjData(model)
        mujoco.mj_setConst(model, data)
        data.ctrl[:] = 1.0
        mujoco.mj_step(model, data)
        np.testing.assert_array_equal(sim.state()["qvel"][world], data.qvel)
    assert sim.qvel[0, 0] > sim.qvel[1, 0] > sim.qvel[2, 0] > 0.0


def test_constants_derived_from_fields_follow():
    sim = MujocoSim(block(), 2, ("body_mass",))
    body = sim.model.body("block").id
    sim.field("body_mass")[1, body] = 4.0
    sim.refresh_constants()
    light, heavy = (sim._batch.get_model(world) for world in range(2))
    assert [light.body_subtreemass[0], heavy.body_subtreemass[0]] == pytest.approx([1.2, 4.2])
    assert light.body_invweight0[body, 0] > 2.0 * heavy.body_invweight0[body, 0]


def test_fields_travel_with_the_state():
    first, second = (MujocoSim(block(), 2, ("body_mass", "geom_friction")) for _ in range(2))
    first.field("body_mass")[1] *= 3.0
    first.field("geom_friction")[0] *= 0.1
    first.refresh_constants()
    push(first, 30)
    second.load_state(first.state())
    for sim in (first, second):
        push(sim, 30, seed=1)
    assert torch.equal(second.field("body_mass"), first.field("body_mass"))
    assert torch.equal(first.qpos, second.qpos)
    assert not torch.equal(first.qpos[0], first.qpos[1])


def test_a_field_that_is_not_per_world_is_named():
    sim = MujocoSim(block(), 2, ("body_mass",))
    with pytest.raises(KeyError, match=r"'geom_friction' is not per world.*body_mass"):
        sim.field("geom_friction")


def test_the_callers_model_is_not_changed():
    model = block()
    flags = model.opt.disableflags
    sim = MujocoSim(model, 1)
    assert model.opt.disableflags == flags
    assert sim.model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_AUTORESET


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e11, 1e300])
def test_failed_worlds_are_marked_and_counted_until_reset(value: float, tmp_path: Path, monkeypatch, capfd):
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
    # Counted, so neither printed nor written to MUJOCO_LOG.TXT, which MuJoCo does by default.
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_a_control_that_is_not_a_number_fails_its_world():
    sim = MujocoSim(block(), 3)
    sim.ctrl[2] = torch.nan
    sim.step(1)
    assert sim.failed.tolist() == [False, False, True]
    sim.reset(sim.failed, sim.qpos.clone(), sim.qvel.clone())
    sim.step(1)
    assert not sim.failed.any()


def blocks(count: int, memory: str) -> mujoco.MjModel:
    """Blocks in a row, each with four contacts once it lies on the floor, and little memory for them."""
    rows = "".join(f'<body pos="{i} 0 1"><freejoint/><geom type="box" size=".1 .1 .1"/></body>' for i in range(count))
    return mujoco.MjModel.from_xml_string(f"""
    <mujoco>
      <size memory="{memory}"/>
      <worldbody><geom type="plane" size="9 9 .1"/>{rows}</worldbody>
    </mujoco>""")


def lay_down(sim: MujocoSim, *worlds: int) -> None:
    """Put these worlds' blocks on the floor, slightly inside."""
    qpos = sim.qpos.clone()
    qpos[:, 2::7] = 0.099
    sim.reset(mask(sim, *worlds), qpos, torch.zeros_like(sim.qvel))
    sim.sense()


def test_worlds_that_run_out_of_contacts_are_marked_and_counted_once_per_step(capfd):
    sim = MujocoSim(blocks(6, "16K"), 3)
    start = sim.qpos.clone()
    sim.step(4)
    assert not sim.overflowed.any()
    lay_down(sim, 0, 2)
    for _ in range(3):
        sim.step(4)
        assert sim.overflowed.tolist() == [True, False, True]
    assert sim.overflows.tolist() == [3, 0, 3]
    assert not sim.failed.any()
    sim.reset(mask(sim, 0), start, torch.zeros_like(sim.qvel))
    sim.step(1)
    assert sim.overflowed.tolist() == [False, False, True]
    assert capfd.readouterr() == ("", "")


def test_a_world_whose_contacts_are_gone_no_longer_counts_as_overflowed():
    sim = MujocoSim(blocks(6, "16K"), 1)
    qpos, qvel = sim.qpos.clone(), torch.zeros_like(sim.qvel)
    qpos[:, 2::7], qvel[:, 2::6] = 0.0999, 3.0  # just inside the floor, flying off
    sim.reset(mask(sim, 0), qpos, qvel)
    seen = []
    for _ in range(3):
        sim.step(4)
        seen.append(sim.overflowed.item())
    assert seen == [True, False, False]
    assert sim.overflows.tolist() == [1]


def test_a_world_in_which_the_engine_raises_fails_alone_and_keeps_its_state():
    """With this little memory the solver's stack overflows, which MuJoCo takes for an error."""
    sim = MujocoSim(blocks(1, "8K"), 3)
    lay_down(sim, 1)
    before = sim.qpos.clone()
    sim.step(2)
    assert "stack overflow" in sim._batch.error(1)
    assert sim.failed.tolist() == [False, True, False]
    assert sim.failures.tolist() == [0, 1, 0]
    assert torch.equal(sim.qpos[1], before[1])
    assert (sim.qpos[[0, 2], 2] < before[[0, 2], 2]).all()
    sim.reset(sim.failed, before + 1.0, torch.zeros_like(sim.qvel))
    sim.sense()
    sim.step(2)
    assert not sim.failed.any()


def test_sensing_survives_a_world_in_which_the_engine_raises():
    xml = BLOCK.replace("<worldbody>", '<size memory="6K"/><worldbody>')
    sim = MujocoSim(mujoco.MjModel.from_xml_string(xml), 2)
    qpos = sim.qpos.clone()
    qpos[1, 2] = 0.059
    sim.reset(mask(sim, 1), qpos, sim.qvel.clone())
    sim.sense()
    assert "stack overflow" in sim._batch.error(1)
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
