"""RL-Games with recurrent networks."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState, Task
from paceline.errors import UserError
from paceline.learners.rl_games.learner import RlGames
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.cartpole_camera import CartpoleCamera
from tests.cameras.small import SMALL_CAMERA

SMALL = RlGamesSettings(
    horizon_length=8, minibatch_size_per_env=4, mini_epochs=2, units=(16,), rnn_name="lstm", rnn_units=12
)


class Asymmetric(Cartpole):
    """Cartpole whose velocities only the critic observes."""

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {"policy": state.qpos.clone(), "critic": torch.cat((state.qpos, state.qvel), dim=1)}

    def observation_parts(self, model: Any) -> dict[str, Any]:
        return {}


def make(task: Task | None = None, **changes: Any) -> RlGames:
    env = RobotEnv(task or Cartpole(episode_seconds=0.1), 6, seed=1)
    return RlGames(env, dataclasses.replace(SMALL, **changes), 0, Group(Rank()))


def test_a_resumed_run_equals_an_uninterrupted_one():
    task, names = Asymmetric(episode_seconds=0.1), {"central_value_rnn_name": "lstm", "rnn_before_mlp": True}
    learner, resumed = make(task, **names), make(task, **names)
    learner.learn()
    saved = learner.state()
    assert {"learner/rnn_state", "learner/central_rnn_state"} < saved["envs"].keys()
    resumed.load_state(saved)
    for _ in range(2):
        learner.learn()
        resumed.learn()
    torch.testing.assert_close(resumed.state(), learner.state(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rnn_before_mlp": True},
        {"rnn_before_mlp": True, "rnn_layer_norm": True, "rnn_name": "gru", "rnn_layers": 2},
        {"rnn_concat_input": True},
        {"separate": True, "rnn_layer_norm": True},
        {"separate": True, "rnn_name": "gru", "normalize_input": False},
    ],
)
def test_the_policy_acts_as_the_agent_with_the_same_state(changes: dict[str, Any]):
    learner = make(**changes)
    for _ in range(2):
        learner.learn()
    policy, obs = learner.policy(), learner.env.observe()
    state = learner.state()["envs"]["learner/rnn_state"][:, : len(policy.state_names)]
    assert state.abs().max() > 0.0
    with torch.no_grad():
        expected = learner.agent.get_action_values({"obs": obs["policy"]})
        actions, after = policy.step(obs, state)
    torch.testing.assert_close(actions, expected["mus"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after[:, 0], expected["rnn_states"][0].transpose(0, 1), rtol=1e-4, atol=1e-6)


def test_sequences_give_the_actions_of_the_rollout():
    learner = make(lr_schedule="none", learning_rate=1e-2, normalize_input=False)
    for _ in range(3):
        assert learner.learn()["episodes"] > 0
    assert learner.learn()["policy/kl"] > 1e-4
    learner.set_learning_rate(1e-12)
    # RL-Games adds small numbers, which give equal distributions of one action this divergence.
    assert learner.learn()["policy/kl"] == pytest.approx(5e-6, abs=1e-7)


def test_what_recurrent_networks_cannot_do_is_refused():
    with pytest.raises(UserError, match=r"--rl-games.rnn-name lstm is not supported for a task with cameras"):
        make(CartpoleCamera(camera=SMALL_CAMERA))
    with pytest.raises(UserError, match=r"--rl-games.seq-length 24 does not divide a minibatch into several sequences"):
        dataclasses.replace(SMALL, horizon_length=24, minibatch_size_per_env=4, seq_length=24).check_samples(6)
    with pytest.raises(UserError, match=r"--rl-games.seq-length 3 must be at least 2 and divide .*horizon-length 8"):
        dataclasses.replace(SMALL, seq_length=3).check()
    with pytest.raises(UserError, match=r"--rl-games.central-value-rnn-name gru needs a recurrent policy: give"):
        dataclasses.replace(SMALL, rnn_name="none", central_value_rnn_name="gru").check_samples(6)
