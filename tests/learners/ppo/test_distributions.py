"""Discrete actions of the native PPO against torch's own distributions and autograd."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import kl_divergence as torch_kl_divergence

from paceline.env.host_syncs import DetectSyncs
from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import ActionSpec, action_spec
from paceline.errors import UserError
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.distributions import Categorical, make_distribution
from paceline.learners.ppo.samples import Samples
from paceline.learners.ppo.settings import PpoSettings
from tests.env.switches import Switch, Switches
from tests.learners.test_fusable import fused

SAMPLES, CHOICES = 200, (3, 2)
CONFIG = PpoSettings(entropy_weight=0.03, value_weight=0.5)
SMALL = PpoSettings(horizon=8, epochs=2, minibatches=4, hidden=(16, 16), entropy_weight=0.01)


def sample(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def columns(logits: Tensor) -> list[TorchCategorical]:
    return [TorchCategorical(logits=column) for column in logits.split(CHOICES, -1)]


def batch() -> tuple[Tensor, Tensor, Samples]:
    """Return logits, values, and samples of which some are clipped and some are not."""
    logits, value = sample(SAMPLES, sum(CHOICES), seed=0), sample(SAMPLES, seed=1)
    actions = torch.stack([column.sample() for column in columns(logits)], dim=1)
    old_logits = logits + 0.4 * sample(SAMPLES, sum(CHOICES), seed=2)
    one_hot = [torch.nn.functional.one_hot(actions[:, i], count) for i, count in enumerate(CHOICES)]
    samples = Samples(
        obs={},
        action=torch.cat(one_hot, dim=1).double(),
        output=old_logits,
        advantage=sample(SAMPLES, seed=3),
        value_target=sample(SAMPLES, seed=4),
        value=value + 0.3 * sample(SAMPLES, seed=5),
        log_prob=sum(
            (old.log_prob(actions[:, i]) for i, old in enumerate(columns(old_logits))), torch.zeros(SAMPLES).double()
        ),
    )
    return logits.requires_grad_(), value.requires_grad_(), samples


def test_losses_and_divergence_equal_those_of_torch_categorical():
    torch.manual_seed(0)
    logits, value, samples = batch()
    distribution = Categorical(CHOICES, torch.device("cpu"))
    found = distribution.losses(logits, value, samples, CONFIG)
    actions = [part.argmax(1) for part in samples.action.split(CHOICES, 1)]
    new_log_prob = torch.stack([new.log_prob(a) for new, a in zip(columns(logits), actions, strict=True)]).sum(0)
    ratio = (new_log_prob - samples.log_prob).exp()
    assert 0.2 < ((ratio - 1.0).abs() > CONFIG.clip).double().mean() < 0.8
    gain = torch.min(ratio * samples.advantage, ratio.clip(1 - CONFIG.clip, 1 + CONFIG.clip) * samples.advantage)
    torch.testing.assert_close(found.surrogate, -gain.mean())
    torch.testing.assert_close(found.entropy, torch.stack([new.entropy() for new in columns(logits)]).sum(0).mean())
    pairs = zip(columns(samples.output), columns(logits), strict=True)
    divergence = torch.stack([torch_kl_divergence(old, new) for old, new in pairs]).sum(0).mean()
    torch.testing.assert_close(distribution.kl_divergence(samples.output, distribution.log_std, logits), divergence)


@pytest.mark.parametrize("clip_value", [True, False])
def test_the_gradient_equals_autograd_of_the_losses(clip_value: bool):
    torch.manual_seed(0)
    logits, value, samples = batch()
    config, distribution = dataclasses.replace(CONFIG, clip_value=clip_value), Categorical(CHOICES, torch.device("cpu"))
    loss, *parts = distribution.losses(logits, value, samples, config)
    with torch.no_grad():
        by_hand, (by_output, by_parameters, by_value) = distribution.gradient(logits, value, samples, config)
    torch.testing.assert_close(list(by_hand), parts)
    torch.testing.assert_close((by_output, by_value), torch.autograd.grad(loss, (logits, value)))
    assert by_parameters == ()


def test_actions_are_sampled_with_the_probabilities_of_the_logits():
    distribution = Categorical(CHOICES, torch.device("cpu"))
    logits = torch.tensor((0.5, -1.0, 2.0, 0.3, 0.0))
    noise = distribution.sample_noise(5, torch.arange(256), torch.arange(400)[:, None])
    assert noise.isfinite().all()
    actions = distribution.act(logits, distribution.scale_noise(noise)).flatten(0, 1)
    for column, expected in zip(actions.unbind(1), columns(logits), strict=True):
        found = torch.bincount(column) / len(column)
        # Six standard deviations.
        torch.testing.assert_close(found, expected.probs, atol=6.0 * 0.5 / len(column) ** 0.5, rtol=0.0)
    first, second = actions.double().unbind(1)
    assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 6.0 / len(first) ** 0.5


def test_the_functions_of_discrete_actions_never_wait_for_the_host():
    learner = Ppo(RobotEnv(Switches(), 4), SMALL, seed=0)
    learner.learn()
    distribution, rollout = learner.distribution, learner.collect()
    with torch.no_grad(), DetectSyncs(pytest.fail):
        action, log_prob = distribution.samples_of(rollout)
        distribution.act(rollout.output, rollout.noise)
        samples = Samples({}, action, rollout.output, *[log_prob] * 4)
        flat = samples._replace(**{name: getattr(samples, name).flatten(0, 1) for name in samples._fields[1:]})
        distribution.losses(flat.output, flat.value, flat, SMALL)
        distribution.gradient(flat.output, flat.value, flat, SMALL)
        distribution.kl_divergence(flat.output, distribution.log_std, flat.output)


def test_before_the_first_update_the_policy_is_the_one_that_acted():
    learner = Ppo(RobotEnv(Switches(), 6), SMALL, seed=0)
    for _ in range(3):
        learner.learn()
    rollout = learner.collect()
    assert rollout.action.dtype == torch.int64
    with torch.inference_mode():
        samples = learner.make_samples(rollout)
        output = learner.actor(samples.obs["policy"])
    torch.testing.assert_close(output, rollout.output)
    expected = [old.log_prob(rollout.action[..., i]) for i, old in enumerate(columns(rollout.output))]
    torch.testing.assert_close(samples.log_prob, torch.stack(expected).sum(0))


@pytest.mark.parametrize("compiles", [False, True])
def test_the_update_of_a_gpu_equals_that_of_a_cpu(compiles: bool):
    """Compare autograd on padded samples, and graphs of the compiler, with the gradient that is written out."""
    on_cpu = Ppo(RobotEnv(Switches(), 6), SMALL, seed=0)
    if compiles:
        with fused("paceline.learners.ppo.ppo"):
            on_gpu = Ppo(RobotEnv(Switches(), 6), SMALL, seed=0, gpu_update=True)
    else:
        on_gpu = Ppo(RobotEnv(Switches(), 6), SMALL, seed=0, gpu_update=True)
    for _ in range(2):
        found, expected = on_gpu.learn(), on_cpu.learn()
        for name in expected:
            if not name.startswith("seconds/"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_continuous_actions_keep_the_normal_distribution():
    found = make_distribution(ActionSpec(2), 0.5, torch.device("cpu"))
    assert (found.num_outputs, found.choices, list(found.parameters)) == (2, (), ["log_std"])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ((3, 2), r"'action_choices' is \(3, 2\), but must have one entry per action: 'num_actions' is 1"),
        ([3], r"'action_choices' is \[3\], but must be a tuple of numbers of choices"),
        ((0,), r"'action_choices' is \(0,\), but must be a tuple of numbers of choices"),
    ],
)
def test_choices_that_do_not_fit_the_actions_are_an_error(choices: object, message: str):
    env = RobotEnv(Switch(), 1)
    assert action_spec(env) == ActionSpec(1, (3,))
    env.action_choices = choices  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=message):
        action_spec(env)
