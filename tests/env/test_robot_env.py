"""The contract of `VecEnv` on the C engine. Numbers are exact, so only sums have a tolerance."""

from dataclasses import dataclass, replace
from typing import Any

import mujoco
import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState, Task
from paceline.env.vec_env import Step
from paceline.tasks.cartpole import Cartpole
from paceline.tensors import random
from tests.env.drift import Drift


def actions_for(env: RobotEnv, steps: int, size: float = 1.0) -> list[Tensor]:
    """Return actions that depend on the global env index, so that they are the same on any number of ranks."""
    env_index = torch.arange(env.first_env, env.first_env + env.num_envs)
    return list(
        size * random.normal(99, env_index, torch.arange(steps)[:, None], random.Stream.ACTION, env.num_actions)
    )


def run(env: RobotEnv, steps: int, size: float = 1.0) -> list[Step]:
    return [env.step(action) for action in actions_for(env, steps, size)]


def tensors(step: Step) -> dict[str, Tensor]:
    parts = {f"obs/{name}": group for name, group in step.obs.items()}
    parts |= {f"final_obs/{name}": group for name, group in step.final_obs.items()}
    return parts | {name: getattr(step, name) for name in ("reward", "terminated", "truncated", "log")}


def assert_same(steps: list[Step], others: list[Step], rows: Any = slice(None), other_rows: Any = slice(None)) -> None:
    """Compare bit by bit, in these envs."""
    assert len(steps) == len(others)
    for i, (step, other) in enumerate(zip(steps, others, strict=True)):
        for name, tensor in tensors(step).items():
            assert torch.equal(tensor[rows], tensors(other)[name][other_rows]), f"{name}, step {i}"


def ended(step: Step) -> Tensor:
    return step.terminated | step.truncated


def test_one_step_is_decimation_steps_of_plain_mujoco():
    task = Cartpole(decimation=5, initial_pole_angle=0.1)
    env = RobotEnv(task, 3, seed=4)
    model = task.model()
    data = [mujoco.MjData(model) for _ in range(3)]
    start = env.state()["sim/qpos"].numpy()
    for index, d in enumerate(data):
        d.qpos[:] = start[index]
    for action in actions_for(env, 6, size=0.1):
        assert not ended(env.step(action)).any()
        for index, d in enumerate(data):
            d.ctrl[:] = action[index].clamp(-1.0, 1.0).numpy()
            mujoco.mj_step(model, d, nstep=5)
            assert (env.state()["sim/qpos"][index].numpy() == d.qpos).all()
            assert (env.state()["sim/qvel"][index].numpy() == d.qvel).all()


def test_time_limit_cuts_every_episode_at_exactly_episode_steps():
    env = RobotEnv(Drift(), 3)
    assert env.max_episode_steps == 10
    for i, step in enumerate(run(env, 35), start=1):
        assert bool(step.truncated.all()) == bool(step.truncated.any()) == (i % 10 == 0)
        assert not step.terminated.any()


def test_each_env_has_its_own_time_limit():
    env = RobotEnv(Drift(), 4)
    state = env.state()
    state["episode_step"] += torch.tensor([0, 3, 5, 9])
    env.load_state(state)
    cut = torch.stack([step.truncated for step in run(env, 12)])
    assert [column.nonzero().flatten().tolist() for column in cut.T] == [[9], [6], [4], [0, 10]]


@dataclass(frozen=True)
class EndsAtTheLimit(Drift):
    """The task ends an episode in the very step in which its time is up."""

    def terminated(self, state: EnvState) -> Tensor:
        return state.episode_step >= 10


def test_an_end_at_the_time_limit_is_a_termination_only():
    last = run(RobotEnv(EndsAtTheLimit(), 3), 10)[-1]
    assert last.terminated.all()
    assert not last.truncated.any()


def test_termination_and_truncation_never_come_together():
    steps = run(RobotEnv(Drift(wall=0.0), 64), 60)
    assert sum(int(step.terminated.sum()) for step in steps) > 50
    assert sum(int(step.truncated.sum()) for step in steps) > 50
    assert not any((step.terminated & step.truncated).any() for step in steps)


