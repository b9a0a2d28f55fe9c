"""skrl on torch: time limits, ranks, resume and the deployed policy."""

import dataclasses
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import Step, TensorSpec
from paceline.learners.skrl.settings import SkrlSettings
from paceline.learners.skrl.torch_learner import SkrlTorch
from paceline.tasks.cartpole import Cartpole
from tests.distributed.ranks import free_port, on_ranks, variables

SMALL = SkrlSettings(rollouts=8, learning_epochs=2, mini_batches=4, layers=(16, 16), entropy_loss_scale=0.01)


class Truncating:
    """Env that truncates all episodes every third step, far from the start. The critic has two more observations."""

    first_env, num_actions, max_episode_steps, device = 0, 2, 3, torch.device("cpu")
    log_names: tuple[str, ...] = ("length", "return")
    step_seconds, capturable = 0.02, False

    def __init__(self, num_envs: int = 6, first_env: int = 0) -> None:
        self.num_envs, self.first_env = num_envs, first_env
        self.steps: list[Step] = []
        self.observation_spec = {"policy": TensorSpec((2,)), "critic": TensorSpec((4,))}
        self._step = torch.zeros((), dtype=torch.int64)

    def _obs(self, place: int) -> dict[str, Tensor]:
        env_index = torch.arange(self.first_env, self.first_env + self.num_envs, dtype=torch.float32)
        policy = torch.stack((env_index, torch.full_like(env_index, place)), dim=1)
        return {"policy": policy, "critic": torch.cat((policy, -policy), dim=1)}

    def observe(self) -> dict[str, Tensor]:
        return self._obs(int(self._step) % self.max_episode_steps)

    def reset(self) -> dict[str, Tensor]:
        return self._obs(0)

    def step(self, actions: Tensor) -> Step:
        self._step += 1
        place = int(self._step) % self.max_episode_steps
        truncated = torch.full((self.num_envs,), place == 0)
        final = self._obs(20 if place == 0 else place)
        reward, log = -actions.square().sum(1), torch.zeros(self.num_envs, 2)
        self.steps.append(Step(self._obs(place), reward, torch.zeros_like(truncated), truncated, final, log))
        return self.steps[-1]

    def prefetch_random(self, steps: int) -> None: ...

    def faults(self) -> Tensor:
        return torch.zeros(2)

    def state(self) -> dict[str, Tensor]:
        return {"step": self._step.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._step.copy_(state["step"])


def cartpole(config: SkrlSettings = SMALL) -> SkrlTorch:
    return SkrlTorch(RobotEnv(Cartpole(episode_seconds=0.2), 6, seed=3), config, 3, Group(Rank()))


def truncating(config: SkrlSettings = SMALL) -> tuple[SkrlTorch, Truncating]:
    env = Truncating()
    return SkrlTorch(env, config, 3, Group(Rank())), env


def leaves(state: Any, name: str = "") -> dict[str, Any]:
    """Flatten a nested dict."""
    if not isinstance(state, dict):
        return {name: state}
    assert all(isinstance(key, str) for key in state)
    return {path: leaf for key, part in state.items() for path, leaf in leaves(part, f"{name}/{key}").items()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


def value_of(learner: SkrlTorch, obs: dict[str, Tensor]) -> Tensor:
    """Compute the value from the saved state, without skrl."""
    found = learner.state()["networks"]

    def scale(kind: str) -> tuple[Tensor, Tensor]:
        return found[f"{kind}_preprocessor.running_mean"].float(), found[
            f"{kind}_preprocessor.running_variance"
        ].float().sqrt()

    mean, std = scale("state")
    x = ((obs["critic"] - mean) / std).clamp(-5.0, 5.0)
    layers = [name.removesuffix("weight") for name in found if name.startswith("value") and name.endswith("weight")]
    for layer in layers:
        x = x @ found[f"{layer}weight"].T + found[f"{layer}bias"]
        x = x if layer == layers[-1] else torch.nn.functional.elu(x)
    mean, std = scale("value")
    return (x.clamp(-5.0, 5.0) * std + mean).squeeze(1)


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_truncated_episode_is_bootstrapped_from_its_final_observation(scale: float):
    learner, env = truncating(dataclasses.replace(SMALL, rewards_shaper_scale=scale))
    learner.learn()
    env.steps.clear()
    learner.collect()
    rewards = learner.agent.memory.tensors["rewards"].squeeze(2)
    for step, found in zip(env.steps, rewards, strict=True):
        final_value = learner.config.discount_factor * value_of(learner, step.final_obs)
        torch.testing.assert_close(found, step.reward * scale + torch.where(step.truncated, final_value, 0.0))
        if step.truncated.any():
            assert (value_of(learner, step.obs) - value_of(learner, step.final_obs)).abs().min() > 1e-3


def test_without_bootstrap_a_truncated_episode_counts_as_terminated():
    learner, env = truncating(dataclasses.replace(SMALL, time_limit_bootstrap=False))
    learner.collect()
    memory = learner.agent.memory.tensors
    for step, reward, ended in zip(env.steps, memory["rewards"], memory["terminated"], strict=True):
        assert torch.equal(reward.squeeze(1), step.reward)
        assert torch.equal(ended.squeeze(1), step.truncated)


def test_tensors_of_the_env_are_not_modified():
    learner, env = truncating()
    env_step, before = env.step, []

    def step(actions: Tensor) -> Step:
        result = env_step(actions)
        before.append((result.reward.clone(), result.obs["policy"].clone(), result.final_obs["critic"].clone()))
        return result

    env.step = step
    learner.learn()
    after = [(result.reward, result.obs["policy"], result.final_obs["critic"]) for result in env.steps]
    assert any(result.truncated.any() for result in env.steps)
    assert all(torch.equal(a, b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))


def test_the_critic_uses_its_own_observation_group():
    learner, _ = truncating()
    learner.learn()
    found = learner.state()["networks"]
    assert found["policy.network.0.weight"].shape[1] == len(found["observation_preprocessor.running_mean"]) == 2
    assert found["value.network.0.weight"].shape[1] == len(found["state_preprocessor.running_mean"]) == 4
    assert "state_preprocessor.running_mean" not in cartpole().state()["networks"]


def test_advantages_have_mean_0_and_standard_deviation_1():
    learner = cartpole()
    learner.learn()
    advantages = learner.agent.memory.tensors["advantages"]
    assert advantages.mean().abs() < 1e-6
    assert advantages.std() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_resumed_run_equals_an_uninterrupted_one(normalizes: bool):
    config = dataclasses.replace(SMALL, observation_normalization=normalizes, value_normalization=normalizes)
    whole, first, second = cartpole(config), cartpole(config), cartpole(config)
    for _ in range(6):
        whole.learn()
    for _ in range(3):
        first.learn()
    second.load_state(first.state())
    for _ in range(3):
        second.learn()
    assert_same(second.state(), whole.state())
    assert whole.state()["optimizer"]["learning_rate"] != [config.learning_rate]


def test_the_policy_is_the_mean_action_for_raw_observations():
    learner = cartpole()
    for _ in range(3):
        learner.learn()
    # The scaler clips the last row.
    obs = torch.cat((torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.full((1, 4), 1e3)))
    with torch.no_grad():
        _, outputs = learner.agent.act(obs, None, timestep=0, timesteps=0)
    policy = learner.policy()
    groups = {"policy": obs}
    torch.testing.assert_close(policy(groups), outputs["mean_actions"])
    traced: Any = torch.jit.trace(policy, ({"policy": obs[:3]},))
    torch.testing.assert_close(traced(groups), policy(groups))
    fresh = cartpole()
    fresh.load_policy(learner.state())
    assert torch.equal(fresh.policy()(groups), policy(groups))


def test_the_learning_rate_stays_without_a_scheduler():
    learner = cartpole(dataclasses.replace(SMALL, learning_rate_scheduler="none"))
    found = [learner.learn() for _ in range(3)]
    assert [metrics["policy/learning_rate"] for metrics in found] == [SMALL.learning_rate] * 3
    assert all(metrics["policy/kl"] > 0.0 for metrics in found)


def test_a_learner_without_normalizers_rejects_a_state_with_normalizers():
    other = dataclasses.replace(SMALL, observation_normalization=False)
    for load in (cartpole(other).load_state, cartpole(other).load_policy):
        with pytest.raises(RuntimeError, match=r"observation_preprocessor\.running_mean"):
            load(cartpole().state())


def test_a_minibatch_may_be_one_sample():
    assert math.isfinite(cartpole(dataclasses.replace(SMALL, mini_batches=48)).learn()["loss/value"])


def test_nothing_is_printed_and_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    cartpole().learn()
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def learn_on_a_rank(num_envs: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    rank = this_rank(())
    group = Group(rank)
    # A learning rate so large that skrl alone would end an epoch early.
    config = dataclasses.replace(SMALL, learning_rate=5e-3, kl_threshold=1e-4, grad_norm_clip=100.0)

    def make() -> SkrlTorch:
        return SkrlTorch(Truncating(num_envs[rank.index], sum(num_envs[: rank.index])), config, 3, group)

    learner, resumed = make(), make()
    before = group.collectives
    learner.learn()
    collectives = group.collectives - before
    resumed.load_state(learner.state())
    for either in (learner, resumed):
        either.learn()
    assert_same(learner.state(), resumed.state())

    agent, state = learner.agent, learner.state()
    del state["envs"]
    advantages = agent.memory.tensors["advantages"].clone()
    for parameter in agent.networks.parameters():
        parameter.grad = torch.full_like(parameter, float(rank.index))
    learner.set_learning_rate(0.0)
    agent.optimizer.step()
    gradients = [float(g) for p in agent.networks.parameters() for g in (p.grad.min(), p.grad.max())]  # pyright: ignore[reportOptionalMemberAccess]
    group.close()
    return {
        "state": state,
        "advantages": advantages,
        "gradients": gradients,
        "collectives": collectives,
        "stop": agent.cfg.kl_threshold,
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Train on two ranks, with two and with four envs."""
    return on_ranks(2, learn_on_a_rank, [2, 4])


def test_ranks_end_with_the_same_networks_optimizer_and_learning_rate(ranks: list[dict[str, Any]]):
    assert_same(ranks[0]["state"], ranks[1]["state"])
    assert ranks[0]["state"]["optimizer"]["learning_rate"] != [5e-3]


def test_normalizers_have_seen_the_samples_of_all_ranks(ranks: list[dict[str, Any]]):
    found, samples = ranks[0]["state"]["networks"], 2 * SMALL.rollouts * 6
    # They start with a count of one; that of the values also includes the returns.
    counts = {"observation": samples, "state": samples, "value": 2 * samples}
    assert {name: int(found[f"{name}_preprocessor.current_count"]) - 1 for name in counts} == counts
    # The first column is the index of the env, from 0 to 5.
    assert float(found["observation_preprocessor.running_mean"][0]) == pytest.approx(2.5 * samples / (1 + samples))


def test_advantages_are_standardized_over_all_ranks(ranks: list[dict[str, Any]]):
    together = torch.cat([rank["advantages"] for rank in ranks], dim=1)
    assert together.mean().abs() < 1e-6
    assert together.std() == pytest.approx(1.0, abs=1e-5)
    assert ranks[0]["advantages"].mean().abs() > 1e-4


def test_gradients_are_weighted_by_the_number_of_samples(ranks: list[dict[str, Any]]):
    for rank in ranks:
        assert rank["gradients"] == pytest.approx([4 / 6] * len(rank["gradients"]))


def test_no_rank_ends_an_epoch_early(ranks: list[dict[str, Any]]):
    gradients, divergences = SMALL.learning_epochs * SMALL.mini_batches, SMALL.learning_epochs
    scalings, advantages, report = 2 * SMALL.mini_batches + 2, 1, 1
    expected = gradients + divergences + scalings + advantages + report
    assert [rank["collectives"] for rank in ranks] == [expected] * 2
    assert [rank["stop"] for rank in ranks] == [0.0] * 2


def test_importing_does_not_change_the_variables_of_a_launcher():
    launcher = variables(1, 2, free_port())
    code = """
        import os, torch, paceline.learners.skrl.torch_learner
        assert not torch.distributed.is_initialized()
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | launcher,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.stdout, ran.stderr) == ("1 2 1\n", "")
