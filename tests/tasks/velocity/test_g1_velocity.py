"""A humanoid follows commands: the clock that paces its feet, falls, and commands that grow."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.learners.learner import LEARNERS
from paceline.tasks.velocity.g1_velocity import ENTRY, G1Velocity
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from paceline.tasks.velocity.velocity_task import VelocityTask

QUIET = G1Velocity(observation_noise_scale=0.0, push_seconds=0.0, randomize=False)


def still(env: RobotEnv) -> Tensor:
    return torch.zeros(env.num_envs, env.num_actions)


def terms(env: RobotEnv) -> dict[str, Tensor]:
    nobody = torch.zeros(env.num_envs, dtype=torch.bool)
    return {name: term / env.step_seconds for name, term in env.task.reward(env.env_state, nobody).items()}


def test_the_settings_hold():
    for learner in ("ppo", "rsl_rl", "rl_games", "skrl"):
        LEARNERS[learner].settings.from_training(ENTRY.training).check()


@pytest.mark.parametrize("task", [G1Velocity(), Go1Velocity(decimation=2)])
def test_a_control_step_takes_as_long_as_the_task_reckons(task: VelocityTask):
    assert RobotEnv(task, 1).step_seconds == pytest.approx(task.step_seconds)


def test_it_stands_for_a_moment_without_a_policy():
    env = RobotEnv(dataclasses.replace(QUIET, standing_fraction=1.0), 8)
    for _ in range(15):
        assert not env.step(still(env)).terminated.any()


def test_a_fall_ends_the_episode():
    env = RobotEnv(QUIET, 3)
    state = env.state()
    state["sim/qpos"][1, 2:7] = torch.tensor((0.757, math.cos(0.6), 0.0, math.sin(0.6), 0.0))
    env.load_state(state)
    assert env.step(still(env)).terminated.tolist() == [False, True, False]


def test_a_pelvis_that_sinks_ends_the_episode():
    env = RobotEnv(dataclasses.replace(QUIET, min_height=0.757 + 0.1), 3)
    assert env.step(still(env)).terminated.all()


def test_the_clock_takes_its_time_and_is_seen_by_those_who_walk():
    env = RobotEnv(dataclasses.replace(QUIET, standing_fraction=0.5, command_seconds=1e6), 64)
    before, walks = env.env_state.task_state["phase"].clone(), QUIET.is_moving(env.env_state).bool()
    assert walks.float().mean() == pytest.approx(0.5, abs=0.2)
    for _ in range(9):
        env.step(still(env))
    clock = env.step(still(env)).obs["policy"][:, -2:]
    turned = (env.env_state.task_state["phase"] - before).remainder(1.0)
    torch.testing.assert_close(turned, torch.full_like(turned, 0.2 / QUIET.stride_seconds))
    torch.testing.assert_close(clock.norm(dim=1), walks.float())


def test_each_foot_swings_in_its_half_of_the_stride():
    task = dataclasses.replace(QUIET, standing_fraction=0.0)
    env = RobotEnv(task, 2)
    env.env_state.task_state["phase"].copy_(torch.tensor([[0.25], [0.75]]))
    heights = env.observe()["critic"][:, -2:]
    missed = (heights - torch.tensor([[0.08, 0.0], [0.0, 0.08]])).square().sum(1)
    torch.testing.assert_close(terms(env)["feet_height"], torch.exp(-100.0 * missed))
    # Both feet are down: each world has the one right that shall be.
    assert terms(env)["feet_contact"].tolist() == pytest.approx([0.25, 0.25])


def test_walking_as_commanded_is_worth_more_than_standing():
    env = RobotEnv(dataclasses.replace(QUIET, standing_fraction=0.0), 2)
    env.env_state.task_state["command"].copy_(torch.tensor([[0.8, 0.0, 0.0], [0.8, 0.0, 0.0]]))
    state = env.state()
    state["sim/qpos"][:] = torch.from_numpy(env.sim.model.key("home").qpos)
    state["sim/qvel"].zero_()
    state["sim/qvel"][1, 0] = 0.8
    env.load_state(state)
    env.sim.sense()
    stands, walks = terms(env)["track_lin_vel"].tolist()
    assert walks == pytest.approx(2.0)
    assert stands == pytest.approx(2.0 * math.exp(-4.0 * 0.64))


def ends(env: RobotEnv, steps: int, missed: float) -> Tensor:
    """The range of commands after an episode that ended after `steps`, with this error per step."""
    env.env_state.episode_step.fill_(steps)
    env.env_state.task_state["tracking_error"].fill_(missed * steps)
    return QUIET.reset(env.env_state, torch.rand(env.num_envs, QUIET.num_reset_samples)).task_state["command_scale"][
        0, 0
    ]


def test_commands_grow_for_those_who_follow_and_shrink_for_those_who_fall():
    env = RobotEnv(QUIET, 4)
    whole = env.max_episode_steps
    assert (env.env_state.task_state["command_scale"] == 0.5).all()
    assert (env.env_state.task_state["command"].abs() <= 0.5 * torch.tensor((1.0, 0.5, 1.0))).all()
    env.env_state.task_state["command_scale"].fill_(0.7)
    assert ends(env, whole, missed=0.1) == pytest.approx(0.8)
    assert ends(env, whole, missed=0.4) == pytest.approx(0.7)
    assert ends(env, whole // 2, missed=0.1) == pytest.approx(0.65)
    env.env_state.task_state["command_scale"].fill_(1.0)
    assert ends(env, whole, missed=0.1) == pytest.approx(1.0)
    # A fall in the very last step is one too.
    state = env.state()
    state["sim/qpos"][:, 2] = 0.1
    env.load_state(state)
    assert ends(env, whole, missed=0.1) == pytest.approx(0.95)


def test_a_trained_policy_is_watched_over_all_commands():
    assert G1Velocity(initial_command_scale=0.3).for_evaluation() == G1Velocity(initial_command_scale=1.0)


def test_the_command_scale_is_saved_with_the_envs():
    env, other = RobotEnv(QUIET, 4), RobotEnv(QUIET, 4)
    env.env_state.task_state["command_scale"].copy_(torch.tensor([[0.5], [0.6], [0.9], [1.0]]))
    other.load_state(env.state())
    assert torch.equal(other.env_state.task_state["command_scale"], env.env_state.task_state["command_scale"])


def test_a_bad_option_is_refused():
    with pytest.raises(UserError, match=r"--env\.initial-command-scale 1\.5"):
        G1Velocity(initial_command_scale=1.5)
    with pytest.raises(UserError, match=r"--env\.stride-seconds 0"):
        G1Velocity(stride_seconds=0.0)