def test_envs_whose_episode_ended_are_reset_and_the_others_are_unchanged():
    task = Drift(wall=0.0, episode_seconds=10.0)
    env = RobotEnv(task, 16, seed=5)
    unending = run(RobotEnv(replace(task, wall=1e9), 16, seed=5), 12)
    going, resets = torch.ones(16, dtype=torch.bool), 0
    for i, step in enumerate(run(env, 12)):
        # Numbers of step 0 went into the first episodes, those of this step into what starts now.
        numbers = random.uniform(5, torch.arange(16), torch.tensor(i), random.Stream.RESET, 2)
        qpos, qvel, _ = task.reset(env.env_state, numbers)
        fresh = torch.cat((qpos, qvel, torch.zeros(16, 3)), dim=1)
        done = ended(step)
        resets += int(done.sum())
        assert torch.equal(step.obs["policy"][done], fresh[done])
        assert torch.equal(step.obs["sensed"][done], qpos[done])
        assert torch.equal(step.obs["policy"][~done], step.final_obs["policy"][~done])
        # The final observation is of the state before the reset: where the block would be had there been no wall.
        assert torch.equal(step.final_obs["policy"][going], unending[i].final_obs["policy"][going])
        going &= ~done
        assert torch.equal(step.obs["policy"][going], unending[i].obs["policy"][going])
        assert torch.equal(step.obs["sensed"][going], unending[i].obs["sensed"][going])
    assert 0 < int(going.sum()) < 16
    assert resets > 5


def test_sensors_are_fresh_in_observations():
    for step in run(RobotEnv(Drift(wall=0.0), 16), 15):
        assert torch.equal(step.obs["sensed"], step.obs["critic"])


def test_last_action_is_the_one_before_and_both_are_zero_after_a_reset():
    env = RobotEnv(Drift(), 2)
    actions = actions_for(env, 10)
    steps = [env.step(action) for action in actions]
    for before, now, step in zip(actions, actions[1:], steps[1:], strict=False):
        assert torch.equal(step.final_obs["policy"][:, 2:4], torch.cat((now, before), dim=1))
    assert torch.equal(steps[-1].obs["policy"][:, 2:], torch.zeros(2, 3))


def test_what_a_step_returned_is_never_written_to_again():
    """A learner may keep these tensors, even if the task returns tensors of the simulation itself."""
    env = RobotEnv(Drift(wall=0.3), 8)
    kept = [{f"obs/{name}": group for name, group in env.reset().items()}]
    copies = [{name: tensor.clone() for name, tensor in kept[0].items()}]
    for action in actions_for(env, 25):
        kept.append(tensors(env.step(action)))
        copies.append({name: tensor.clone() for name, tensor in kept[-1].items()})
    env.reset()
    for i, (now, then) in enumerate(zip(kept, copies, strict=True)):
        for name, tensor in now.items():
            assert torch.equal(tensor, then[name]), f"{name} of step {i} has changed"


def test_log_sums_each_episode_from_its_start():
    env = RobotEnv(Drift(wall=0.0), 24, seed=2)
    assert env.log_names == ("length", "return", "reward/place", "reward/crash")
    sums, ends = torch.zeros(24, 4), 0
    for step in run(env, 40):
        place, crash = step.final_obs["policy"][:, 0], -5.0 * step.terminated
        sums += torch.stack((torch.ones(24), place + crash, place, crash), dim=1)
        assert torch.equal(step.log[:, [0, 3]], sums[:, [0, 3]])
        assert torch.allclose(step.log, sums, rtol=1e-5, atol=1e-5)
        sums[ended(step)] = 0.0
        ends += int(ended(step).sum())
    assert ends > 24


def test_reward_is_the_sum_of_its_terms():
    env = RobotEnv(Drift(wall=0.0), 24)
    for step in run(env, 12):
        assert torch.allclose(step.reward, step.final_obs["policy"][:, 0] - 5.0 * step.terminated)


