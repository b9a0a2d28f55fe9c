"""Our step against torch's own optimiser."""

import torch
from torch import nn

from paceline.tensors.flat import FlatAdam, FlatParameters


def test_a_step_is_that_of_torchs_adam():
    flat = FlatParameters([nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4))], [nn.Parameter(torch.ones(5))])
    ours = FlatAdam(flat, 3e-3)
    twin = flat.values.detach().clone().requires_grad_()
    adam = torch.optim.Adam([twin], lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        twin.grad = torch.randn(twin.shape, generator=generator)
        flat.gradient.copy_(twin.grad)
        adam.step()
        ours.step()
        torch.testing.assert_close(flat.values.detach(), twin.detach())
