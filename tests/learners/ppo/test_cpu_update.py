"""Actor and critic side by side, against autograd on each."""

import pytest
import torch

from paceline.learners.networks import mlp, plain
from paceline.learners.ppo.cpu_update import Twins
from paceline.tensors.flat import FlatParameters


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh"])
@pytest.mark.parametrize("hidden", [(8,), (8, 6), (8, 6, 5)])
def test_outputs_and_gradient_are_those_of_the_two_networks(activation: str, hidden: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    actor, critic = mlp(3, hidden, 4, activation, 1.0, generator), mlp(5, hidden, 1, activation, 1.0, generator)
    flat = FlatParameters(list(actor.parameters()), list(critic.parameters()))
    inputs = torch.randn(7, 3, generator=generator), torch.randn(7, 5, generator=generator)
    weights = torch.randn(7, 4, generator=generator), torch.randn(7, 1, generator=generator)
    outputs = actor(inputs[0]), critic(inputs[1])
    flat.differentiate((outputs[0] * weights[0]).sum() + (outputs[1] * weights[1]).sum())
    expected = flat.gradient.clone()
    flat.gradient.copy_(flat.spread(torch.full_like(flat.dense(expected), torch.nan)))

    twins = Twins((actor, critic), flat)
    with torch.no_grad():
        for ours, theirs in zip(twins.forward(inputs), outputs, strict=True):
            torch.testing.assert_close(ours, theirs)
        twins.backward(weights)
    torch.testing.assert_close(flat.gradient, expected)


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh"])
def test_a_network_as_a_plain_function_follows_its_parameters(activation: str):
    network = mlp(3, (8, 6), 2, activation, 1.0, torch.Generator().manual_seed(0))
    rows, run = torch.randn(5, 3), plain(network)
    with torch.no_grad():
        list(network.parameters())[2].mul_(2.0)
        assert torch.equal(run(rows), network(rows))
