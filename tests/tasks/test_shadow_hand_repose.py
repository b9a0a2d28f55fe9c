"""A hand turns a cube: actions, observations, rewards, goals and metrics."""

import dataclasses
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.learners.ppo.settings import PpoSettings
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks.shadow_hand_repose import ShadowHandRepose, ShadowHandRewards
from paceline.tensors import rotations
from paceline.train import train

START, IN_HAND = (0.0, -0.39, 0.6), (0.0, -0.39, 0.56)
"""Positions of the cube: where it is dropped, and where it rests on the palm, m."""


def put(env: RobotEnv, **parts: Tensor) -> None:
    """Set parts of the state in all envs: `place`, `rotation`, or an entry of the task state."""
    state = env.state()
    for name, value in parts.items():
        target = {"place": state["sim/qpos"][:, 24:27], "rotation": state["sim/qpos"][:, 27:]}.get(name)
        (state[f"task_state/{name}"] if target is None else target).copy_(value)
    env.load_state(state)


def joint_ranges(env: RobotEnv) -> Tensor:
    """Return the minimum and the maximum of each joint of the hand, rad, [2, 24]."""
    return torch.from_numpy(env.sim.model.jnt_range[:24]).float().T


def turned(angle: float) -> Tensor:
    """Return a rotation about a tilted axis, [1, 4]."""
    half = 0.5 * angle
    return torch.tensor([[math.cos(half), 0.6 * math.sin(half), 0.0, 0.8 * math.sin(half)]])


def no_action(env: RobotEnv) -> Tensor:
    return torch.zeros(env.num_envs, env.num_actions)


def test_an_episode_is_600_control_steps_of_a_sixtieth_of_a_second():
    env = RobotEnv(ShadowHandRepose(), 1)
    assert env.max_episode_steps == 600
    assert env.step_seconds == pytest.approx(1 / 60)


# Actions


@pytest.mark.parametrize(("action", "end"), [(-1.0, 0), (-3.0, 0), (1.0, 1), (3.0, 1)])
def test_actions_of_one_command_the_ends_of_the_ranges(action: float, end: int):
    env = RobotEnv(ShadowHandRepose(), 1)
    env.step(torch.full((1, 20), action))
    assert env.sim.ctrl[0].numpy() == pytest.approx(env.sim.model.actuator_ctrlrange[:, end], abs=1e-6)


def test_targets_follow_a_moving_average_of_the_actions():
    at_once, slowly = (RobotEnv(ShadowHandRepose(action_moving_average=share), 1) for share in (1.0, 0.3))
    for env in (at_once, slowly):
        env.step(torch.ones(1, 20))
    torch.testing.assert_close(slowly.sim.ctrl, 0.3 * at_once.sim.ctrl)
    slowly.step(torch.ones(1, 20))
    torch.testing.assert_close(slowly.sim.ctrl, 0.51 * at_once.sim.ctrl)


# Observations


@pytest.mark.parametrize(("sees", "width"), [("state", 157), ("fingertips", 42)])
def test_the_policy_observes_the_chosen_group_and_the_critic_everything(sees: str, width: int):
    obs = RobotEnv(ShadowHandRepose(policy_observations=sees), 2).reset()  # pyright: ignore[reportArgumentType]
    assert obs["policy"].shape == (2, width)
    assert obs["critic"].shape == (2, 157 + 30)


def test_the_order_of_the_observations():
    env = RobotEnv(ShadowHandRepose(), 3)
    obs, qpos, goal = env.reset()["policy"], env.sim.qpos, env.env_state.task_state["goal"]
    low, high = joint_ranges(env)
    torch.testing.assert_close(obs[:, :24], 2.0 * (qpos[:, :24] - low) / (high - low) - 1.0)
    torch.testing.assert_close(obs[:, 48:55], qpos[:, 24:])
    torch.testing.assert_close(obs[:, 61:64], torch.tensor(IN_HAND).expand(3, -1))
    torch.testing.assert_close(obs[:, 64:68], goal)
    torch.testing.assert_close(rotations.product(obs[:, 68:72], goal), qpos[:, 27:])
    fingertips = obs[:, 72:87].view(3, 5, 3)
    assert (fingertips[:, :4, 1] < -0.4).all(), "four fingers point away from the arm"
    assert torch.allclose(obs[:, 87:107].view(3, 5, 4).norm(dim=2), torch.ones(3, 5))
    assert (obs[:, 137:] == 0.0).all()
    actions = torch.linspace(-2.0, 2.0, 60).view(3, 20)
    torch.testing.assert_close(env.step(actions).obs["policy"][:, 137:], actions.clamp(-1.0, 1.0))


