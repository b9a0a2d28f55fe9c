"""BatchedActorCritic against autograd on each network."""

import pytest
import torch

from paceline.learners.networks import eager_forward, mlp
from paceline.learners.ppo.cpu_update import BatchedActorCritic
from paceline.tensors.flat import FlatParameters


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh"])
@pytest.mark.parametrize("hidden", [(8,), (8, 6), (8, 6, 5)])
def test_outputs_and_gradient_equal_those_of_the_two_networks(activation: str, hidden: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    actor, critic = mlp(3, hidden, 4, activation, 1.0, generator), mlp(5, hidden, 1, activation, 1.0, generator)
    flat = FlatParameters(list(actor.parameters()), list(critic.parameters()))
    inputs = torch.randn(7, 3, generator=generator), torch.randn(7, 5, generator=generator)
    weights = torch.randn(7, 4, generator=generator), torch.randn(7, 1, generator=generator)
    outputs = actor(inputs[0]), critic(inputs[1])
    flat.backward((outputs[0] * weights[0]).sum() + (outputs[1] * weights[1]).sum())
    expected = flat.gradient.clone()
    flat.gradient.copy_(flat.pad(torch.full_like(flat.unpad(expected), torch.nan)))

    batched = BatchedActorCritic((actor, critic), flat)
    with torch.no_grad():
        for output, expected_output in zip(batched.forward(inputs), outputs, strict=True):
            torch.testing.assert_close(output, expected_output)
        batched.backward(weights)
    torch.testing.assert_close(flat.gradient, expected)


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh"])
def test_eager_forward_uses_the_current_parameters(activation: str):
    network = mlp(3, (8, 6), 2, activation, 1.0, torch.Generator().manual_seed(0))
    rows, forward = torch.randn(5, 3), eager_forward(network)
    with torch.no_grad():
        list(network.parameters())[2].mul_(2.0)
        assert torch.equal(forward(rows), network(rows))
