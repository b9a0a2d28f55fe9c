"""The reward of a step depends on the command that the policy observed before the step."""

from typing import cast

import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState
from paceline.tasks import registry
from paceline.tasks.shadow_hand_repose import ShadowHandRepose
from paceline.tasks.velocity.velocity_task import VelocityTask

ENVS, STEPS = 16, 60
# A task with a camera has the commands of the task without it.
VELOCITY_TASKS = [
    name
    for name in registry.names()
    if issubclass(registry.find(name).task, VelocityTask) and not registry.find(name).task().cameras()
]


def commands(obs: dict[str, Tensor], task: VelocityTask) -> Tensor:
    """Return the command in an observation of the critic, which has no noise, [env, 3]."""
    sensed = 9 + 2 * task.num_actions
    return obs["critic"][:, sensed : sensed + 3]


def test_all_velocity_tasks_are_tested():
    assert VELOCITY_TASKS == ["g1-velocity", "go1-velocity", "go1-velocity-rough"]


@pytest.mark.parametrize("name", VELOCITY_TASKS)
def test_reward_metrics_and_last_observation_use_the_command_that_the_policy_observed(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    kind, used = cast("type[VelocityTask]", registry.find(name).task), list[Tensor]()
    reward = kind.reward

    def recording(task: VelocityTask, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        used.append(state.task_state["command"].clone())
        return reward(task, state, terminated)

    monkeypatch.setattr(kind, "reward", recording)
    # New commands every fifth step on average, and episodes that end on the way.
    task = kind(command_seconds=0.1, standing_fraction=0.0, episode_seconds=0.8)
    env = RobotEnv(task, ENVS)
    obs, changed = env.reset(), 0
    error = env.log_names.index("measure/turn_error")
    before = torch.zeros(ENVS)
    for _ in range(STEPS):
        command = commands(obs, task)
        step = env.step(torch.zeros(ENVS, env.num_actions))
        assert torch.equal(used[-1], command)
        assert torch.equal(commands(step.final_obs, task), command)
        turn_error = (step.final_obs["critic"][:, 5] - command[:, 2]).abs()
        total = step.log[:, error] * step.log[:, 0]
        torch.testing.assert_close(total - before, turn_error, atol=1e-4, rtol=1e-4)
        done = step.terminated | step.truncated
        changed += int(((commands(step.obs, task) != command).any(1) & ~done).sum())
        before, obs = total.masked_fill(done, 0.0), step.obs
    assert changed > ENVS * STEPS / 10


def test_the_last_observation_of_a_hand_shows_the_goal_that_was_reached():
    env = RobotEnv(ShadowHandRepose(success_tolerance=2.5), 32)
    goal = env.reset()["critic"][:, 64:68]
    changed = 0
    for _ in range(10):
        step = env.step(torch.zeros(32, env.num_actions))
        assert torch.equal(step.final_obs["critic"][:, 64:68], goal)
        goes_on = ~(step.terminated | step.truncated)
        changed += int(((step.obs["critic"][:, 64:68] != goal).any(1) & goes_on).sum())
        goal = step.obs["critic"][:, 64:68]
    assert changed > 16
