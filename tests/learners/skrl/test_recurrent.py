"""skrl on torch with recurrent networks."""

import dataclasses
from typing import Any, cast

import pytest
import torch

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv
from paceline.env.task import Task
from paceline.errors import UserError
from paceline.learners.recurrent import RecurrentNetwork
from paceline.learners.skrl.settings import SkrlSettings
from paceline.learners.skrl.torch_learner import SkrlTorch
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.cartpole_camera import CartpoleCamera
from tests.cameras.small import SMALL_CAMERA
from tests.learners.rl_games.test_recurrent import Asymmetric
from tests.learners.skrl.test_torch_learner import Truncating

SMALL = SkrlSettings(
    rollouts=8, mini_batches=2, learning_epochs=2, layers=(16,), rnn_type="lstm", rnn_hidden_size=12, sequence_length=4
)
PARTS = "[{name: mlp, layers: [16], activations: elu}, {name: gru, input: mlp, type: GRU, layers: [12]}]"


def make(task: Task | None = None, **changes: Any) -> SkrlTorch:
    env = RobotEnv(task or Cartpole(episode_seconds=0.1), 6, seed=1)
    return SkrlTorch(env, dataclasses.replace(SMALL, **changes), 0, Group(Rank()))


@pytest.mark.parametrize("separate", [True, False])
def test_a_resumed_run_equals_an_uninterrupted_one(separate: bool):
    learner, resumed = make(separate=separate), make(separate=separate)
    learner.learn()
    saved = learner.state()
    states = {"learner/policy_state"} | ({"learner/value_state"} if separate else set())
    assert {name for name in saved["envs"] if name.startswith("learner/")} == states
    resumed.load_state(saved)
    for _ in range(2):
        learner.learn()
        resumed.learn()
    torch.testing.assert_close(resumed.state(), learner.state(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rnn_type": "gru", "rnn_layers": 2, "separate": False},
        {"rnn_type": "none", "network": PARTS},
        {"rnn_type": "none", "network": PARTS, "separate": False, "observation_normalization": False},
        {"mixed_precision": True},
    ],
)
def test_the_policy_acts_as_the_agent_with_the_same_state(changes: dict[str, Any]):
    learner = make(**changes)
    for _ in range(2):
        learner.learn()
    policy, obs = learner.policy(), learner.env.observe()
    state = learner.state()["envs"]["learner/policy_state"]
    assert state.abs().max() > 0.0
    with torch.no_grad():
        _, outputs = learner.agent.act(obs["policy"], None, timestep=0, timesteps=0)
    actions, after = policy.step(obs, state)
    tolerance = 1e-2 if changes.get("mixed_precision") else 1e-5
    torch.testing.assert_close(actions, outputs["mean_actions"], rtol=tolerance, atol=tolerance)
    assert after.shape == state.shape
    assert not torch.equal(after, state)


@pytest.mark.parametrize("sequence_length", [None, 2])
def test_sequences_give_the_actions_and_values_of_the_rollout(sequence_length: int | None):
    learner = make(
        learning_rate_scheduler="none",
        learning_rate=1e-2,
        observation_normalization=False,
        value_clip=0.0,
        value_normalization=False,
        sequence_length=sequence_length,
    )
    for _ in range(3):
        assert learner.learn()["episodes"] > 0
    assert learner.learn()["policy/kl"] > 1e-4
    learner.set_learning_rate(1e-12)
    assert learner.learn()["policy/kl"] == pytest.approx(0.0, abs=1e-7)
    # The returns are values plus advantages, so the value loss of unchanged values is that of the advantages.
    memory = learner.agent.memory.tensors
    expected = (memory["returns"] - memory["values"]).square().mean()
    loss = learner.agent.tracking_data["Loss / Value loss"]
    assert loss == pytest.approx([learner.config.value_loss_scale * float(expected)], rel=1e-4)


def test_the_critic_has_its_own_recurrent_layer():
    learner = make(Asymmetric(episode_seconds=0.1))
    learner.learn()
    networks = learner.state()["networks"]
    assert networks["policy.recurrent.rnn.weight_ih_l0"].shape == (48, 2)
    assert networks["value.recurrent.rnn.weight_ih_l0"].shape == (48, 4)


def test_the_value_of_a_final_observation_uses_the_state_after_the_step():
    env = Truncating()
    config = dataclasses.replace(SMALL, value_normalization=False, observation_normalization=False)
    learner = SkrlTorch(env, config, 0, Group(Rank()))
    learner.learn()
    obs, state, value = (
        env.observe()["critic"],
        learner.state()["envs"]["learner/value_state"],
        cast("Any", learner.agent.value),
    )
    network, truncations = RecurrentNetwork(value.recurrent.rnn, value.network), 0
    env.steps.clear()
    learner.collect()
    for step, found in zip(env.steps, learner.agent.memory.tensors["rewards"].squeeze(2), strict=True):
        with torch.no_grad():
            _, state = network.step(obs, state)
            final_value, _ = network.step(step.final_obs["critic"], state)
        bonus = torch.where(step.truncated, config.discount_factor * final_value.squeeze(1), 0.0)
        torch.testing.assert_close(found, step.reward + bonus)
        state, obs = state * ~step.truncated.view(-1, 1, 1, 1), step.obs["critic"]
        truncations += int(step.truncated.sum())
    assert truncations > 0
    torch.testing.assert_close(learner.state()["envs"]["learner/value_state"], state)


def test_a_recurrent_policy_observes_images():
    learner = make(CartpoleCamera(camera=SMALL_CAMERA), image_channels=(8,), image_kernels=(4,), image_strides=(4,))
    learner.learn()
    policy, obs = learner.policy(), learner.env.observe()
    with torch.no_grad():
        _, outputs = learner.agent.act(*learner.inputs(obs), timestep=0, timesteps=0)
    actions, _ = policy.step(obs, learner.state()["envs"]["learner/policy_state"])
    torch.testing.assert_close(actions, outputs["mean_actions"], rtol=1e-4, atol=1e-5)


def test_what_recurrent_networks_cannot_do_is_refused():
    with pytest.raises(
        UserError, match=r"--skrl.mini-batches 7 is more than 6 sequences of 8 steps, which a rank with 6 envs"
    ):
        dataclasses.replace(SMALL, sequence_length=None, mini_batches=7).check_samples(6)
    with pytest.raises(UserError, match=r"--skrl.sequence-length 3 must divide --skrl.rollouts 8"):
        dataclasses.replace(SMALL, sequence_length=3).check()
    with pytest.raises(UserError, match=r"--skrl.rnn-type lstm with a recurrent part in --skrl.network: use only one"):
        dataclasses.replace(SMALL, network=PARTS).check()
    with pytest.raises(UserError, match=r"part 'a' of a network is recurrent: Paceline supports it only as the"):
        SkrlSettings(network="[{name: a, type: GRU, layers: [8]}, {name: b, input: a, layers: [8]}]").check()
