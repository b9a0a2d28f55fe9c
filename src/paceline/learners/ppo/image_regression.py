"""Training of an image encoder by regression, in the same update as the policy."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.tensors.flat import FlatAdam, FlatParameters
from paceline.tensors.graph import fuse
from paceline.tensors.statistics import RunningStatistics

REGRESSION_NAMES = ("images/loss", "images/target_error")
"""Loss of the image encoder, and the root mean square of its error in the units of the targets."""


class ImageRegression:
    """Trains an encoder to predict the normalized numbers of the observation group "image_targets", with its own
    optimizer. `share` is this rank's fraction of all envs. All ranks take the same steps."""

    def __init__(
        self, encoder: nn.Module, statistics: RunningStatistics, learning_rate: float, group: Group, share: float
    ):
        self._encoder, self._statistics, self._group, self._share = encoder, statistics, group, share
        self._flat = FlatParameters(list(encoder.parameters()), extra=len(REGRESSION_NAMES))
        self.adam = FlatAdam(self._flat, learning_rate)
        self._losses = fuse(self._compute_losses, self.adam.learning_rate.device)

    def train(self, images: dict[str, Tensor], targets: Tensor, minibatches: Sequence[Tensor]) -> Tensor:
        """Update the encoder on minibatches, the indices of samples in images [sample, height, width, channel] and
        targets [sample, n]. Return the values of `REGRESSION_NAMES`, [2]."""
        losses = [
            self._step({name: image[index] for name, image in images.items()}, targets[index]) for index in minibatches
        ]
        loss, squared_error = torch.stack(losses).mean(0).unbind(0)
        return torch.stack((loss, squared_error.sqrt()))

    def _step(self, images: dict[str, Tensor], targets: Tensor) -> Tensor:
        """Update the encoder on a minibatch of all ranks. Return the loss and the mean squared error, [2]."""
        with torch.enable_grad():
            losses = self._losses(images, targets)
            self._flat.backward(losses[0])
        if self._group.is_distributed:
            losses = self._flat.begin_average(self._group.begin_sum_, self._share, losses)().unbind(0)
        self.adam.step()
        return torch.stack(tuple(losses)).detach()

    def state(self) -> dict[str, Tensor]:
        state = self.adam.state()
        del state["learning_rate"]
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        # The learning rate is constant, and may have been changed since.
        self.adam.load_state(state | {"learning_rate": self.adam.learning_rate})

    def _compute_losses(self, images: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, ...]:
        error = self._encoder({name: image.permute(0, 3, 1, 2) for name, image in images.items()})
        error = error - self._statistics.normalize(targets)
        return error.square().mean(), (error.detach() * self._statistics.std()).square().mean()
