"""Pictures of many images."""

import torch

from paceline.cameras.mosaic import mosaic, to_rgb


def test_mosaic_places_images_in_rows() -> None:
    images = torch.stack([torch.full((3, 2, 4), value, dtype=torch.uint8) for value in (10, 20, 30)])
    picture = mosaic(images)
    assert picture.shape == (3, 4, 8)
    assert picture[0, 0].tolist() == [10] * 4 + [20] * 4
    assert picture[0, 2].tolist() == [30] * 4 + [0] * 4
    assert mosaic(images, columns=3).shape == (3, 2, 12)


def test_every_stream_becomes_a_color_image() -> None:
    rgb = torch.randint(256, (2, 6, 4, 5), dtype=torch.uint8)
    # The newest of two frames.
    assert torch.equal(to_rgb(rgb, frames=2), rgb[:, 3:])
    depth = torch.tensor([0.0, 5.0, 10.0]).half().view(1, 1, 1, 3)
    assert to_rgb(depth, far=10.0)[0, 0, 0].tolist() == [255, 128, 0]
    # Three depths are not a normal.
    stacked = torch.cat((torch.zeros(1, 2, 1, 3).half(), depth), dim=1)
    assert torch.equal(to_rgb(stacked, far=10.0, frames=3), to_rgb(depth, far=10.0))
    ids = torch.tensor([-1, 0, 1], dtype=torch.int32).view(1, 1, 1, 3)
    classes = torch.tensor([0, 1, 2], dtype=torch.uint8).view(1, 1, 1, 3)
    assert torch.equal(to_rgb(ids), to_rgb(classes))
    assert len({tuple(pixel) for pixel in to_rgb(ids)[0, :, 0].T.tolist()}) == 3
    assert to_rgb(torch.zeros(1, 3, 2, 2).half()).unique().tolist() == [128]
