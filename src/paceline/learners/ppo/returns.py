"""Values and advantages of a rollout, from which the samples for the update are made."""

import torch
from torch import Tensor, nn

from paceline.learners.networks import forward_padded, vector_input
from paceline.learners.ppo.distributions import ActionDistribution
from paceline.learners.ppo.observations import Observations
from paceline.learners.ppo.samples import Rollout, Samples
from paceline.learners.ppo.settings import PpoSettings


def make_samples(
    rollout: Rollout, inputs: Observations, critic: nn.Sequential, distribution: ActionDistribution, config: PpoSettings
) -> Samples:
    """Return the samples of a rollout, with advantages that are not standardized yet. The tensors are [step, env, ...].

    `critic` computes the values from `inputs`, unless the rollout has them.
    """
    all_values, final_value, critic_obs = _values(rollout, inputs, critic, config.horizon)
    value, next_value = all_values[:-1], torch.where(rollout.truncated, final_value, all_values[1:])
    ends = rollout.terminated, rollout.done
    advantage = advantages(rollout.reward, value, next_value, *ends, config.discount, config.gae_lambda)
    action, log_prob = distribution.samples_of(rollout)
    obs = {
        name: critic_obs[name][: config.horizon] if name in critic_obs else inputs.of_samples(name, rollout)
        for name in inputs.sample_groups
    }
    return Samples(obs, action, rollout.output, advantage, advantage + value, value, log_prob)


def _values(
    rollout: Rollout, inputs: Observations, critic: nn.Sequential, horizon: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the values of the observations [step + 1, env] and of the final observations [step, env], and the
    normalized observations of both from which they were computed, if they were not computed in the rollout."""
    if (value := rollout.value) is not None:
        # There are no images of the states before a reset, so after a time limit the value of the state before the
        # step is used, as RSL-RL and RL-Games do.
        return value, value[:-1] if rollout.final_value is None else rollout.final_value, {}
    obs = {
        name: inputs.pad(inputs.normalize(name, torch.cat((rollout.obs[name], final_obs))))
        for name, final_obs in rollout.final_obs.items()
    }
    values = forward_padded(critic, vector_input(obs, inputs.critic_groups)).squeeze(-1)
    return values[: horizon + 1], values[horizon + 1 :], obs


def advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, discount: float, decay: float
) -> Tensor:
    """Return the advantages by generalized advantage estimation (Schulman et al. 2015); all tensors are [step, env].

    `next_value` is the value of the state that the reward led to, before any reset. It is used after a time limit,
    because the episode would have continued, and is not used after a termination.
    """
    not_terminated, not_done = (~terminated).float(), (~done).float() * (discount * decay)
    td_error = reward + discount * not_terminated * next_value - value
    running = torch.zeros_like(reward[0])
    reversed_advantages = []
    for error, keep in zip(td_error.flip(0).unbind(0), not_done.flip(0).unbind(0), strict=True):
        running = torch.addcmul(error, keep, running)
        reversed_advantages.append(running)
    return torch.stack(reversed_advantages[::-1])
