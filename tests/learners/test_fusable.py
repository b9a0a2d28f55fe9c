"""Functions that are compiled on a GPU, traced here without one: each must be one graph and compute the same."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo.objective import objective
from paceline.learners.ppo.recurrent import make_ppo
from paceline.learners.ppo.samples import Samples
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks import registry
from tests.cameras.small import with_small_camera
from tests.env.lively import Lively

SMALL = PpoSettings(horizon=4, epochs=1, minibatches=2, hidden=(8,))


def compiled(work: Any) -> Any:
    """Compile as `tensors.graph.fuse` does, up to the generation of GPU code."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    return torch.compile(work, fullgraph=True, dynamic=False, backend="aot_eager")


@contextmanager
def fused(module: str = "paceline.tensors.graph") -> Iterator[None]:
    """Compile what is fused, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.fuse", lambda work, device: compiled(work))
        yield


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if dataclasses.is_dataclass(result):
        result = list(vars(result).values())
    return [t for part in (result.values() if isinstance(result, dict) else result or ()) for t in tensors(part)]


TASKS = {name: registry.find(name).task for name in registry.names()} | {"lively": Lively}


@pytest.mark.parametrize("name", TASKS)
def test_the_functions_of_an_env_step_are_graphs(name: str):
    task = with_small_camera(TASKS[name]())
    eager = RobotEnv(task, 5, seed=2)
    with fused():
        graphs = RobotEnv(task, 5, seed=2)
    for env in (eager, graphs):
        state = env.state()
        # A GPU always computes the reset of an env that diverged.
        state["sim/qpos"][0] = torch.nan
        env.load_state(state)
    actions = torch.linspace(-2.0, 2.0, 5 * eager.num_actions).view(5, eager.num_actions)
    with torch.no_grad():
        for _ in range(4):
            for found, expected in zip(tensors(graphs.step(actions)), tensors(eager.step(actions)), strict=True):
                torch.testing.assert_close(found, expected)
    assert eager.faults().tolist() == [1.0, 0.0]


def test_randomization_of_the_model_is_a_graph():
    eager = RobotEnv(Lively(episode_seconds=0.1), 5, seed=2)
    with fused():
        graphs = RobotEnv(Lively(episode_seconds=0.1), 5, seed=2)
    before = eager.sim.field("dof_armature").clone()
    for _ in range(12):
        graphs.step(torch.zeros(5, 1))
        eager.step(torch.zeros(5, 1))
    for name in ("body_mass", "dof_armature", "dof_damping"):
        torch.testing.assert_close(graphs.sim.field(name), eager.sim.field(name))
    assert not torch.equal(before, eager.sim.field("dof_armature"))


@pytest.mark.parametrize("rnn_type", ["none", "lstm", "gru"])
def test_the_functions_of_ppo_are_graphs(rnn_type: Any):
    config = dataclasses.replace(SMALL, rnn_type=rnn_type, rnn_hidden_size=8)
    eager = make_ppo(RobotEnv(registry.find("cartpole").task(), 6), config, seed=0)
    with fused("paceline.learners.ppo.ppo"), fused("paceline.learners.ppo.recurrent"):
        graphs = make_ppo(RobotEnv(registry.find("cartpole").task(), 6), config, seed=0, gpu_update=True)
    for _ in range(2):
        found, expected = graphs.learn(), eager.learn()
        for name in expected:
            if not name.startswith("seconds/"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_the_objective_is_a_graph():
    mean, value = torch.randn(8, 2, requires_grad=True), torch.randn(8, requires_grad=True)
    log_std = torch.zeros(2, requires_grad=True)
    samples = Samples({}, torch.randn(8, 2), torch.randn(8, 2), *torch.randn(8, 4).unbind(1))
    work = compiled(lambda: objective(mean, log_std, value, samples, SMALL))
    found = torch.autograd.grad(work()[0], (mean, log_std, value))
    expected = torch.autograd.grad(objective(mean, log_std, value, samples, SMALL)[0], (mean, log_std, value))
    torch.testing.assert_close(found, expected)
