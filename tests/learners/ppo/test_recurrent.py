"""Native PPO with recurrent networks."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.env.host_syncs import DetectSyncs
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState, Task
from paceline.env.vec_env import Step
from paceline.learners.networks import PolicyRunner
from paceline.learners.ppo.recurrent import RecurrentPpo, make_ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.cartpole_camera import CartpoleCamera
from tests.cameras.small import SMALL_CAMERA, SMALL_ENCODER

SHORT = Cartpole(episode_seconds=0.1)
"""Episodes of 6 steps, so that they end inside sequences and between them."""
SMALL = PpoSettings(
    horizon=8, epochs=2, minibatches=2, hidden=(16,), rnn_type="gru", rnn_hidden_size=12, rnn_layers=2, **SMALL_ENCODER
)


class PositionsOnly(Cartpole):
    """Cartpole whose velocities are hidden: they follow only from several observations."""

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {"policy": state.qpos.clone()}

    def observation_parts(self, model: Any) -> dict[str, Any]:
        return {}


def make(task: Task = SHORT, num_envs: int = 6, first_env: int = 0, seed: int = 3, **changes: Any) -> RecurrentPpo:
    config = dataclasses.replace(SMALL, **changes)
    learner = make_ppo(RobotEnv(task, num_envs, seed=seed, first_env=first_env), config, seed)
    assert isinstance(learner, RecurrentPpo)
    return learner


@pytest.mark.parametrize("task", [SHORT, CartpoleCamera(episode_seconds=0.1, camera=SMALL_CAMERA)])
@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_sequences_give_the_actions_of_the_rollout(rnn_type: str, task: Task):
    """Without a change of the networks, the distributions of an update are those of the rollout: states at the start of
    sequences, and their resets inside, are the same."""
    learner = make(task, rnn_type=rnn_type, desired_kl=0.0, learning_rate=1e-2)
    for _ in range(8):
        assert learner.learn()["episodes"] > 0
    assert learner.learn()["policy/kl"] > 1e-5
    learner.set_learning_rate(1e-12)
    assert learner.learn()["policy/kl"] < 1e-9


def test_the_policy_acts_as_in_the_rollout():
    trained, learner = make(), make()
    trained.learn()
    learner.load_policy(trained.state())
    runner, found = PolicyRunner(learner.policy(), 6), learner.collect()
    for obs, mean, done in zip(found.obs["policy"], found.output, found.done, strict=False):
        torch.testing.assert_close(runner.act({"policy": obs}), mean, rtol=1e-4, atol=1e-6)
        runner.reset(done)
    assert found.done.any()


def test_a_time_limit_is_bootstrapped_with_the_state_before_the_reset():
    learner = make(gae_lambda=0.0, normalize_observations=False)
    rollout = learner.collect()
    with torch.no_grad():
        target = learner.make_samples(rollout).value_target
        state, end = torch.zeros(6, *learner.critic.state_shape), 5
        assert bool(rollout.truncated[end].all())
        inputs = torch.cat((rollout.obs["policy"][: end + 1], rollout.final_obs["policy"][end : end + 1]))
        final_value = learner.critic(inputs, state)[0][-1].squeeze(-1)
    torch.testing.assert_close(target[end], rollout.reward[end] + learner.config.discount * final_value)


def test_any_number_of_ranks_resumes_from_the_states_of_all_envs():
    whole = make()
    whole.learn()
    saved = whole.state()
    name = "learner/rnn_state"
    assert saved["envs"][name].abs().max() > 0.0
    expected = whole.collect()
    for envs in (range(2), range(2, 6)):
        shard = {key: part[envs.start : envs.stop] if part.dim() else part for key, part in saved["envs"].items()}
        part = make(num_envs=len(envs), first_env=envs.start)
        part.load_state(saved | {"envs": shard})
        torch.testing.assert_close(part.collect().output, expected.output[:, envs.start : envs.stop])


def test_a_resumed_learner_continues_bit_by_bit():
    learner, resumed = make(), make()
    learner.learn()
    resumed.load_state(learner.state())
    for _ in range(2):
        learner.learn()
        resumed.learn()
    torch.testing.assert_close(resumed.state(), learner.state(), rtol=0, atol=0)


def test_an_env_that_starts_a_new_episode_on_resume_has_no_state():
    learner, resumed = make(), make()
    learner.learn()
    state = learner.state()
    state["envs"]["episode_step"][2] = 0
    resumed.load_state(state)
    found = resumed.state()["envs"]["learner/rnn_state"]
    assert not found[2].any()
    assert torch.equal(found[3], state["envs"]["learner/rnn_state"][3])


def test_rollout_and_update_have_no_host_sync():
    learner = make()
    learner.learn()
    with DetectSyncs(pytest.fail):
        learner.rollout = learner.collect()
        learner.update()


def test_the_update_of_a_gpu_equals_that_of_a_cpu():
    """Compare padded samples with others."""
    on_gpu, on_cpu = (
        RecurrentPpo(RobotEnv(SHORT, 6, seed=3), SMALL, 3, gpu_update=gpu_update) for gpu_update in (True, False)
    )
    for _ in range(2):
        found, expected = on_gpu.learn(), on_cpu.learn()
        for name in found:
            if not name.startswith("seconds/"):
                assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


def test_a_recurrent_policy_learns_what_one_without_memory_cannot():
    settings = PpoSettings(horizon=32, epochs=4, hidden=(32, 32), entropy_weight=0.0, rnn_hidden_size=32)
    lengths = dict[str, float]()
    for rnn_type in ("none", "gru"):
        learner = make_ppo(RobotEnv(PositionsOnly(), 128, seed=3), dataclasses.replace(settings, rnn_type=rnn_type), 3)
        last = [learner.learn() for _ in range(45)][-10:]
        lengths[rnn_type] = sum(each["length"] for each in last) / sum(each["episodes"] for each in last)
    assert lengths["gru"] > 200.0 > 150.0 > lengths["none"], lengths


def test_a_stop_in_a_rollout_saves_states_that_belong_to_the_envs():
    whole, stopped = make(normalize_observations=False), make(normalize_observations=False)
    obs, step, calls = whole.collect().obs["policy"], stopped.env.step, iter(range(3))

    def step_or_stop(actions: Tensor) -> Step:
        if next(calls, None) is None:
            raise InterruptedError
        return step(actions)

    stopped.env.step = step_or_stop
    with pytest.raises(InterruptedError):
        stopped.collect()
    found = stopped.state()["envs"]["learner/rnn_state"]
    with torch.no_grad():
        networks = (whole.actor, whole.critic)
        expected = [network(obs[:3], torch.zeros(6, *network.state_shape))[1] for network in networks]
    torch.testing.assert_close(found, torch.stack(expected, dim=1))
