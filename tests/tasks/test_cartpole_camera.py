"""A small camera and a small encoder learn to balance the pole on a CPU."""

from dataclasses import replace
from statistics import fmean

import pytest

from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole_camera import ENTRY, CartpoleCamera


def test_episodes_become_longer(monkeypatch: pytest.MonkeyPatch):
    # Threads of torch would compete with other tests.
    monkeypatch.setattr("paceline.distributed.rank.usable_cores", lambda: 1)
    task = CartpoleCamera(camera=replace(CartpoleCamera().camera, width=48, height=24, fovy=40.0))
    settings = replace(
        PpoSettings.from_training(ENTRY.training),
        learning_rate=1e-3,
        image_channels=(8, 16),
        image_kernels=(6, 3),
        image_strides=(3, 2),
        image_features=64,
    )
    learner = Ppo(RobotEnv(task, 32, threads=1), settings, seed=0)
    lengths = []
    for _ in range(50):
        metrics = learner.learn()
        lengths.append(metrics["length"] / max(1.0, metrics["episodes"]))
    assert fmean(lengths[-5:]) > 1.4 * fmean(lengths[1:6])
