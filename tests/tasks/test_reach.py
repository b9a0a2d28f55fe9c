"""An arm reaches a goal: actions, observations, rewards, goals and metrics."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import Step
from paceline.errors import UserError
from paceline.learners.ppo.settings import PpoSettings
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks.reach import Reach, ReachRewards
from paceline.train import train


def no_action(env: RobotEnv) -> Tensor:
    return torch.zeros(env.num_envs, env.num_actions)


def run(env: RobotEnv, policy: Callable[[RobotEnv], Tensor], steps: int) -> Step:
    """Return the last of several steps."""
    for _ in range(steps - 1):
        env.step(policy(env))
    return env.step(policy(env))


def goal_of(env: RobotEnv) -> Tensor:
    return env.env_state.task_state["goal"]


def home(env: RobotEnv) -> Tensor:
    return torch.from_numpy(env.sim.model.key("home").qpos).float()


def test_an_episode_is_75_control_steps_of_a_twenty_fifth_of_a_second():
    env = RobotEnv(Reach(), 1)
    assert env.max_episode_steps == 75
    assert env.step_seconds == pytest.approx(0.04)


# Actions


def test_actions_change_the_joint_targets_by_small_steps():
    env = RobotEnv(Reach(), 2)
    start, action = env.sim.qpos.clone(), torch.tensor([[0.5, -0.5, 1.0, -1.0, 3.0, -3.0]]).expand(2, -1)
    for count in (1, 2, 3):
        env.step(action)
        torch.testing.assert_close(env.sim.ctrl, start + count * 0.05 * action.clamp(-1.0, 1.0))


def test_joint_targets_stay_within_the_joint_ranges():
    env = RobotEnv(Reach(action_scale=4.0), 1)
    for _ in range(3):
        env.step(torch.ones(1, 6))
    assert env.sim.ctrl[0].numpy() == pytest.approx(env.sim.model.jnt_range[:, 1])


def test_without_an_action_the_arm_holds_its_initial_pose():
    env = RobotEnv(Reach(), 4)
    start = env.sim.qpos.clone()
    run(env, no_action, 20)
    torch.testing.assert_close(env.sim.qpos, start, rtol=0.0, atol=1e-4)


# Observations


@pytest.mark.parametrize(("observe_goal", "width"), [(True, 21), (False, 18)])
def test_the_policy_observes_the_goal_only_if_the_option_is_set(observe_goal: bool, width: int):
    obs = RobotEnv(Reach(observe_goal=observe_goal), 2).reset()
    assert obs["policy"].shape == (2, width)
    assert obs["critic"].shape == (2, 33)
    torch.testing.assert_close(obs["policy"], obs["critic"][:, :width])


def test_the_order_of_the_observations():
    env = RobotEnv(Reach(), 3)
    action = torch.linspace(-2.0, 2.0, 18).view(3, 6)
    obs, tool = env.step(action).obs, env.env_state.sensor("tool_pos")
    torch.testing.assert_close(obs["policy"][:, :6], env.sim.qpos - home(env))
    torch.testing.assert_close(obs["policy"][:, 6:12], env.sim.qvel)
    torch.testing.assert_close(obs["policy"][:, 12:18], action.clamp(-1.0, 1.0))
    torch.testing.assert_close(obs["policy"][:, 18:], goal_of(env) - tool)
    torch.testing.assert_close(obs["critic"][:, 21:27], env.sim.ctrl - env.sim.qpos)
    torch.testing.assert_close(obs["critic"][:, 27:30], tool)
    torch.testing.assert_close(obs["critic"][:, 30:], env.env_state.sensor("tool_vel"))


# Goals


def test_goals_and_initial_poses_are_within_their_bounds():
    env = RobotEnv(Reach(), 500)
    goal, offset = goal_of(env), (env.sim.qpos - home(env)).abs()
    for axis, (low, high) in enumerate(((0.4, 0.65), (-0.2, 0.2), (0.75, 0.95))):
        assert low <= goal[:, axis].min() < low + 0.01
        assert high - 0.01 < goal[:, axis].max() <= high
    assert offset.max() <= 0.1 + 1e-6
    assert (offset.amax(0) > 0.095).all()


def test_the_target_is_at_the_goal_in_every_episode_and_after_a_resume():
    env = RobotEnv(Reach(episode_seconds=0.12), 4)
    goals = [goal_of(env).clone()]
    for _ in range(7):
        assert env.sim.mocap_pos[:, 0].equal(goal_of(env))
        env.step(no_action(env))
        goals.append(goal_of(env).clone())
    changed = [bool((a != b).all()) for a, b in pairwise(goals)]
    assert changed == [False, False, True, False, False, True, False]
    resumed = RobotEnv(Reach(episode_seconds=0.12), 4, seed=1)
    resumed.load_state(env.state())
    assert resumed.sim.mocap_pos[:, 0].equal(goals[-1])
    env.reset()
    assert not goal_of(env).equal(goals[-1])
    assert env.sim.mocap_pos[:, 0].equal(goal_of(env))


def test_a_controller_with_the_jacobian_reaches_all_goals():
    env = RobotEnv(Reach(), 32)
    model, jacobian = env.sim.model, np.zeros((3, 6))
    data = mujoco.MjData(model)

    def towards_goal(env: RobotEnv) -> Tensor:
        to_goal, actions = (goal_of(env) - env.env_state.sensor("tool_pos")).numpy(), np.zeros((32, 6))
        for index in range(32):
            data.qpos[:] = env.sim.qpos[index].numpy()
            mujoco.mj_forward(model, data)
            mujoco.mj_jacSite(model, data, jacobian, None, model.site("tool").id)
            actions[index] = np.linalg.lstsq(jacobian, 0.3 * to_goal[index], rcond=0.05)[0] / 0.05
        return torch.from_numpy(actions).float()

    step = run(env, towards_goal, env.max_episode_steps)
    assert step.truncated.all()
    assert (step.log[:, env.log_names.index("measure/success")] == 1.0).all()


# Rewards and metrics


def test_rewards_equal_values_computed_by_hand():
    task = Reach()
    env = RobotEnv(task, 2)
    state = env.state()
    state["task_state/distance"][:] = torch.tensor([[0.0, 1.0], [0.3, 1.0]])
    state["sim/qvel"][:] = 0.0
    state["sim/qvel"][1, :2] = torch.tensor([1.0, -2.0])
    state["action"][:] = 0.5
    state["last_action"][:] = torch.tensor([[0.5], [-0.5]])
    env.load_state(state)
    terms = task.reward(env.env_state, torch.zeros(2, dtype=torch.bool))
    assert terms["distance"].tolist() == pytest.approx([0.5, 0.5 * (1.0 - math.tanh(1.0))])
    assert terms["fine_distance"].tolist() == pytest.approx([1.0, 1.0 - math.tanh(6.0)], abs=1e-6)
    assert terms["action_rate"].tolist() == pytest.approx([0.0, -0.06])
    assert terms["joint_vel"].tolist() == pytest.approx([0.0, -0.05])


def test_only_the_time_limit_ends_an_episode():
    env, generator = RobotEnv(Reach(episode_seconds=1.0), 16), torch.Generator().manual_seed(0)
    for count in range(1, 76):
        step = env.step(3.0 * torch.randn(16, 6, generator=generator))
        assert not step.terminated.any()
        assert step.truncated.all() == (count % 25 == 0)
        assert step.obs["critic"].isfinite().all()
    assert not env.faults().any()


def test_the_log_has_distance_and_success_at_the_end_of_episodes():
    """A large tolerance makes both successes and failures."""
    env = RobotEnv(Reach(success_distance=0.3, episode_seconds=0.4), 64)
    success, final = (env.log_names.index(f"measure/{name}") for name in ("success", "final_distance"))
    for _ in range(2):
        step = run(env, lambda env: torch.ones(64, 6), 10)
        distance = env.env_state.task_state["distance"][:, 0]
        torch.testing.assert_close(distance, step.final_obs["policy"][:, 18:].norm(dim=1))
        torch.testing.assert_close(step.log[:, final], distance, rtol=0.0, atol=1e-5)
        reached = (distance <= 0.3).float()
        assert 0.1 < reached.mean() < 0.9
        torch.testing.assert_close(step.log[:, success], reached, rtol=0.0, atol=1e-5)


# A run


def test_the_result_of_a_run_has_the_fraction_of_successful_episodes(tmp_path: Path):
    settings = PpoSettings(horizon=8, epochs=1, minibatches=2, hidden=(16,))
    options = {"episode_seconds": 0.2, "observe_goal": False}
    config = TrainConfig("reach", options, settings=asdict(settings), num_envs=8, max_iterations=2)
    result = train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    assert set(result["measures"]) == {"success", "final_distance"}
    assert 0.05 < result["measures"]["final_distance"] < 1.0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["measures"] == result["measures"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"action_scale": 0.0}, r"--env\.action-scale 0 must be above 0"),
        ({"goal_x": (0.6, 0.4)}, r"--env\.goal-x 0\.6 0\.4 must be a minimum and a maximum"),
        ({"rewards": ReachRewards(distance=math.nan)}, r"--env\.rewards\.distance nan must be between"),
    ],
)
def test_an_invalid_option_is_rejected(option: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(Reach(), **option)
