"""The learner's step against torch's own optimiser."""

import torch

from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.settings.ppo import PpoConfig
from paceline.tasks.cartpole import Cartpole


def test_a_step_is_that_of_torchs_adam():
    learner = Ppo(RobotEnv(Cartpole(), 2), PpoConfig(hidden=(8,), learning_rate=3e-3), seed=0)
    twin = learner._flat.values.detach().clone().requires_grad_()
    adam = torch.optim.Adam([twin], lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        twin.grad = torch.randn(twin.shape, generator=generator)
        learner._flat.gradient.copy_(twin.grad)
        adam.step()
        learner._step()
        torch.testing.assert_close(learner._flat.values.detach(), twin.detach())
