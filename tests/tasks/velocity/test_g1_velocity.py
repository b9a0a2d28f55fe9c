"""A humanoid follows commands: gait clock, falls and the curriculum of commands."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.tasks.velocity.g1_velocity import G1Velocity
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from paceline.tasks.velocity.velocity_task import VelocityTask

QUIET = G1Velocity(observation_noise_scale=0.0, push_seconds=0.0, randomize=False)


def no_action(env: RobotEnv) -> Tensor:
    return torch.zeros(env.num_envs, env.num_actions)


def terms(env: RobotEnv) -> dict[str, Tensor]:
    terminated = torch.zeros(env.num_envs, dtype=torch.bool)
    return {name: term / env.step_seconds for name, term in env.task.reward(env.env_state, terminated).items()}


@pytest.mark.parametrize("task", [G1Velocity(), Go1Velocity(decimation=2)])
def test_the_duration_of_a_control_step_is_that_of_the_env(task: VelocityTask):
    assert RobotEnv(task, 1).step_seconds == pytest.approx(task.step_seconds)


def test_without_a_policy_it_stands_for_15_control_steps():
    env = RobotEnv(dataclasses.replace(QUIET, standing_fraction=1.0), 8)
    for _ in range(15):
        assert not env.step(no_action(env)).terminated.any()


def test_a_fall_ends_the_episode():
    env = RobotEnv(QUIET, 3)
    state = env.state()
    state["sim/qpos"][1, 2:7] = torch.tensor((0.757, math.cos(0.6), 0.0, math.sin(0.6), 0.0))
    env.load_state(state)
    assert env.step(no_action(env)).terminated.tolist() == [False, True, False]


def test_a_low_pelvis_ends_the_episode():
    env = RobotEnv(dataclasses.replace(QUIET, min_height=0.757 + 0.1), 3)
    assert env.step(no_action(env)).terminated.all()


def test_the_clock_has_the_period_of_the_gait_and_is_zero_for_standing_robots():
    env = RobotEnv(dataclasses.replace(QUIET, standing_fraction=0.5, command_seconds=1e6), 64)
    before, moving = env.env_state.task_state["phase"].clone(), QUIET.is_moving(env.env_state).bool()
    assert moving.float().mean() == pytest.approx(0.5, abs=0.2)
    for _ in range(9):
        env.step(no_action(env))
    clock = env.step(no_action(env)).obs["policy"][:, -2:]
    advance = (env.env_state.task_state["phase"] - before).remainder(1.0)
    torch.testing.assert_close(advance, torch.full_like(advance, 0.2 / QUIET.stride_seconds))
    torch.testing.assert_close(clock.norm(dim=1), moving.float())


def test_each_foot_swings_in_its_half_of_the_stride():
    task = dataclasses.replace(QUIET, standing_fraction=0.0)
    env = RobotEnv(task, 2)
    env.env_state.task_state["phase"].copy_(torch.tensor([[0.25], [0.75]]))
    heights = env.observe()["critic"][:, -2:]
    error = (heights - torch.tensor([[0.08, 0.0], [0.0, 0.08]])).square().sum(1)
    torch.testing.assert_close(terms(env)["feet_height"], torch.exp(-100.0 * error))
    # Both feet are on the ground: in each env that is right for one of them.
    assert terms(env)["feet_contact"].tolist() == pytest.approx([0.25, 0.25])


def test_walking_as_commanded_has_a_higher_reward_than_standing():
    env = RobotEnv(dataclasses.replace(QUIET, standing_fraction=0.0), 2)
    env.env_state.task_state["command"].copy_(torch.tensor([[0.8, 0.0, 0.0], [0.8, 0.0, 0.0]]))
    state = env.state()
    state["sim/qpos"][:] = torch.from_numpy(env.sim.model.key("home").qpos)
    state["sim/qvel"].zero_()
    state["sim/qvel"][1, 0] = 0.8
    env.load_state(state)
    env.sim.sense()
    standing, walking = terms(env)["track_lin_vel"].tolist()
    assert walking == pytest.approx(2.0)
    assert standing == pytest.approx(2.0 * math.exp(-4.0 * 0.64))


def next_command_scale(env: RobotEnv, steps: int, error: float) -> Tensor:
    """Return the command scale after an episode of `steps` steps with this tracking error per step."""
    env.env_state.episode_step.fill_(steps)
    env.env_state.task_state["tracking_error"].fill_(error * steps)
    reset = QUIET.reset(env.env_state, torch.rand(env.num_envs, QUIET.num_reset_samples))
    return reset.task_state["command_scale"][0, 0]


def test_the_command_scale_grows_after_success_and_shrinks_after_falls():
    env = RobotEnv(QUIET, 4)
    whole = env.max_episode_steps
    assert (env.env_state.task_state["command_scale"] == 0.5).all()
    assert (env.env_state.task_state["command"].abs() <= 0.5 * torch.tensor((1.0, 0.5, 1.0))).all()
    env.env_state.task_state["command_scale"].fill_(0.7)
    assert next_command_scale(env, whole, error=0.1) == pytest.approx(0.8)
    assert next_command_scale(env, whole, error=0.4) == pytest.approx(0.7)
    assert next_command_scale(env, whole // 2, error=0.1) == pytest.approx(0.65)
    env.env_state.task_state["command_scale"].fill_(1.0)
    assert next_command_scale(env, whole, error=0.1) == pytest.approx(1.0)
    # A fall in the last step counts as a fall.
    state = env.state()
    state["sim/qpos"][:, 2] = 0.1
    env.load_state(state)
    assert next_command_scale(env, whole, error=0.1) == pytest.approx(0.95)


def test_evaluation_uses_the_full_range_of_commands():
    assert G1Velocity(initial_command_scale=0.3).for_evaluation() == G1Velocity(initial_command_scale=1.0)


def test_the_command_scale_is_saved_with_the_envs():
    env, other = RobotEnv(QUIET, 4), RobotEnv(QUIET, 4)
    env.env_state.task_state["command_scale"].copy_(torch.tensor([[0.5], [0.6], [0.9], [1.0]]))
    other.load_state(env.state())
    assert torch.equal(other.env_state.task_state["command_scale"], env.env_state.task_state["command_scale"])


def test_an_invalid_option_is_rejected():
    with pytest.raises(UserError, match=r"--env\.initial-command-scale 1\.5"):
        G1Velocity(initial_command_scale=1.5)
    with pytest.raises(UserError, match=r"--env\.stride-seconds 0"):
        G1Velocity(stride_seconds=0.0)