def test_reset_starts_new_episodes_everywhere_and_forgets_the_running_ones():
    env = RobotEnv(Drift(), 6, seed=3)
    first = env.reset()["policy"]
    run(env, 7)
    second = env.reset()["policy"]
    assert torch.equal(second[:, 2:], torch.zeros(6, 3))
    assert (second != first)[:, :2].all()
    assert torch.equal(env.sim.time, torch.zeros(6))
    steps = run(env, 10)
    assert not any(ended(step).any() for step in steps[:-1])
    assert steps[-1].log[:, 0].tolist() == [10.0] * 6


def test_an_env_starts_as_if_it_had_been_reset():
    made, reset = RobotEnv(Drift(), 5), RobotEnv(Drift(), 5)
    first = reset.reset()
    assert torch.equal(made.sim.qpos, first["critic"])


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_prefetching_changes_nothing(block: int):
    plain, ahead = RobotEnv(Drift(wall=0.2), 8), RobotEnv(Drift(wall=0.2), 8)
    expected = run(plain, 30)
    taken = []
    for i, action in enumerate(actions_for(ahead, 30)):
        if i % block == 0:
            ahead.prefetch_random(block)
        taken.append(ahead.step(action))
    assert_same(taken, expected)


def test_prefetching_before_the_last_block_is_used_up_changes_nothing():
    plain, ahead = RobotEnv(Drift(wall=0.2), 8), RobotEnv(Drift(wall=0.2), 8)
    expected = run(plain, 20)
    taken = []
    for i, action in enumerate(actions_for(ahead, 20)):
        if i in (0, 1, 5, 6, 13):
            ahead.prefetch_random(4)
        taken.append(ahead.step(action))
    assert_same(taken, expected)


@pytest.mark.parametrize("task", [Drift(wall=0.2), Cartpole()], ids=["drift", "cartpole"])
@pytest.mark.parametrize("after", [1, 7, 33])
def test_a_loaded_state_continues_bit_by_bit(task: Task, after: int):
    first = RobotEnv(task, 8, seed=6)
    first.reset()
    run(first, after)
    saved = first.state()
    first.prefetch_random(5)
    actions = actions_for(first, 40)
    expected = [first.step(action) for action in actions]
    assert any(ended(step).any() for step in expected)

    second = RobotEnv(task, 8, seed=6)
    run(second, 3)
    second.prefetch_random(50)
    second.load_state(saved)
    assert_same([second.step(action) for action in actions], expected)
    final, other = first.state(), second.state()
    assert final.keys() == other.keys()
    for name, tensor in final.items():
        assert torch.equal(tensor, other[name]), name


def test_a_saved_state_is_a_copy():
    env = RobotEnv(Drift(), 4)
    run(env, 2)
    saved = env.state()
    copies = {name: tensor.clone() for name, tensor in saved.items()}
    run(env, 15)
    for name, tensor in saved.items():
        assert torch.equal(tensor, copies[name]), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e11, 1e200])
@pytest.mark.parametrize("field", ["sim/qpos", "sim/qvel"])
@pytest.mark.parametrize("task", [Drift(wall=0.2), Cartpole()], ids=["drift", "cartpole"])
def test_an_env_that_fails_is_terminated_and_counted_and_affects_no_other(task: Task, field: str, value: float):
    healthy, failing = RobotEnv(task, 6, seed=8), RobotEnv(task, 6, seed=8)
    for env in (healthy, failing):
        run(env, 3)
    state = failing.state()
    state[field][2] = value
    failing.load_state(state)

    expected, steps = run(healthy, 30), run(failing, 30)
    first = steps[0]
    assert first.terminated[2]
    assert not first.truncated[2]
    assert failing.faults().tolist() == [1.0, 0.0]
    assert healthy.faults().tolist() == [0.0, 0.0]
    assert failing.sim.failures.tolist() == [0, 0, 1, 0, 0, 0]
    assert first.log[2, 0] == 4.0
    assert first.reward[2] == 0.0
    assert not first.final_obs["policy"][2].any()

    others = [0, 1, 3, 4, 5]
    assert_same(steps, expected, others, others)
    for step in steps:
        for name, tensor in tensors(step).items():
            assert torch.isfinite(tensor).all(), name


