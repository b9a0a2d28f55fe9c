"""Rewards, limits, forces and initial states of cartpole, computed by hand."""

import math
from dataclasses import replace

import mujoco
import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState
from paceline.learners.ppo.settings import PpoSettings
from paceline.sim.mujoco_sim import MujocoSim
from paceline.tasks.cartpole import ENTRY, Cartpole


def state_at(*states: tuple[float, float, float, float]) -> EnvState:
    """Return envs in these states: cart position, pole angle, cart speed, pole speed."""
    values = torch.tensor(states)
    count = len(values)
    sim = MujocoSim(Cartpole().model(), count)
    sim.reset(torch.ones(count, dtype=torch.bool), values[:, :2], values[:, 2:])
    none = torch.zeros(count, 1)
    return EnvState(sim, {}, none, none, torch.zeros(count, dtype=torch.int64))


def test_an_episode_is_300_control_steps_of_a_sixtieth_of_a_second():
    env = RobotEnv(Cartpole(), 2)
    assert env.max_episode_steps == 300
    assert env.step_seconds == pytest.approx(1 / 60)
    assert env.sim.model.opt.timestep == pytest.approx(1 / 120)
    env.step(torch.zeros(2, 1))
    assert env.sim.time.tolist() == pytest.approx([1 / 60, 1 / 60])


def test_options_change_the_rates():
    env = RobotEnv(Cartpole(physics_hz=200.0, decimation=4, episode_seconds=3.0), 1)
    assert env.step_seconds == pytest.approx(0.02)
    assert env.max_episode_steps == 150


def test_reward_terms():
    state = state_at((0.0, 0.0, 0.0, 0.0), (1.0, 0.5, -2.0, 3.0), (-3.5, -0.1, 4.0, -5.0))
    terms = Cartpole().reward(state, torch.tensor([False, False, True]))
    assert {name: term.tolist() for name, term in terms.items()} == {
        "alive": [1.0, 1.0, 0.0],
        "termination": [0.0, 0.0, -2.0],
        "pole_angle": pytest.approx([0.0, -0.25, -0.01]),
        "cart_vel": pytest.approx([0.0, -0.02, -0.04]),
        "pole_vel": pytest.approx([0.0, -0.015, -0.025]),
    }


def test_a_step_is_rewarded_for_the_state_it_leads_to():
    env = RobotEnv(Cartpole(), 16, seed=1)
    step = env.step(torch.ones(16, 1))
    _, angle, cart_speed, pole_speed = step.final_obs["policy"].unbind(1)
    terminated = step.terminated.float()
    expected = 1 - terminated - 2 * terminated - angle**2 - 0.01 * cart_speed.abs() - 0.005 * pole_speed.abs()
    assert torch.allclose(step.reward, expected)


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_an_episode_ends_beyond_three_meters_or_a_right_angle(side: float):
    upright, out = (side * 2.999, 0.0, 0.0, 0.0), (side * 3.001, 0.0, 0.0, 0.0)
    tilted, down = (0.0, side * 1.57, 0.0, 0.0), (0.0, side * 1.5709, 0.0, 0.0)
    ended = Cartpole().terminated(state_at(upright, out, tilted, down))
    assert ended.tolist() == [False, True, False, True]


def test_limits_are_options():
    ended = Cartpole(max_cart_pos=1.0, max_pole_angle=0.2).terminated(
        state_at((0.9, 0.19, 0.0, 0.0), (1.1, 0.0, 0.0, 0.0), (0.0, 0.21, 0.0, 0.0))
    )
    assert ended.tolist() == [False, True, True]


@pytest.mark.parametrize(("action", "newtons"), [(1.0, 100.0), (-0.5, -50.0), (7.0, 100.0), (-7.0, -100.0)])
def test_an_action_of_one_pushes_with_a_hundred_newtons_and_no_more(action: float, newtons: float):
    task = Cartpole()
    state = state_at((0.0, 0.0, 0.0, 0.0))
    pushed = replace(state, action=torch.tensor([[action]]))
    model = task.model()
    data = mujoco.MjData(model)
    data.ctrl[:] = task.control(pushed)[0].numpy()
    mujoco.mj_forward(model, data)
    assert data.qfrc_actuator.tolist() == pytest.approx([newtons, 0.0])
    # Newton's law for cart (1 kg) and pole (0.5 kg, its center half a meter up, which swings back as the cart moves).
    cart, pole = data.qacc
    assert 1.0 * cart + 0.5 * (cart + 0.5 * pole) == pytest.approx(newtons)


def test_a_tilted_pole_falls_to_its_side():
    sim = state_at((0.0, 0.1, 0.0, 0.0), (0.0, -0.1, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)).sim
    sim.step(20)
    assert sim.qpos[0, 1] > 0.1
    assert sim.qpos[1, 1] < -0.1
    assert sim.qpos[2].tolist() == [0.0, 0.0]


def test_episodes_start_at_rest_in_the_middle_tilted_by_up_to_an_eighth_of_a_turn():
    angles = RobotEnv(Cartpole(), 4096, seed=3).reset()["policy"]
    assert not angles[:, [0, 2, 3]].any()
    angle = angles[:, 1]
    limit = math.pi / 4
    assert -limit <= float(angle.min()) < -0.99 * limit
    assert 0.99 * limit < float(angle.max()) < limit
    # Uniform: the mean and the mean square are within five standard errors.
    assert abs(float(angle.mean())) < 5 * limit / math.sqrt(3 * 4096)
    assert float(angle.square().mean()) == pytest.approx(limit**2 / 3, abs=5 * limit**2 * math.sqrt(4 / 45 / 4096))


def test_initial_pole_angle_is_an_option():
    state = state_at(*[(0.0, 0.0, 0.0, 0.0)] * 3)
    qpos, qvel, _ = Cartpole(initial_pole_angle=0.1).reset(state, torch.tensor([[0.0], [0.5], [1.0 - 2.0**-24]]))
    assert qpos[:, 1].tolist() == pytest.approx([-0.1, 0.0, 0.1])
    assert qpos.shape == qvel.shape == (3, 2)


def test_observations_are_positions_and_speeds():
    obs = Cartpole().observe(state_at((0.5, 0.25, -1.0, 2.0)))
    assert {name: group.tolist() for name, group in obs.items()} == {"policy": [[0.5, 0.25, -1.0, 2.0]]}


def balance(obs: Tensor) -> Tensor:
    """Return actions of a feedback law with gains found by hand."""
    return (obs * torch.tensor([0.1, 1.5, 0.2, 0.3])).sum(1, keepdim=True)


def test_a_simple_feedback_law_earns_nearly_the_whole_reward():
    env = RobotEnv(Cartpole(initial_pole_angle=0.3), 64, seed=2)
    obs = env.reset()
    for _ in range(299):
        step = env.step(balance(obs["policy"]))
        assert not step.terminated.any()
        obs = step.obs
    last = env.step(balance(obs["policy"]))
    assert last.truncated.all()
    log = dict(zip(env.log_names, last.log.unbind(1), strict=True))
    assert log["reward/alive"].tolist() == [300.0] * 64
    assert log["return"].min() > 290.0
    assert log["return"].max() < 300.0


def test_the_training_settings_are_valid():
    assert ENTRY.task is Cartpole
    PpoSettings.from_training(ENTRY.training).check()