def test_velocities_are_in_the_global_frame_and_scaled():
    env = RobotEnv(ShadowHandRepose(), 1)
    state = env.state()
    # Its x axis points up.
    state["sim/qpos"][:, 27:] = torch.tensor([math.sqrt(0.5), 0.0, -math.sqrt(0.5), 0.0])
    state["sim/qvel"][:, 24:] = torch.tensor([1.0, 2.0, 3.0, 5.0, 0.0, 0.0])
    state["sim/qvel"][:, 7] = 4.0
    env.load_state(state)
    env.sim.sense()
    obs = env.observe()["policy"][0]
    assert obs[24 + 7] == pytest.approx(0.8)
    assert obs[55:61].tolist() == pytest.approx([1.0, 2.0, 3.0, 0.0, 0.0, 1.0], abs=1e-5)


# Rewards and terminations


def test_rewards_equal_values_computed_by_hand():
    task = ShadowHandRepose(rewards=ShadowHandRewards(fall=-50.0))
    env = RobotEnv(task, 2)
    place = torch.tensor([IN_HAND, IN_HAND]) + torch.tensor([[0.0, 0.03, 0.04], [0.3, 0.0, 0.0]])
    put(env, place=place, angle=torch.tensor([[0.4], [0.06]]), reached=torch.tensor([[0.0], [1.0]]))
    env.env_state.action.fill_(0.5)
    assert task.terminated(env.env_state).tolist() == [False, True]
    terms = task.reward(env.env_state, torch.tensor([False, True]))
    assert terms["distance"].tolist() == pytest.approx([-0.005, -0.03])
    assert terms["rotation"].tolist() == pytest.approx([0.02, 0.0625])
    assert terms["action"].tolist() == pytest.approx([-1e-5, -1e-5])
    assert terms["success"].tolist() == pytest.approx([0.0, 2.5])
    assert terms["fall"].tolist() == pytest.approx([0.0, -0.5])


def test_the_episode_ends_when_the_cube_falls():
    env = RobotEnv(ShadowHandRepose(), 3)
    places = torch.tensor([IN_HAND] * 3)
    places[1, 2] -= 0.25
    places[2, 0] += 0.23
    put(env, place=places)
    assert env.step(no_action(env)).terminated.tolist() == [False, True, False]


# Goals


def test_a_reached_goal_is_rewarded_counted_and_replaced():
    env = RobotEnv(ShadowHandRepose(), 3)
    # A step of free fall does not rotate the cube.
    rotation = turned(0.7).expand(3, -1)
    off = torch.cat((turned(0.05), turned(0.15), turned(3.0)))
    put(env, rotation=rotation, goal=rotations.product(off, rotation), place=torch.tensor([0.0, -0.39, 0.65]))
    before = env.env_state.task_state["goal"].clone()
    step = env.step(no_action(env))
    assert env.env_state.task_state["reached"].flatten().tolist() == [1.0, 0.0, 0.0]
    assert env.env_state.task_state["angle"].flatten().tolist() == pytest.approx([0.05, 0.15, 3.0], abs=2e-3)
    assert (step.reward > 2.0).tolist() == [True, False, False]
    assert (env.env_state.task_state["goal"] == before).all(1).tolist() == [False, True, True]
    assert step.obs["policy"][:, 64:68].equal(env.env_state.task_state["goal"])
    assert env.env_state.task_state["successes"].flatten().tolist() == [1.0, 0.0, 0.0]


