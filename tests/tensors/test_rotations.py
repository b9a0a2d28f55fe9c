"""Compare quaternions with those of MuJoCo."""

import math
from collections.abc import Callable

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.tensors import rotations


def some(count: int, seed: int) -> Tensor:
    numbers = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers / numbers.norm(dim=1, keepdim=True)


def by_mujoco(function: Callable[..., None], width: int, *rows: Tensor) -> Tensor:
    made = torch.zeros(len(rows[0]), width, dtype=torch.float64)
    for result, *given in zip(made.numpy(), *(row.numpy() for row in rows), strict=True):
        function(result, *given)
    return made


def about(axis: tuple[float, float, float], angle: float) -> np.ndarray:
    made = np.zeros(4)
    mujoco.mju_axisAngle2Quat(made, np.array(axis), angle)
    return made


def test_a_product_is_one_rotation_after_the_other():
    one, other = some(20, 0), some(20, 1)
    torch.testing.assert_close(rotations.product(one, other), by_mujoco(mujoco.mju_mulQuat, 4, one, other))


def test_a_difference_turns_the_other_into_the_one():
    one, other = some(20, 0), some(20, 1)
    torch.testing.assert_close(rotations.product(rotations.difference(one, other), other), one)


def test_an_angle_is_the_length_of_the_rotation_vector():
    quaternions = some(50, 2)
    vectors = by_mujoco(lambda made, quaternion: mujoco.mju_quat2Vel(made, quaternion, 1.0), 3, quaternions)
    torch.testing.assert_close(rotations.angle(quaternions), vectors.norm(dim=1))


def test_a_quaternion_and_its_negative_turn_by_the_same_angle():
    quaternions = some(50, 3)
    torch.testing.assert_close(rotations.angle(quaternions), rotations.angle(-quaternions))


@pytest.mark.parametrize("angle", [0.0, 1e-4, 0.1, math.pi / 2, math.pi])
def test_small_and_large_angles_are_exact_in_single_precision(angle: float):
    quaternion = torch.tensor(about((0.6, 0.0, 0.8), angle)).float().unsqueeze(0)
    assert rotations.angle(quaternion).item() == pytest.approx(angle, rel=1e-5, abs=1e-7)


def test_the_rotation_about_y_precedes_that_about_x():
    x, y = torch.tensor([0.3, -2.0]), torch.tensor([1.1, 0.4])
    for made, a, b in zip(rotations.about_x_after_y(x, y), x.tolist(), y.tolist(), strict=True):
        expected = np.zeros(4)
        mujoco.mju_mulQuat(expected, about((1.0, 0.0, 0.0), a), about((0.0, 1.0, 0.0), b))
        assert made.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
