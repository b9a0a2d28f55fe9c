"""Compare MuJoCo Warp, on the CPU, with the C engine, to the accuracy of float32.

All tests share a few models, because Warp compiles kernels for each model, which takes half a minute.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import mujoco
import pytest
import torch
import warp
from torch import Tensor

from paceline.env.randomization import Randomization
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState, ResetState, Task
from paceline.sim.mujoco_sim import MujocoSim
from paceline.sim.simulation import Sim, choose_engine, make_sim, sensor_columns
from paceline.sim.warp_sim import WarpSim
from paceline.tasks.cartpole import Cartpole
from tests.sim.models import block

CPU = torch.device("cpu")
RANDOMIZED = ("body_mass", "geom_friction", "opt.gravity")

# Maximum differences relative to the largest value, measured for five robots in 100 steps. Some sensors are
# velocities, so sensors have the same bound.
QPOS_ERROR, QVEL_ERROR, SENSOR_ERROR = 3e-6, 3e-4, 3e-4


@pytest.fixture(scope="module", autouse=True)
def kernels_are_not_optimized() -> Iterator[None]:
    """Compile Warp's kernels in less than half the time. The tests run few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warp.config, "optimization_level", 0)
        yield


def both(model: mujoco.MjModel, num_envs: int, fields: tuple[str, ...] = ()) -> tuple[MujocoSim, WarpSim]:
    return MujocoSim(model, num_envs, fields), WarpSim(model, num_envs, CPU, fields)


