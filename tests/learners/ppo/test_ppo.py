"""The native PPO: its parts against independent arithmetic, and the whole on a real task."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import Step, TensorSpec, VecEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.returns import advantages
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole import Cartpole

SMALL = PpoSettings(horizon=8, epochs=2, minibatches=4, hidden=(16, 16))


def make(num_envs: int = 6, config: PpoSettings = SMALL, seed: int = 3, first_env: int = 0) -> Ppo:
    return Ppo(RobotEnv(Cartpole(), num_envs, seed=seed, first_env=first_env), config, seed)


def test_advantages_equal_the_sum_of_discounted_surprises():
    generator = torch.Generator().manual_seed(0)
    steps, worlds, discount, decay = 7, 5, 0.9, 0.8
    reward, value, next_value = (torch.randn(steps, worlds, generator=generator) for _ in range(3))
    terminated = torch.rand(steps, worlds, generator=generator) < 0.2
    truncated = (torch.rand(steps, worlds, generator=generator) < 0.2) & ~terminated
    expected = torch.zeros(steps, worlds)
    for world in range(worlds):
        for start in range(steps):
            weight = 1.0
            for step in range(start, steps):
                beyond = 0.0 if terminated[step, world] else discount * float(next_value[step, world])
                expected[start, world] += weight * (float(reward[step, world]) + beyond - float(value[step, world]))
                if terminated[step, world] or truncated[step, world]:
                    break
                weight *= discount * decay
    found = advantages(reward, value, next_value, terminated, terminated | truncated, discount, decay)
    torch.testing.assert_close(found, expected)


def test_a_time_limit_is_bootstrapped_from_the_final_observation():
    learner = make(config=dataclasses.replace(SMALL, gae_lambda=0.0, normalize_observations=False))
    learner.learn()
    rollout = learner._collect()
    cut = torch.zeros_like(rollout.truncated)
    cut[2] = True
    ended = torch.zeros_like(cut)
    final = torch.randn_like(rollout.final_critic_obs)
    rollout = dataclasses.replace(rollout, truncated=cut, terminated=ended, final_critic_obs=final)
    with torch.inference_mode():
        samples = learner._samples(rollout)
    samples = samples.unflatten(0, (SMALL.horizon, learner.env.num_envs))
    target = samples[..., -3]
    with torch.no_grad():
        beyond = learner.critic(final[2]).squeeze(-1)
        onward = learner.critic(rollout.critic_obs[4]).squeeze(-1)
    torch.testing.assert_close(target[2], rollout.reward[2] + learner.config.discount * beyond)
    torch.testing.assert_close(target[3], rollout.reward[3] + learner.config.discount * onward)


def test_before_the_first_step_the_policy_is_the_one_that_acted():
    learner = make()
    for _ in range(3):
        learner.learn()
    rollout = learner._collect()
    with torch.inference_mode():
        minibatch = learner._samples(rollout)
        mean = learner.actor(minibatch[:, :4])
    torch.testing.assert_close(mean, rollout.mean.flatten(0, 1))
    normal = torch.distributions.Normal(rollout.mean, rollout.log_std.exp())
    torch.testing.assert_close(minibatch[:, -1], normal.log_prob(rollout.action).sum(-1).flatten())


def test_a_minibatch_takes_equal_shares_from_every_world():
    learner = make(num_envs=5)
    orders = learner._orders().unflatten(1, (SMALL.minibatches, -1))
    for epoch in orders:
        assert sorted(epoch.flatten().tolist()) == list(range(SMALL.horizon * 5))
        for minibatch in epoch:
            assert torch.bincount(minibatch % 5).tolist() == [SMALL.horizon // SMALL.minibatches] * 5
    assert not torch.equal(orders[0], orders[1])


def test_worlds_act_the_same_however_they_are_spread_over_ranks():
    whole, left, right = make(6), make(2), make(4, first_env=2)
    together, a, b = whole._collect(), left._collect(), right._collect()
    for name in ("obs", "action", "reward"):
        torch.testing.assert_close(getattr(together, name), torch.cat((getattr(a, name), getattr(b, name)), dim=1))
    per_world = (whole._orders() // 6).unflatten(1, (SMALL.horizon, 6))
    assert torch.equal(per_world[:, :, 2:], (right._orders() // 4).unflatten(1, (SMALL.horizon, 4)))


@pytest.mark.parametrize(("kl", "factor"), [(0.05, 1 / 1.5), (0.01, 1.0), (0.001, 1.5)])
def test_the_learning_rate_follows_the_divergence(kl: float, factor: float):
    learner = make()
    learner._clip_and_adapt(torch.tensor(kl))
    assert float(learner._adam.learning_rate) == pytest.approx(SMALL.learning_rate * factor, rel=1e-5)


def test_a_desired_divergence_of_zero_keeps_the_learning_rate():
    learner = make(config=dataclasses.replace(SMALL, desired_kl=0.0))
    rates = [learner.learn()["policy/learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([SMALL.learning_rate] * 3)


class TwoSided:
    """A dozen lines of env whose critic sees the hidden target that the policy does not."""

    num_envs, first_env, num_actions, max_episode_steps, device = 16, 0, 2, 5, torch.device("cpu")
    log_names: tuple[str, ...] = ("length", "return")
    step_seconds, capturable = 0.02, False

    def __init__(self) -> None:
        self._step = torch.zeros((), dtype=torch.int64)
        self.observation_spec = {"policy": TensorSpec((3,)), "critic": TensorSpec((5,))}

    def observe(self) -> dict[str, Tensor]:
        policy = torch.full((self.num_envs, 3), float(self._step))
        return {"policy": policy, "critic": torch.cat((policy, torch.ones(self.num_envs, 2)), dim=1)}

    def reset(self) -> dict[str, Tensor]:
        return self.observe()

    def step(self, actions: Tensor) -> Step:
        self._step += 1
        off = torch.zeros(self.num_envs, dtype=torch.bool)
        reward = -(actions - 0.5).square().sum(1)
        return Step(self.observe(), reward, off, off, self.observe(), torch.zeros(self.num_envs, 2))

    def prefetch_random(self, steps: int) -> None: ...

    def faults(self) -> Tensor:
        return torch.zeros(2)

    def state(self) -> dict[str, Tensor]:
        return {"step": self._step.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._step.copy_(state["step"])


def test_the_critic_may_see_more_than_the_policy():
    learner = Ppo(TwoSided(), dataclasses.replace(SMALL, desired_kl=0.0, learning_rate=3e-3), seed=0)
    assert (learner.actor[0].in_features, learner.critic[0].in_features) == (3, 5)
    for _ in range(40):
        learner.learn()
    assert learner.policy()(torch.full((1, 3), 300.0)).sub(0.5).abs().max() < 0.2
    assert learner.normalizers["critic"].count == learner.normalizers["policy"].count > 0


@pytest.mark.parametrize("make_env", [TwoSided, lambda: RobotEnv(Cartpole(), 6)])
def test_what_a_gpu_runs_descends_as_what_a_cpu_runs(make_env: Callable[[], VecEnv]):
    """The formula by autograd, on samples with columns of zeros between them; and the derivative written out."""
    ours, theirs = (Ppo(make_env(), SMALL, seed=0) for _ in range(2))
    ours._columns, ours._differentiate = 8, ours._differentiate_compiled
    ours._collect, ours._improve = torch.no_grad()(ours._roll_out), torch.no_grad()(ours._update)
    for _ in range(3):
        told, expected = ours.learn(), theirs.learn()
        for name in told:
            if not name.startswith("seconds/"):
                assert told[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(ours.state()["adam"], theirs.state()["adam"], rtol=1e-3, atol=1e-6)


def test_the_policy_takes_raw_observations():
    learner = make()
    for _ in range(3):
        learner.learn()
    obs = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = learner.actor(learner.normalizers["policy"].normalize(obs))
    torch.testing.assert_close(learner.policy()(obs), expected, rtol=1e-4, atol=1e-6)
    assert learner.normalizers["policy"].count == 3 * SMALL.horizon * 6


def test_every_metric_is_a_finite_number():
    assert all(math.isfinite(value) for value in make().learn().values())


def test_advantages_that_are_all_alike_stay_numbers():
    # With 8 times 49 samples the rounding does take some variances below zero.
    learner = make(num_envs=49)
    learner.learn()
    rollout = learner._collect()
    with torch.inference_mode():
        for value in torch.linspace(-3.0, 11.0, 50).tolist():
            samples = learner._samples(rollout)
            samples[:, -4] = value
            learner._finish(samples, learner._head(rollout, samples))
            assert samples[:, -4].isfinite().all()
            assert samples[:, -4].abs().max() < 1.0 + 1e3 * abs(value)