def test_a_failed_env_is_reset_like_any_other():
    env = RobotEnv(Drift(), 3, seed=8)
    state = env.state()
    state["sim/qvel"][1] = torch.nan
    env.load_state(state)
    step = env.step(torch.zeros(3, 1))
    qpos, qvel, _ = Drift().reset(
        env.env_state, random.uniform(8, torch.arange(3), state["steps"], random.Stream.RESET, 2)
    )
    assert torch.equal(step.obs["policy"][1], torch.cat((qpos[1], qvel[1], torch.zeros(3))))


def test_a_nan_action_fails_only_its_env():
    healthy, failing = RobotEnv(Drift(), 4), RobotEnv(Drift(), 4)
    expected = run(healthy, 8)
    actions = actions_for(failing, 8)
    actions[2][1] = torch.nan
    steps = [failing.step(action) for action in actions]
    assert [int(step.terminated.sum()) for step in steps] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert steps[2].terminated[1]
    assert_same(steps, expected, [0, 2, 3], [0, 2, 3])
    for step in steps:
        for name, tensor in tensors(step).items():
            assert torch.isfinite(tensor).all(), name


@dataclass(frozen=True)
class FaultyReward(Drift):
    """Returns NaN in an env that has not failed."""

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        return {"faulty": torch.where(state.qpos[:, 0] > self.wall, torch.nan, 1.0)}

    def terminated(self, state: EnvState) -> Tensor:
        return torch.zeros_like(state.qpos[:, 0], dtype=torch.bool)


def test_a_reward_that_is_not_a_number_stays_in_its_episode():
    env = RobotEnv(FaultyReward(wall=0.5, episode_seconds=0.2), 2)
    state = env.state()
    state["sim/qpos"][1], state["episode_step"][1] = 0.6, 2
    env.load_state(state)
    returns = [(step.log[ended(step), 1].tolist()) for step in run(env, 10, size=0.0)]
    none: list[float] = []
    assert returns[0:2] == [none, none]
    assert returns[2] == pytest.approx([torch.nan], nan_ok=True)
    assert returns[3:] == [none, [5.0], none, none, [5.0], none, [5.0]]


@pytest.mark.parametrize("task", [Drift(wall=0.2), Cartpole()], ids=["drift", "cartpole"])
def test_envs_are_the_same_on_any_number_of_ranks(task: Task):
    whole = run(RobotEnv(task, 7, seed=9), 60)
    shares = [run(RobotEnv(task, count, seed=9, first_env=first), 60) for first, count in ((0, 2), (2, 5))]
    assert_same(shares[0], whole, slice(None), slice(0, 2))
    assert_same(shares[1], whole, slice(0, 5), slice(2, 7))
    assert sum(int(ended(step).sum()) for step in whole) > 7


@dataclass(frozen=True)
class UnknownSensor(Drift):
    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {"policy": state.sensor("plaec")}


def test_an_unknown_sensor_is_an_error_that_names_the_sensors_of_the_model():
    with pytest.raises(KeyError, match=r"no sensor 'plaec' in the model; choose from \['place'\]"):
        RobotEnv(UnknownSensor(), 1).reset()


def test_envs_and_seeds_start_differently():
    one, other = (RobotEnv(Drift(), 8, seed=seed).reset()["critic"] for seed in (1, 2**32 + 1))
    assert len({*one.flatten().tolist(), *other.flatten().tolist()}) == 16


def test_gradients_of_actions_end_at_the_env():
    env = RobotEnv(Drift(), 3)
    weight = torch.ones((), requires_grad=True)
    steps = [env.step(action * weight) for action in actions_for(env, 12)]
    assert not any(tensor.requires_grad for step in steps for tensor in tensors(step).values())
    assert not any(tensor.requires_grad for tensor in env.state().values())


def test_steps_under_inference_mode_and_outside_mix():
    """rsl_rl and others collect under inference mode, and then evaluate outside it."""
    env, plain = RobotEnv(Drift(wall=0.2), 4), RobotEnv(Drift(wall=0.2), 4)
    taken = []
    for i, action in enumerate(actions_for(env, 24)):
        with torch.inference_mode(i % 6 < 3):
            env.prefetch_random(2)
            taken.append(env.step(action))
    assert_same(taken, run(plain, 24))
