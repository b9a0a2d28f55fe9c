"""Convolutional encoder of images, shared by actor and critic."""

import contextlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.env.vec_env import TensorSpec, VecEnv
from paceline.errors import UserError, counted
from paceline.learners.networks import Encoder

TARGETS = "image_targets"
"""Observation group of numbers that an encoder may be trained to predict from images. Networks do not observe it."""


def images_of(env: VecEnv) -> dict[str, TensorSpec]:
    """Return the observation groups of an env that are images, [channel, height, width]."""
    return {name: spec for name, spec in env.observation_spec.items() if len(spec.shape) == 3}


def common_size(specs: dict[str, TensorSpec]) -> tuple[int, int]:
    """Return height and width of all images. Raise UserError if an encoder cannot use them together."""
    sizes = {spec.shape[1:] for spec in specs.values()}
    if len(sizes) > 1:
        found = ", ".join(f"{name} {spec.shape[2]}x{spec.shape[1]}" for name, spec in specs.items())
        raise UserError(f"images of different sizes cannot share an encoder ({found}): give the cameras one size")
    for name, spec in specs.items():
        if spec.dtype == torch.int32:
            raise UserError(f"geom indices ({name}) are not numbers that a network can use: use the stream classes")
    height, width = next(iter(sizes))
    return height, width


def feature_map_size(
    height: int, width: int, channels: tuple[int, ...], kernels: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, int]:
    """Return height and width of the feature maps of the last convolution. Raise UserError for invalid layers."""
    if not len(channels) == len(kernels) == len(strides):
        raise UserError(
            f"the encoder has {counted(len(channels), 'channel')}, {counted(len(kernels), 'kernel')} and "
            f"{counted(len(strides), 'stride')}: give one of each per layer"
        )
    for kernel, stride in zip(kernels, strides, strict=True):
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if min(height, width) < 1:
            raise UserError(
                "the images are smaller than the kernels of the encoder: use larger images or smaller strides"
            )
    return height, width


def num_channels(spec: TensorSpec) -> int:
    """Return the number of channels of an image that `scaled` returns."""
    return spec.shape[0] * max(1, spec.classes)


def scaled(image: Tensor, spec: TensorSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the image [batch, channel, height, width] that a network takes: bytes are divided by 255 and other numbers
    by the scale of their group, minus 0.5; classes become one channel each. `image` may have another dtype than its
    group."""
    if spec.classes:
        one_hot = functional.one_hot(image.long(), spec.classes)
        return one_hot.permute(0, 1, 4, 2, 3).flatten(1, 2).to(dtype)
    scale = 255.0 if spec.dtype == torch.uint8 else spec.scale
    return image.to(dtype) * (1.0 / scale) - 0.5


def network_input(
    images: dict[str, Tensor], specs: dict[str, TensorSpec], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return all images, scaled, as one image [batch, channel, height, width]."""
    parts = [scaled(images[name], spec, dtype) for name, spec in specs.items()]
    x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return x.contiguous(memory_format=torch.channels_last)


class BlockConv2d(nn.Conv2d):
    """Convolution whose stride divides its kernel. On a GPU it is computed with blocks of stride x stride pixels as
    channels, which is faster for few channels because tensor cores need many. The result is that of `nn.Conv2d`."""

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_cuda:
            return super().forward(input)
        x, weight = (blocks_to_channels(part, self.stride[0]) for part in (input, self.weight))
        return functional.conv2d(x, weight, self.bias)


def blocks_to_channels(x: Tensor, size: int) -> Tensor:
    """Return [n, size * size * channel, height // size, width // size] from [n, channel, height, width]: the pixels of
    a block become channels. Rows and columns that do not fill a block are dropped."""
    rows, columns = (pixels // size for pixels in x.shape[-2:])
    x = x[..., : rows * size, : columns * size].unflatten(3, (columns, size)).unflatten(2, (rows, size))
    return x.permute(0, 3, 5, 1, 2, 4).flatten(1, 3).contiguous(memory_format=torch.channels_last)


class SpatialSoftmax(nn.Module):
    """Mean position of each feature map, weighted by its softmax, from -1 to 1 (Levine et al. 2016)."""

    def forward(self, maps: Tensor) -> Tensor:
        """Return [batch, 2 * channel] from [batch, channel, height, width]."""
        *_, height, width = maps.shape
        weights = maps.flatten(2).softmax(-1).view_as(maps)
        x, y = (torch.linspace(-1.0, 1.0, size, device=maps.device, dtype=maps.dtype) for size in (width, height))
        return torch.cat(((weights.sum(2) * x).sum(-1), (weights.sum(3) * y).sum(-1)), dim=1)


class ImageEncoder(Encoder):
    """Convolutions over the channels of all images, which are scaled, then one linear layer, and a second one if
    `outputs` is above 0. On a GPU the encoder computes in `gpu_dtype`."""

    def __init__(
        self,
        specs: dict[str, TensorSpec],
        channels: tuple[int, ...],
        kernels: tuple[int, ...],
        strides: tuple[int, ...],
        features: int,
        pooling: str,
        generator: torch.Generator,
        outputs: int = 0,
        gpu_dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        self.groups = tuple(specs)
        self._specs, self._gpu_dtype = specs, gpu_dtype
        height, width = feature_map_size(*common_size(specs), channels, kernels, strides)
        before = sum(num_channels(spec) for spec in specs.values())
        layers: list[nn.Module] = []
        for after, kernel, stride in zip(channels, kernels, strides, strict=True):
            # Only images have few channels.
            blocks = not layers and stride > 1 and kernel % stride == 0
            convolution = BlockConv2d if blocks else nn.Conv2d
            layers += [convolution(before, after, kernel, stride), nn.ReLU(inplace=True)]
            before = after
        if pooling == "spatial_softmax":
            layers, flat = [*layers[:-1], SpatialSoftmax()], 2 * before
        else:
            layers, flat = [*layers, nn.Flatten()], before * height * width
        last = [nn.Linear(features, outputs)] if outputs else []
        self.layers = nn.Sequential(*layers, nn.Linear(flat, features), nn.ReLU(inplace=True), *last)
        for layer in self.layers:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.orthogonal_(layer.weight, math.sqrt(2.0), generator=generator)
                nn.init.constant_(layer.bias, 0.0)  # pyright: ignore[reportArgumentType]

    def forward(self, images: dict[str, Tensor]) -> Tensor:
        """Return features [batch, features], or [batch, outputs], float32, from images [batch, channel, height,
        width]."""
        dtype = self._gpu_dtype if images[self.groups[0]].is_cuda else torch.float32
        with torch.autocast("cuda", dtype) if dtype == torch.bfloat16 else contextlib.nullcontext():
            return self.layers(network_input(images, self._specs, dtype)).float()