def error(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    if not one.numel():
        return 0.0
    return float((one - other).abs().max() / one.abs().max().clamp(min=1.0))


def assert_close(one: Sim, other: Sim) -> None:
    assert error(one.qpos, other.qpos) < QPOS_ERROR
    assert error(one.qvel, other.qvel) < QVEL_ERROR
    assert error(one.act, other.act) < QPOS_ERROR
    assert error(one.time, other.time) < QPOS_ERROR
    assert error(one.sensordata, other.sensordata) < SENSOR_ERROR
    assert error(one.mocap_pos, other.mocap_pos) == 0.0
    assert torch.equal(one.failed, other.failed)
    assert torch.equal(one.overflowed, other.overflowed)


class RandomDriver:
    """Drives several sims with the same random controls, goals, resets and start states."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, seed: int = 0):
        self._generator = torch.Generator().manual_seed(seed)
        self._model, self._num_envs = model, num_envs
        self._start = torch.from_numpy(model.qpos0).float().expand(num_envs, -1)

    def step(self, *sims: Sim, reset_fraction: float = 0.03) -> Tensor:
        """Run one env step of two substeps in all `sims`, compare them after each phase, and return the reset envs."""
        controls, goals = self._normal(self._model.nu), self._normal(3)
        qpos, qvel = self._start + 0.05 * self._normal(self._model.nq), 0.3 * self._normal(self._model.nv)
        mask = torch.rand(self._num_envs, generator=self._generator) < reset_fraction
        for sim in sims:
            sim.ctrl.copy_(controls)
            sim.step(2)
        for sim in sims[1:]:
            assert_close(sims[0], sim)
        for sim in sims:
            sim.reset(mask, qpos, qvel)
            if self._model.nmocap:
                sim.mocap_pos.copy_(goals[:, None])
            sim.sense()
        for sim in sims[1:]:
            assert_close(sims[0], sim)
        return mask

    def _normal(self, width: int) -> Tensor:
        return torch.randn(self._num_envs, width, generator=self._generator)


def touch(sim: Sim) -> Tensor:
    return sim.sensordata[:, sensor_columns(sim.model)["touch"]]


def test_cartpole_moves_equally_on_both_engines():
    model = Cartpole().model()
    sims, driver = both(model, 4), RandomDriver(model, 4)
    resets = sum(int(driver.step(*sims).sum()) for _ in range(100))
    assert resets > 5


def test_contacts_sensors_activations_and_mocap_bodies_are_equal_with_randomized_fields():
    sims, driver = both(block(), 4, RANDOMIZED), RandomDriver(block(), 4)
    for sim in sims:
        sim.field("body_mass").mul_(torch.tensor([0.5, 1.0, 2.0, 4.0])[:, None])
        sim.field("geom_friction").mul_(torch.tensor([0.1, 0.5, 1.0, 2.0])[:, None, None])
        sim.refresh_constants()
        sim.sense()
    resets, touched = 0, torch.zeros(4, 1)
    for _ in range(100):
        resets += int(driver.step(*sims).sum())
        touched += touch(sims[0]) > 0.0
    assert resets > 5
    assert (touched > 10).all()


def test_randomized_fields_change_the_motion_equally():
    """Ensure that the fields of the previous test are not ignored by both engines."""
    sims = both(block(), 2, RANDOMIZED)
    for sim in sims:
        sim.field("body_mass")[1] *= 4.0
        sim.field("geom_friction")[1] *= 0.1
        sim.refresh_constants()
        qpos, qvel = sim.qpos.clone(), sim.qvel.clone()
        qpos[:, 2], qvel[:, 0] = 0.0599, 1.0  # a small penetration, sliding
        sim.reset(torch.ones(2, dtype=torch.bool), qpos, qvel)
        sim.sense()
        for _ in range(150):
            sim.step(2)
            sim.sense()
        assert touch(sim).flatten().tolist() == pytest.approx([1.2 * 9.81, 4.8 * 9.81], rel=0.01)
        assert sim.qpos[:, 0].tolist() == pytest.approx([0.045, 0.516], rel=0.02)


def test_each_env_has_its_own_gravity():
    pull = torch.tensor([[0.0, 0.0, -9.81], [0.0, 0.0, 0.0], [1.0, -2.0, 3.0]])
    for sim in both(block(), 3, ("opt.gravity",)):
        assert torch.equal(sim.field("opt.gravity"), pull[:1].expand(3, -1))
        sim.field("opt.gravity").copy_(pull)
        sim.refresh_constants(derived=False)
        sim.sense()
        sim.step(2)
        torch.testing.assert_close(sim.qvel[:, :3], 0.01 * pull, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("order", ["c to warp", "warp to c"])
def test_a_state_saved_on_one_engine_continues_on_the_other(order: str):
    model = block()
    sims, driver = both(model, 3, RANDOMIZED), RandomDriver(model, 3, seed=2)
    origin, target = sims if order == "c to warp" else sims[::-1]
    origin.field("body_mass")[1] *= 2.0
    origin.field("opt.gravity")[2] = torch.tensor([1.0, 0.0, -5.0])
    origin.refresh_constants()
    origin.sense()
    for _ in range(25):
        driver.step(origin)
    state = origin.state()
    state["xfrc_applied"][:, 2] = torch.tensor([0.0, 0.3, 0.5, 0.01, 0.0, 0.0])
    state["qfrc_applied"][:, -1] = 0.05
    for sim in (origin, target):
        sim.load_state(state)
    assert origin.state().keys() == target.state().keys()
    for name in RANDOMIZED:
        assert torch.equal(target.field(name), origin.field(name)), name
    for _ in range(25):
        driver.step(origin, target, reset_fraction=0.0)


def test_a_loaded_state_continues_bit_identically_on_warp():
    model = block()
    first, second = WarpSim(model, 3, CPU), WarpSim(model, 3, CPU)
    driver = RandomDriver(model, 3)
    for _ in range(40):
        driver.step(first)
    second.load_state(first.state())
    for _ in range(40):
        driver.step(first, second)
        for name, tensor in first.state().items():
            assert torch.equal(tensor, second.state()[name]), name


@pytest.mark.parametrize("engine", [MujocoSim, WarpSim])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e11])
@pytest.mark.parametrize("field", ["qpos", "qvel"])
def test_an_invalid_state_fails_only_its_env_and_a_reset_recovers(engine: type, value: float, field: str):
    model = block()

    def make() -> Sim:
        return make_sim(model, 3, "warp" if engine is WarpSim else "mujoco", CPU)

    valid, invalid, driver, again = make(), make(), RandomDriver(model, 3), RandomDriver(model, 3)
    for _ in range(40):
        driver.step(valid, reset_fraction=0.0)
        again.step(invalid, reset_fraction=0.0)
    state = invalid.state()
    state[field][1] = value
    invalid.load_state(state)
    for sim in (valid, invalid):
        sim.step(2)
    assert invalid.failed.tolist() == [False, True, False]
    assert not invalid.overflowed.any()
    fresh = torch.from_numpy(model.qpos0).float().expand(3, -1)
    for sim in (valid, invalid):
        sim.reset(torch.tensor([False, True, False]), fresh, torch.zeros_like(sim.qvel))
        sim.sense()
    for _ in range(20):
        driver.step(valid)
        again.step(invalid)
    assert invalid.failures.tolist() == [0, 1, 0]
    assert valid.failures.tolist() == [0, 0, 0]
    for name, tensor in valid.state().items():
        if name != "failures":
            assert torch.equal(tensor, invalid.state()[name]), name


def test_an_env_with_a_nan_control_fails_on_both_engines():
    for sim in both(block(), 3):
        sim.ctrl[2] = torch.nan
        for _ in range(2):
            sim.step(2)
            sim.sense()
        assert sim.failed[2]
        assert sim.failures[:2].tolist() == [0, 0]


def place_on_floor(sim: Sim, *envs: int) -> None:
    qpos = torch.from_numpy(sim.model.qpos0).float().expand(sim.num_envs, -1).clone()
    qpos[list(envs), 2] = 0.0599
    sim.reset(torch.ones(sim.num_envs, dtype=torch.bool), qpos, torch.zeros_like(sim.qvel))
    sim.sense()


def test_envs_that_run_out_of_constraint_rows_are_counted_separately_on_warp():
    sim = WarpSim(block(), 3, CPU, constraints_per_env=8)
    place_on_floor(sim, 1)
    for _ in range(3):
        sim.step(2)
        sim.sense()
        assert sim.overflowed.tolist() == [False, True, False]
    assert sim.overflows.tolist() == [0, 3, 0]
    place_on_floor(sim)
    sim.step(2)
    assert not sim.overflowed.any()


def test_all_envs_are_marked_when_the_shared_contact_pool_of_warp_is_exhausted():
    """Warp does not report which contacts were lost, so every env may be wrong."""
    sim = WarpSim(block(), 3, CPU, contacts_per_env=1)
    place_on_floor(sim, 1)
    sim.step(2)
    assert sim.overflowed.tolist() == [True, True, True]
    place_on_floor(sim)
    sim.step(2)
    assert not sim.overflowed.any()
    assert sim.overflows.tolist() == [1, 1, 1]


def test_a_task_gives_equal_results_on_both_engines():
    c, warp = (RobotEnv(Cartpole(), 8, engine, seed=3) for engine in ("mujoco", "warp"))
    generator = torch.Generator().manual_seed(0)
    assert error(c.reset()["policy"], warp.reset()["policy"]) == 0.0
    ended = 0
    for i in range(100):
        if i % 10 == 0:
            warp.prefetch_random(10)
        actions = torch.randn(8, 1, generator=generator)
        one, other = c.step(actions), warp.step(actions)
        assert torch.equal(one.terminated, other.terminated)
        assert torch.equal(one.truncated, other.truncated)
        for obs, others in ((one.obs, other.obs), (one.final_obs, other.final_obs)):
            assert error(obs["policy"][:, :2], others["policy"][:, :2]) < QPOS_ERROR
            assert error(obs["policy"][:, 2:], others["policy"][:, 2:]) < QVEL_ERROR
        assert error(one.reward, other.reward) < QVEL_ERROR
        ended += int(one.terminated.sum())
    assert ended > 5


@dataclass(frozen=True)
class Tossed(Task):
    """A tilted block falls on the floor and is pushed in its tenth step; every randomized field affects its motion."""

    fields: tuple[Randomization, ...] = (
        Randomization("body_mass", 0.5, 2.0, names="block|arm", when="once"),
        # With lower friction, Warp's float32 solver differs from the C engine by 1e-5.
        Randomization("geom_friction", 0.3, 1.0, how="set", column=0, together=True),
        Randomization("actuator_gainprm", 0.5, 2.0, column=0, when="once", every_seconds=0.07),
        Randomization("actuator_biasprm", 0.5, 2.0),
        Randomization("dof_armature", 0.0, 0.02, names="arm", how="add", every_seconds=0.1),
        Randomization("opt.gravity", 0.5, 1.5, column=2),
        Randomization("opt.gravity", -2.0, 2.0, how="add", column=0, when="once", every_seconds=0.05),
    )
    episode_seconds: float = 0.3
    decimation: int = 2

    num_actions = 1
    num_reset_samples = 6
    observation_history = 2
    observation_delay = (0, 1)

    def randomized_fields(self) -> tuple[Randomization, ...]:
        return self.fields

    def model(self) -> mujoco.MjModel:
        model = block()
        model.actuator_biastype[0] = mujoco.mjtBias.mjBIAS_AFFINE
        model.actuator_biasprm[0, :3] = 0.02, -0.2, -0.02
        return model

    def control(self, state: EnvState) -> Tensor:
        return state.action

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {"policy": state.qpos, "critic": state.qvel}

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        return {"height": state.qpos[:, 2]}

    def terminated(self, state: EnvState) -> Tensor:
        return state.qpos[:, 0] > 0.2

    def push_velocity(self, state: EnvState) -> Tensor:
        return (state.episode_step == 10).float()[:, None] * torch.full_like(state.qvel, 0.3)

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        zero, upright = torch.zeros_like(uniform[:, :2]), torch.ones_like(uniform[:, :1])
        qpos = torch.cat((zero, 0.09 * upright, upright, 0.1 * uniform[:, :1], zero, zero[:, :1]), dim=1)
        return ResetState(qpos, torch.cat((uniform, zero[:, :1]), dim=1))


def test_randomization_pushes_and_delays_are_equal_on_both_engines():
    envs = c, warp = [RobotEnv(Tossed(), 6, engine, seed=1) for engine in ("mujoco", "warp")]
    fields = dict.fromkeys(item.field for item in Tossed().fields)
    generator = torch.Generator().manual_seed(0)
    terminated = truncated = 0
    seen = [{name: c.sim.field(name).clone() for name in fields}]
    for _ in range(100):
        actions = torch.randn(6, 1, generator=generator)
        one, other = (env.step(actions) for env in envs)
        assert_close(c.sim, warp.sim)
        assert torch.equal(one.terminated, other.terminated)
        assert torch.equal(one.truncated, other.truncated)
        for obs, others in ((one.obs, other.obs), (one.final_obs, other.final_obs)):
            assert error(obs["policy"], others["policy"]) < QPOS_ERROR
            assert error(obs["critic"], others["critic"]) < QVEL_ERROR
        for name in fields:
            assert torch.equal(c.sim.field(name), warp.sim.field(name)), name
        seen.append({name: c.sim.field(name).clone() for name in fields})
        terminated, truncated = terminated + int(one.terminated.sum()), truncated + int(one.truncated.sum())
    assert terminated > 3
    assert truncated > 3
    for name in fields:
        changes = sum(not torch.equal(before[name], after[name]) for before, after in pairwise(seen))
        assert (changes == 0) == (name == "body_mass"), name


@pytest.mark.parametrize("item", Tossed().fields, ids=lambda item: f"{item.field} {item.column}")
def test_each_randomization_changes_the_motion(item: Randomization):
    """Ensure that the previous test does not pass because both engines ignore a field."""
    plain, randomized = (RobotEnv(Tossed(fields=items), 6, "mujoco", seed=1) for items in ((), (item,)))
    for _ in range(25):
        for env in (plain, randomized):
            env.step(torch.ones(6, 1))
    assert ((plain.sim.qpos - randomized.sim.qpos).abs().amax(1) > 10 * QPOS_ERROR).all()


def test_returned_observations_of_a_warp_env_are_not_overwritten():
    env = RobotEnv(Cartpole(), 4, "warp")
    kept = [env.step(torch.ones(4, 1)).obs["policy"] for _ in range(5)]
    copies = [obs.clone() for obs in kept]
    for _ in range(5):
        env.step(-torch.ones(4, 1))
    assert all(torch.equal(now, then) for now, then in zip(kept, copies, strict=True))


def test_an_error_names_a_field_that_is_not_per_env():
    sim = WarpSim(block(), 2, CPU, ("body_mass",))
    with pytest.raises(KeyError, match=r"'geom_friction' is not per env.*body_mass"):
        sim.field("geom_friction")


def test_warp_rejects_runge_kutta():
    model = block()
    model.opt.integrator = mujoco.mjtIntegrator.mjINT_RK4
    with pytest.raises(ValueError, match="use implicitfast or Euler"):
        WarpSim(model, 1, CPU)


@pytest.mark.parametrize(
    ("engine", "device", "expected"),
    [("auto", "cpu", "mujoco"), ("auto", "cuda", "warp"), ("warp", "cpu", "warp"), ("mujoco", "cpu", "mujoco")],
)
def test_the_default_engine_depends_on_the_device(engine: str, device: str, expected: str):
    assert choose_engine(engine, torch.device(device)) == expected
