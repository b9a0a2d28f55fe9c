"""FlatAdam against torch's own optimizer."""

import torch
from torch import nn

from paceline.tensors.flat import FlatAdam, FlatParameters


def test_a_step_equals_that_of_torch_adam():
    flat = FlatParameters([nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4))], [nn.Parameter(torch.ones(5))])
    adam_flat = FlatAdam(flat, 3e-3)
    other = flat.values.detach().clone().requires_grad_()
    adam = torch.optim.Adam([other], lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        other.grad = torch.randn(other.shape, generator=generator)
        flat.gradient.copy_(other.grad)
        adam.step()
        adam_flat.step()
        torch.testing.assert_close(flat.values.detach(), other.detach())
