"""Native PPO: its parts against independent computations, and all of it on a task."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import Step, TensorSpec, VecEnv
from paceline.learners.optimizers import KlAdaptiveLearningRate
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.returns import advantages
from paceline.learners.ppo.samples import SamplePacking, Samples, minibatch_orders
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole import Cartpole
from paceline.tensors.statistics import row_sums, standardize

SMALL = PpoSettings(horizon=8, epochs=2, minibatches=4, hidden=(16, 16))


def make(num_envs: int = 6, config: PpoSettings = SMALL, seed: int = 3, first_env: int = 0) -> Ppo:
    return Ppo(RobotEnv(Cartpole(), num_envs, seed=seed, first_env=first_env), config, seed)


def test_advantages_equal_the_discounted_sum_of_td_errors():
    generator = torch.Generator().manual_seed(0)
    steps, envs, discount, decay = 7, 5, 0.9, 0.8
    reward, value, next_value = (torch.randn(steps, envs, generator=generator) for _ in range(3))
    terminated = torch.rand(steps, envs, generator=generator) < 0.2
    truncated = (torch.rand(steps, envs, generator=generator) < 0.2) & ~terminated
    expected = torch.zeros(steps, envs)
    for env in range(envs):
        for start in range(steps):
            weight = 1.0
            for step in range(start, steps):
                next_term = 0.0 if terminated[step, env] else discount * float(next_value[step, env])
                expected[start, env] += weight * (float(reward[step, env]) + next_term - float(value[step, env]))
                if terminated[step, env] or truncated[step, env]:
                    break
                weight *= discount * decay
    found = advantages(reward, value, next_value, terminated, terminated | truncated, discount, decay)
    torch.testing.assert_close(found, expected)


def test_a_time_limit_is_bootstrapped_from_the_final_observation():
    learner = make(config=dataclasses.replace(SMALL, gae_lambda=0.0, normalize_observations=False))
    learner.learn()
    rollout = learner.collect()
    truncated = torch.zeros_like(rollout.truncated)
    truncated[2] = True
    final = torch.randn_like(rollout.final_obs["policy"])
    rollout = dataclasses.replace(
        rollout, truncated=truncated, terminated=torch.zeros_like(truncated), final_obs={"policy": final}
    )
    with torch.inference_mode():
        target = learner.make_samples(rollout).value_target
        final_value = learner.critic(final[2]).squeeze(-1)
        next_value = learner.critic(rollout.obs["policy"][4]).squeeze(-1)
    torch.testing.assert_close(target[2], rollout.reward[2] + learner.config.discount * final_value)
    torch.testing.assert_close(target[3], rollout.reward[3] + learner.config.discount * next_value)


def test_before_the_first_update_the_policy_is_the_one_that_acted():
    learner = make()
    for _ in range(3):
        learner.learn()
    rollout = learner.collect()
    with torch.inference_mode():
        samples = learner.make_samples(rollout)
        mean = learner.actor(samples.obs["policy"])
    torch.testing.assert_close(mean, rollout.output)
    normal = torch.distributions.Normal(rollout.output, rollout.log_std.exp())
    torch.testing.assert_close(samples.log_prob, normal.log_prob(rollout.action).sum(-1))


@pytest.mark.parametrize("alignment", [1, 8])
def test_packed_samples_keep_names_and_dtypes(alignment: int):
    shape, generator = (4, 3), torch.Generator().manual_seed(0)
    obs = {
        "policy": torch.randn(*shape, 8, generator=generator),
        "critic": torch.randn(*shape, 16, generator=generator),
    }
    camera = torch.randint(256, (*shape, 2, 2, 3), dtype=torch.uint8, generator=generator)
    vectors = [torch.randn(*shape, 5, generator=generator) for _ in range(2)]
    samples = Samples(obs | {"camera": camera}, *vectors, *torch.randn(4, *shape, generator=generator).unbind(0))
    packing = SamplePacking({"policy": 8, "critic": 16}, 5, alignment)
    index = torch.tensor([7, 0, 11])
    found = packing.unpack(packing.pack(samples).gather(index))
    assert found.obs.keys() == samples.obs.keys()
    for name, group in samples.obs.items():
        assert found.obs[name].dtype == group.dtype
        expected = group.flatten(0, 1)[index]
        # Images are packed with the channels last.
        assert torch.equal(found.obs[name], expected.permute(0, 3, 1, 2) if expected.dim() == 4 else expected)
    for one, other in zip(found[1:], samples[1:], strict=True):
        assert isinstance(one, Tensor)
        assert isinstance(other, Tensor)
        assert torch.equal(one, other.flatten(0, 1)[index])


def orders(num_envs: int, first_env: int = 0) -> Tensor:
    env_index = torch.arange(first_env, first_env + num_envs)
    return minibatch_orders(3, env_index, torch.arange(SMALL.epochs), SMALL.horizon)


def test_a_minibatch_has_the_same_number_of_steps_from_every_env():
    epochs = orders(5).unflatten(1, (SMALL.minibatches, -1))
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == list(range(SMALL.horizon * 5))
        for minibatch in epoch:
            assert torch.bincount(minibatch % 5).tolist() == [SMALL.horizon // SMALL.minibatches] * 5
    assert not torch.equal(epochs[0], epochs[1])


def test_envs_act_the_same_however_they_are_distributed_over_ranks():
    whole, left, right = (make(n, first_env=first).collect() for n, first in ((6, 0), (2, 0), (4, 2)))
    for name in ("action", "reward"):
        expected = torch.cat((getattr(left, name), getattr(right, name)), dim=1)
        torch.testing.assert_close(getattr(whole, name), expected)
    torch.testing.assert_close(whole.obs["policy"], torch.cat((left.obs["policy"], right.obs["policy"]), dim=1))
    per_env = (orders(6) // 6).unflatten(1, (SMALL.horizon, 6))
    assert torch.equal(per_env[:, :, 2:], (orders(4, first_env=2) // 4).unflatten(1, (SMALL.horizon, 4)))


@pytest.mark.parametrize(("kl", "factor"), [(0.05, 1 / 1.5), (0.01, 1.0), (0.001, 1.5)])
def test_the_learning_rate_follows_the_divergence(kl: float, factor: float):
    learning_rate = torch.tensor(SMALL.learning_rate)
    KlAdaptiveLearningRate(SMALL.desired_kl, torch.device("cpu")).update_(learning_rate, torch.tensor(kl))
    assert float(learning_rate) == pytest.approx(SMALL.learning_rate * factor, rel=1e-5)


def test_a_desired_divergence_of_zero_keeps_the_learning_rate():
    learner = make(config=dataclasses.replace(SMALL, desired_kl=0.0))
    rates = [learner.learn()["policy/learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([SMALL.learning_rate] * 3)


class TwoSided:
    """Env whose critic sees a target that is hidden from the policy."""

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
    assert learner.policy()({"policy": torch.full((1, 3), 300.0)}).sub(0.5).abs().max() < 0.2
    assert learner.normalizers["critic"].count == learner.normalizers["policy"].count > 0


@pytest.mark.parametrize("make_env", [TwoSided, lambda: RobotEnv(Cartpole(), 6)])
def test_the_update_of_a_gpu_equals_that_of_a_cpu(make_env: Callable[[], VecEnv]):
    """Compare autograd on padded samples with the gradient that is written out."""
    on_gpu, on_cpu = (Ppo(make_env(), SMALL, seed=0, gpu_update=gpu_update) for gpu_update in (True, False))
    for _ in range(3):
        found, expected = on_gpu.learn(), on_cpu.learn()
        for name in found:
            if not name.startswith("seconds/"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(on_gpu.state()["adam"], on_cpu.state()["adam"], rtol=1e-3, atol=1e-6)


def test_the_policy_takes_raw_observations():
    learner = make()
    for _ in range(3):
        learner.learn()
    obs = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = learner.actor(learner.normalizers["policy"].normalize(obs))
    torch.testing.assert_close(learner.policy()({"policy": obs}), expected, rtol=1e-4, atol=1e-6)
    assert learner.normalizers["policy"].count == 3 * SMALL.horizon * 6


def test_every_metric_is_a_finite_number():
    assert all(math.isfinite(value) for value in make().learn().values())


def test_constant_advantages_stay_finite_when_standardized():
    # With 8 * 49 samples rounding would make the variance of some of these values negative.
    for value in torch.linspace(-3.0, 11.0, 50).tolist():
        advantage = torch.full((8 * 49, 1), value)
        standardized = standardize(advantage, row_sums(advantage), correction=0)
        assert standardized.isfinite().all()
        assert standardized.abs().max() < 1.0 + 1e3 * abs(value)
