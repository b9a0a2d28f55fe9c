"""All images of an env as one tensor, for libraries whose observations are one tensor."""

import math
from functools import reduce

import torch
from torch import Tensor

from paceline.env.vec_env import TensorSpec
from paceline.learners.encoders import common_size


class ImagePacking:
    """Packs images side by side into [batch, height, width, channel], in a dtype that has the values of all of them:
    bytes and classes are exact in float16."""

    def __init__(self, specs: dict[str, TensorSpec]):
        self.specs = specs
        self._channels = [spec.shape[0] for spec in specs.values()]
        self.shape = (*common_size(specs), sum(self._channels))
        """Height, width and number of channels."""
        self.size = math.prod(self.shape)
        self.dtype = reduce(torch.promote_types, [spec.dtype for spec in specs.values()])

    def pack(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.cat([obs[name].permute(0, 2, 3, 1) for name in self.specs], dim=3)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Return views [batch, channel, height, width]."""
        return dict(zip(self.specs, packed.permute(0, 3, 1, 2).split(self._channels, dim=1), strict=True))
