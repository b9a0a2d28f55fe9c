"""Rotations as unit quaternions [env, 4], w first as in MuJoCo."""

import torch
from torch import Tensor


def product(one: Tensor, other: Tensor) -> Tensor:
    """Return the rotation by `other` followed by the rotation by `one`, [env, 4]."""
    a, b, c, d = one.unbind(1)
    w, x, y, z = other.unbind(1)
    return torch.stack(
        (
            a * w - b * x - c * y - d * z,
            a * x + b * w + c * z - d * y,
            a * y - b * z + c * w + d * x,
            a * z + b * y - c * x + d * w,
        ),
        dim=1,
    )


def difference(one: Tensor, other: Tensor) -> Tensor:
    """Return the rotation, about fixed axes, that turns `other` into `one`, [env, 4]."""
    w, x, y, z = other.unbind(1)
    return product(one, torch.stack((w, -x, -y, -z), dim=1))


def rotate(quaternion: Tensor, vectors: Tensor) -> Tensor:
    """Return each of the vectors [n, 3] rotated by each quaternion, [env, n, 3]."""
    scalar, axis = quaternion[:, None, :1], quaternion[:, None, 1:]
    cross = torch.linalg.cross(axis, vectors.unsqueeze(0))
    return vectors + 2.0 * (scalar * cross + torch.linalg.cross(axis, cross))


def angle(quaternion: Tensor) -> Tensor:
    """Return the angle of a rotation, 0 to pi, [env]. A quaternion and its negative are the same rotation."""
    # More accurate for small angles than the arc cosine of w.
    return 2.0 * torch.atan2(quaternion[:, 1:].norm(dim=1), quaternion[:, 0].abs())


def about_x_after_y(x: Tensor, y: Tensor) -> Tensor:
    """Return the rotation about y by the angle `y`, then about x by the angle `x`, [env, 4]. The angles are [env]."""
    cos_x, sin_x, cos_y, sin_y = torch.cos(0.5 * x), torch.sin(0.5 * x), torch.cos(0.5 * y), torch.sin(0.5 * y)
    return torch.stack((cos_x * cos_y, sin_x * cos_y, cos_x * sin_y, sin_x * sin_y), dim=1)
