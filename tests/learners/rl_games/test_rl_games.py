"""RL-Games: resume, ranks, time limits and the deployed policy."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import Step, TensorSpec, VecEnv
from paceline.errors import UserError
from paceline.learners.rl_games.learner import RlGames
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.tasks.cartpole import Cartpole
from tests.distributed.ranks import on_ranks

SMALL = RlGamesSettings(horizon_length=8, minibatch_size_per_env=4, mini_epochs=3, units=(16, 16), kl_threshold=0.003)


class Hidden:
    """Env whose episodes last one step. The critic observes the reward of the next step, the policy does not."""

    num_actions, max_episode_steps, device = 2, 1, torch.device("cpu")
    log_names: tuple[str, ...] = ("length", "return")
    step_seconds, capturable = 0.02, False

    def __init__(self, envs: range = range(10), truncates: bool = False) -> None:
        self.num_envs, self.first_env, self._truncates = len(envs), envs.start, truncates
        self.observation_spec = {"policy": TensorSpec((3,)), "critic": TensorSpec((4,))}
        self._env_index, self._step = torch.tensor(envs), torch.zeros((), dtype=torch.int64)

    def observe(self) -> dict[str, Tensor]:
        next_reward = torch.cos(self._env_index + 7.0 * self._step).unsqueeze(1)
        constant = torch.ones(self.num_envs, 3)
        return {"policy": constant, "critic": torch.cat((constant, next_reward), dim=1)}

    def reset(self) -> dict[str, Tensor]:
        return self.observe()

    def step(self, actions: Tensor) -> Step:
        reward = self.observe()["critic"][:, 3].clone()
        self._step += 1
        truncated = torch.full((self.num_envs,), self._truncates)
        return Step(
            self.observe(),
            reward,
            ~truncated,
            truncated,
            self.observe(),
            torch.stack((torch.ones_like(reward), reward), dim=1),
        )

    def prefetch_random(self, steps: int) -> None: ...

    def faults(self) -> Tensor:
        return torch.zeros(2)

    def state(self) -> dict[str, Tensor]:
        return {"step": self._step.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._step.copy_(state["step"])


def cartpole(envs: range = range(6)) -> RobotEnv:
    return RobotEnv(Cartpole(episode_seconds=0.4), len(envs), seed=3, first_env=envs.start)


def make(env: VecEnv | None = None, **changes: Any) -> RlGames:
    return RlGames(env or cartpole(), dataclasses.replace(SMALL, **changes), 3, Group(Rank()))


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Flatten a nested dict; keys are joined by dots."""
    if not isinstance(state, dict):
        return {name: state}
    return {key: leaf for part, inner in state.items() for key, leaf in flat(inner, f"{name}.{part}").items()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare two states bit by bit."""
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, f"{name}: {value} and {other[name]}"


@pytest.mark.parametrize("env", [cartpole, Hidden])
@pytest.mark.parametrize("changes", [{}, {"lr_schedule": "linear", "max_epochs": 8}], ids=["adaptive", "linear"])
def test_a_resumed_run_equals_an_uninterrupted_one(env: Callable[[], VecEnv], changes: dict[str, Any]):
    whole, first, second = (make(env(), **changes) for _ in range(3))
    for _ in range(6):
        whole.learn()
    for _ in range(3):
        first.learn()
    assert first.state()["optimizers"]["model"]["learning_rate"] != [SMALL.learning_rate]
    second.load_state(first.state())
    for _ in range(3):
        second.learn()
    assert_same(whole.state(), second.state())


def test_the_linear_schedule_requires_max_epochs():
    with pytest.raises(UserError, match="max-epochs"):
        dataclasses.replace(SMALL, lr_schedule="linear").check()


def test_the_policy_maps_raw_observations_to_the_mean_action():
    for learner in (make(), make(normalize_input=False), make(separate=True)):
        for _ in range(3):
            learner.learn()
        # Large enough for the normalizer to clamp.
        obs = 100.0 * torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
        expected = learner.agent.get_action_values({"obs": obs})["mus"]
        policy = learner.policy()
        assert torch.equal(policy({"policy": obs}), expected)
        traced: Any = torch.jit.trace(policy, ({"policy": obs[:2]},))
        assert torch.equal(traced({"policy": obs}), expected)


def test_nothing_is_written_to_disk_and_nothing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make(Hidden()).learn()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_reward_scale_does_not_change_the_reported_return():
    plain, scaled = make(reward_scale=1.0), make(reward_scale=0.25)
    metrics = plain.learn(), scaled.learn()
    rewards = [learner.agent.experience_buffer.tensor_dict["rewards"] for learner in (plain, scaled)]
    assert torch.equal(0.25 * rewards[0], rewards[1])
    assert metrics[0]["return"] == metrics[1]["return"]


def test_value_bootstrap_adds_the_value_at_a_time_limit():
    for truncates, bootstraps in ((True, True), (True, False), (False, True)):
        learner = make(Hidden(truncates=truncates), value_bootstrap=bootstraps)
        for _ in range(2):
            learner.learn()
        buffer = learner.agent.experience_buffer.tensor_dict
        bootstrapped = SMALL.gamma * buffer["values"] if truncates and bootstraps else 0.0
        assert torch.equal(buffer["rewards"], buffer["states"][..., 3:] + bootstrapped)


def test_the_critic_may_see_more_than_the_policy():
    env = Hidden()
    learner = make(env, lr_schedule="none", learning_rate=3e-3)
    metrics = [learner.learn() for _ in range(25)][-1]
    states = env.observe()["critic"]
    torch.testing.assert_close(learner.agent.get_central_value({"states": states}), states[:, 3:], atol=0.1, rtol=0.0)
    assert metrics["loss/value"] < 0.02
    assert learner.policy()({"policy": torch.ones(4, 3)}).shape == (4, 2)


RUNS: dict[str, tuple[Callable[[range], VecEnv], dict[str, Any]]] = {
    "standard": (cartpole, {"schedule_type": "standard"}),
    "legacy": (cartpole, {"schedule_type": "legacy"}),
    "central value": (Hidden, {}),
}
ENVS = (range(4), range(4, 10))
ITERATIONS = 20


def learn_as_rank() -> dict[str, Any]:
    """Return the state, learning rate and samples of each iteration of each run."""
    torch.set_num_threads(1)
    rank, found = this_rank(()), {}
    group = Group(rank)
    for run, (env, changes) in RUNS.items():
        learner, found[run] = RlGames(env(ENVS[rank.index]), dataclasses.replace(SMALL, **changes), 3, group), []
        for _ in range(ITERATIONS):
            before = group.collectives
            learner.learn()
            agent = learner.agent
            found[run].append(
                {
                    "state": {name: part for name, part in learner.state().items() if name != "envs"},
                    "rate": agent.last_lr,
                    "obs": agent.experience_buffer.tensor_dict["obses"].flatten(0, 1).clone(),
                    "advantages": agent.dataset.values_dict["advantages"].clone(),
                    "collectives": group.collectives - before,
                }
            )
    group.close()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(2, learn_as_rank)


@pytest.mark.parametrize("run", RUNS)
def test_ranks_stay_bit_identical(ranks: list[dict[str, Any]], run: str):
    for one, other in zip(*(rank[run] for rank in ranks), strict=True):
        assert_same(one["state"], other["state"])
        assert one["rate"] == other["rate"]
    # The schedule must have changed the learning rate.
    assert len({one["rate"] for one in ranks[0][run]}) > 1


def test_normalizers_and_advantages_are_those_of_all_samples(ranks: list[dict[str, Any]]):
    first = [rank["standard"][0] for rank in ranks]
    obs, advantages = (torch.cat([one[name] for one in first]).double() for name in ("obs", "advantages"))
    network, count = first[0]["state"]["networks"]["model"], len(obs)
    assert network["running_mean_std.count"] == 1 + count == 1 + SMALL.horizon_length * 10
    assert network["value_mean_std.count"] == 1 + 2 * count
    # RL-Games starts with a count of one row, with mean 0 and variance 1.
    mean = obs.sum(0) / (1 + count)
    variance = (1.0 + obs.square().sum(0)) / (1 + count) - mean.square()
    torch.testing.assert_close(network["running_mean_std.running_mean"], mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(network["running_mean_std.running_var"], variance, rtol=1e-5, atol=1e-6)
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std()) == pytest.approx(1.0, rel=1e-5)
    assert abs(float(first[0]["advantages"].mean())) > 1e-3


def test_there_is_one_collective_per_minibatch_one_before_them_and_one_to_report(ranks: list[dict[str, Any]]):
    minibatches = SMALL.mini_epochs * SMALL.minibatches
    for run, networks in (("standard", 1), ("legacy", 1), ("central value", 2)):
        assert [one["collectives"] for rank in ranks for one in rank[run]] == [
            networks * minibatches + 2
        ] * 2 * ITERATIONS
