"""Images of many envs or streams as one picture for people."""

import math

import torch
from torch import Tensor

# Colors of classes and geoms, which repeat.
_PALETTE = torch.tensor(
    [[40, 40, 40], [230, 75, 60], [60, 160, 230], [80, 190, 90], [240, 190, 50], [160, 90, 200], [240, 130, 180]],
    dtype=torch.uint8,
)


def to_rgb(image: Tensor, far: float = 1.0, frames: int = 1) -> Tensor:
    """Return an image [..., channel, height, width] of any stream as RGB, uint8 [..., 3, height, width].

    Bytes with three channels are colors. Floats with one channel are depths, black at `far`; floats with three channels
    are normals. Other images show the colors of classes or geoms. Of `frames` stacked images, the newest is shown.
    """
    channels = image.shape[-3] // frames
    image = image[..., -channels:, :, :]
    if channels == 3:
        is_color = image.dtype == torch.uint8
        return image if is_color else ((image.float() + 1.0) * 127.5).round().to(torch.uint8)
    newest = image[..., -1, :, :]
    if image.dtype.is_floating_point:
        gray = (255.0 * (1.0 - newest.float() / far)).clamp(0.0, 255.0).round().to(torch.uint8)
        return torch.stack((gray, gray, gray), dim=-3)
    # The background has the first color: class 0, or geom -1.
    index = newest.long() + (newest.dtype == torch.int32)
    return _PALETTE.to(image.device)[index % len(_PALETTE)].movedim(-1, -3)


def mosaic(images: Tensor, columns: int | None = None) -> Tensor:
    """Return images [image, 3, height, width] side by side in rows, [3, rows * height, columns * width]. The default of
    `columns` is about the number of rows; empty places are black."""
    count, channels, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    places = images.new_zeros(rows * columns, channels, height, width)
    places[:count] = images
    return (
        places.view(rows, columns, channels, height, width)
        .permute(2, 0, 3, 1, 4)
        .reshape(channels, rows * height, columns * width)
    )
