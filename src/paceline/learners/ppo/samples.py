"""Experience of an iteration: the rollout of the env, and the samples for the update."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.env.vec_env import Step
from paceline.tensors import random


@dataclass(frozen=True)
class Rollout:
    """Experience of one iteration, [step, env, ...]; observations are not normalized."""

    step_fields: ClassVar[tuple[str, ...]] = ("reward", "terminated", "truncated", "log")
    """Names of the tensors that are stacked from those of `Step`."""

    obs: dict[str, Tensor]
    """Observation groups, one step longer than the other tensors: the last entry starts the next rollout. Images are
    [step, env, height, width, channel]."""
    final_obs: dict[str, Tensor]
    """Observations before any reset, of the groups that the critic uses; empty if it uses images."""
    action: Tensor
    """Actions that the env took."""
    output: Tensor
    """Output of the actor: means of continuous actions, or logits of discrete ones."""
    log_std: Tensor
    """Logarithm of the standard deviation of continuous actions, [actions], the same for all samples; empty for
    discrete actions."""
    noise: Tensor
    """Random numbers from which the actions were computed."""
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    log: Tensor
    faults: Tensor
    """`VecEnv.faults`, [2]."""
    value: Tensor | None = None
    """Value estimates of `obs`, [step, env], which are computed in the rollout if the critic uses images or has a
    state."""
    final_value: Tensor | None = None
    """Value estimates of `final_obs`, [step, env], if `value` has them too and `final_obs` is not empty."""
    features: Tensor | None = None
    """Predictions of the image encoder, [step, env, targets], if it is trained by regression."""
    states: Tensor | None = None
    """States of recurrent networks at the start of each sequence, [sequence, env, ...]."""

    @property
    def done(self) -> Tensor:
        return self.terminated | self.truncated

    def steps(self) -> list[Step]:
        """Return the steps of the env that made this rollout."""
        return [
            Step(
                obs={name: obs[i + 1] for name, obs in self.obs.items()},
                final_obs={name: obs[i] for name, obs in self.final_obs.items()},
                **{name: getattr(self, name)[i] for name in self.step_fields},
            )
            for i in range(len(self.reward))
        ]


class Samples(NamedTuple):
    """Samples of an iteration or of a minibatch, [sample, ...]."""

    obs: dict[str, Tensor]
    """Observation groups; vectors are normalized and may have extra columns of zeros at the end. Images are [sample,
    channel, height, width] in channels-last memory."""
    action: Tensor
    """Continuous actions, or discrete ones as 1 for each choice that was taken and 0 for the others; as wide as
    `output`."""
    output: Tensor
    """Output of the actor of the policy that collected the sample: means or logits."""
    advantage: Tensor
    value_target: Tensor
    value: Tensor
    """Value estimate before the update."""
    log_prob: Tensor
    """Log-probability of the action under the policy that collected the sample."""


class PackedSamples(NamedTuple):
    """Samples in the layout of a `SamplePacking`, from which minibatches are gathered."""

    floats: Tensor
    """All float vectors and scalars, one row per sample."""
    images: dict[str, Tensor]
    """Images in their own dtype, [sample, height, width, channel]."""

    def gather(self, index: Tensor) -> "PackedSamples":
        """Return the samples with the given indices."""
        images = {name: image.index_select(0, index) for name, image in self.images.items()}
        return PackedSamples(self.floats.index_select(0, index), images)


class SamplePacking:
    """Packs the float tensors of samples into one matrix, so that a minibatch is gathered by one index_select.

    `widths` are the widths of the float vectors among the observation groups, and `num_outputs` that of the actor's
    output. Vectors start at multiples of `alignment` columns.
    """

    def __init__(self, widths: dict[str, int], num_outputs: int, alignment: int = 1):
        self._groups = tuple(widths)
        # The padding lies before the actions, so that each row is a multiple of `alignment` wide.
        padding = -(2 * num_outputs + 4) % alignment
        self._widths = (*widths.values(), padding, num_outputs, num_outputs, 1, 1, 1, 1)

    def pack(self, samples: Samples) -> PackedSamples:
        """Pack samples whose tensors are [step, env, ...]."""
        vectors = [samples.obs[name] for name in self._groups]
        padding = samples.action.new_zeros((*samples.advantage.shape, self._widths[len(vectors)]))
        scalars = torch.stack((samples.advantage, samples.value_target, samples.value, samples.log_prob), dim=-1)
        floats = torch.cat((*vectors, padding, samples.action, samples.output, scalars), dim=-1)
        images = {name: obs.flatten(0, 1) for name, obs in samples.obs.items() if name not in self._groups}
        return PackedSamples(floats.flatten(0, 1), images)

    def unpack(self, packed: PackedSamples) -> Samples:
        """Return views of packed samples."""
        *vectors, _, action, output, advantage, target, value, log_prob = packed.floats.split(self._widths, dim=1)
        images = {name: image.permute(0, 3, 1, 2) for name, image in packed.images.items()}
        obs = dict(zip(self._groups, vectors, strict=True)) | images
        scalars = (scalar.squeeze(1) for scalar in (advantage, target, value, log_prob))
        return Samples(obs, action, output, *scalars)


def minibatch_orders(seed: int, env_index: Tensor, epochs: Tensor, horizon: int) -> Tensor:
    """Return an order of the samples of a rollout for each of the given epoch numbers, [epoch, step * env].

    Every minibatch, which is a chunk of an order, has the same number of steps from every env, so the minibatches do
    not depend on how the envs are distributed over ranks.
    """
    keys = random.uniform(seed, env_index, epochs[:, None], random.Stream.MINIBATCH, horizon)
    order = keys.argsort(dim=-1).transpose(1, 2) * len(env_index)
    return (order + torch.arange(len(env_index), device=env_index.device)).flatten(1)
