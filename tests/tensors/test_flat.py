import torch
from torch import nn

from paceline.tensors.flat import FlatParameters


def test_one_buffer_holds_all_parameters_and_one_their_gradient():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    other.load_state_dict(module.state_dict())
    flat = FlatParameters(list(module[0].parameters()), list(module[2].parameters()))
    rows = torch.randn(5, 3)
    flat.backward(module(rows).square().sum())
    expected = torch.autograd.grad(other(rows).square().sum(), list(other.parameters()))
    expected = torch.cat([part.flatten() for part in expected])
    torch.testing.assert_close(flat.unpad(flat.gradient), expected)
    torch.testing.assert_close(flat.pad(expected), flat.gradient)
    assert all(parameter.data_ptr() % 16 == 0 for parameter in module.parameters())
    with torch.no_grad():
        flat.values.zero_()
    assert all(not parameter.any() for parameter in module.parameters())


def test_each_group_is_clipped_by_its_own_norm():
    modules = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    flat = FlatParameters(*(list(module.parameters()) for module in modules))
    flat.gradient.copy_(flat.pad(torch.tensor([3.0, 4.0, 0.3, 0.4])))
    torch.testing.assert_close(torch.stack(flat.clip(1.0)), torch.tensor([5.0, 0.5]))
    torch.testing.assert_close(flat.unpad(flat.gradient), torch.tensor([0.6, 0.8, 0.3, 0.4]))