def test_goals_and_initial_rotations_cover_all_directions():
    env = RobotEnv(ShadowHandRepose(), 500)
    for quaternions in (env.env_state.task_state["goal"], env.sim.qpos[:, 27:]):
        torch.testing.assert_close(quaternions.norm(dim=1), torch.ones(500))
        up = 1.0 - 2.0 * quaternions[:, 1:3].square().sum(1)
        assert up.min() < -0.95
        assert up.max() > 0.95
    assert not torch.allclose(env.env_state.task_state["goal"], env.sim.qpos[:, 27:])


def test_initial_states_are_within_their_bounds():
    env = RobotEnv(ShadowHandRepose(), 500)
    qpos, (low, high) = env.sim.qpos, joint_ranges(env)
    assert (qpos[:, :24] >= 0.2 * low - 1e-6).all()
    assert (qpos[:, :24] <= 0.2 * high + 1e-6).all()
    assert (qpos[:, :24].std(0) > 0.05 * (high - low)).all()
    off = (qpos[:, 24:27] - torch.tensor(START)).abs()
    assert off.max() <= 0.01 + 1e-6
    assert (off.amax(0) > 0.009).all()


def test_the_log_has_the_successes_of_whole_episodes():
    """A large tolerance makes many successes, and some cubes fall early."""
    env = RobotEnv(ShadowHandRepose(success_tolerance=2.0, episode_seconds=0.5, fall_distance=0.09), 24, seed=1)
    counted, column, logged, lengths = torch.zeros(24), env.log_names.index("measure/successes"), [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        step = env.step(torch.randn(24, 20, generator=generator))
        counted += env.env_state.task_state["reached"][:, 0]
        for env_index in (step.terminated | step.truncated).nonzero().flatten().tolist():
            logged.append((step.log[env_index, column].item(), counted[env_index].item()))
            lengths.append(int(step.log[env_index, 0]))
            counted[env_index] = 0.0
    assert len({count for _, count in logged}) > 3
    assert len(set(lengths)) > 1
    assert [successes for successes, _ in logged] == pytest.approx([count for _, count in logged], abs=1e-4)


# Physics


def test_the_cube_stays_in_a_hand_that_rests_half_closed():
    env = RobotEnv(ShadowHandRepose(), 32)
    fallen = torch.zeros(32, dtype=torch.bool)
    for _ in range(180):
        fallen |= env.step(no_action(env)).terminated
    assert fallen.sum() <= 2
    assert env.sim.qvel.abs().amax(1).median() < 0.1, "the joints oscillate"
    assert not env.faults().any()


def test_random_actions_keep_the_state_finite():
    env, generator = RobotEnv(ShadowHandRepose(), 16), torch.Generator().manual_seed(0)
    for _ in range(100):
        step = env.step(3.0 * torch.randn(16, 20, generator=generator))
        assert step.obs["critic"].isfinite().all()
    assert not env.faults().any()


# A run


def test_the_result_of_a_run_has_the_number_of_reached_goals(tmp_path: Path):
    settings = PpoSettings(horizon=8, epochs=1, minibatches=2, hidden=(16,))
    options = {"episode_seconds": 0.1, "policy_observations": "fingertips"}
    config = TrainConfig("shadow-hand-repose", options, settings=asdict(settings), num_envs=8, max_iterations=2)
    result = train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    assert set(result["measures"]) == {"successes", "angle_to_goal"}
    assert 0.0 < result["measures"]["angle_to_goal"] < math.pi
    assert json.loads((tmp_path / "run" / "result.json").read_text())["measures"] == result["measures"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"success_tolerance": 0.0}, r"--env\.success-tolerance 0 must be above 0"),
        ({"action_moving_average": 1.5}, r"--env\.action-moving-average 1\.5 must be at most 1"),
        ({"rewards": ShadowHandRewards(fall=math.nan)}, r"--env\.rewards\.fall nan must be between"),
    ],
)
def test_an_invalid_option_is_rejected(option: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(ShadowHandRepose(), **option)
