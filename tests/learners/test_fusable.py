"""What a GPU compiles, traced here without one: each stretch must be a single graph, and compute the same."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.learners.non_finite import Recorder
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.objective import objective
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks import registry
from tests.env.lively import Lively
from tests.env.refuse_syncs import RefuseSyncs

SMALL = PpoSettings(horizon=4, epochs=1, minibatches=2, hidden=(8,))


def compiled(work: Any) -> Any:
    """As `env.graph.fuse` compiles it, up to where a GPU's code would be written."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    return torch.compile(work, fullgraph=True, dynamic=False, backend="aot_eager")


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if dataclasses.is_dataclass(result):
        result = list(vars(result).values())
    return [t for part in (result.values() if isinstance(result, dict) else result or ()) for t in tensors(part)]


TASKS = {name: registry.find(name).task for name in registry.names()} | {"lively": Lively}


@pytest.mark.parametrize("name", TASKS)
def test_an_env_step_is_three_graphs_around_the_physics(name: str):
    plain, fused = (RobotEnv(TASKS[name](), 5, seed=2) for _ in range(2))
    for stretch in ("_apply", "_judge", "_observe"):
        setattr(fused, stretch, compiled(getattr(fused, stretch)))
    for env in (plain, fused):
        state = env.state()
        # A GPU always computes what is done about an env that blew up.
        state["sim/qpos"][0] = torch.nan
        env.load_state(state)
    actions = torch.linspace(-2.0, 2.0, 5 * plain.num_actions).view(5, plain.num_actions)
    with torch.no_grad():
        for _ in range(4):
            for ours, theirs in zip(tensors(fused.step(actions)), tensors(plain.step(actions)), strict=True):
                torch.testing.assert_close(ours, theirs)
    assert plain.faults().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("refusing", [False, True], ids=["as one graph", "without the host"])
def test_the_search_for_numbers_that_are_not_finite_can_be_captured(refusing: bool):
    env = RobotEnv(Lively(), 5, first_env=20)
    recorder = Recorder(env, env.reset())
    # As on a GPU.
    recorder._on_cpu = False
    recorder._keep = recorder._keep_first if refusing else compiled(recorder._keep_first)
    for broken in (2, 4, 5):
        recorder.begin(env.reset())
        for number in range(1, 5):
            step = env.step(torch.zeros(5, 1))
            if number == broken:
                step.obs["policy"][3, 1] = torch.inf
            with RefuseSyncs() if refusing else nullcontext():
                recorder.add(step)
        said = f'obs["policy"][:, 1] of env 23 became inf in step {broken} of the rollout'
        assert recorder.find() == (said if broken < 5 else None)


def test_the_randomization_of_the_model_is_a_graph(monkeypatch: pytest.MonkeyPatch):
    plain = RobotEnv(Lively(episode_seconds=0.1), 5, seed=2)
    monkeypatch.setattr("paceline.env.randomization.fuse", lambda work, device: compiled(work))
    fused = RobotEnv(Lively(episode_seconds=0.1), 5, seed=2)
    before = plain.sim.field("dof_armature").clone()
    for _ in range(12):
        fused.step(torch.zeros(5, 1))
        plain.step(torch.zeros(5, 1))
    for name in ("body_mass", "dof_armature", "dof_damping"):
        torch.testing.assert_close(fused.sim.field(name), plain.sim.field(name))
    assert not torch.equal(before, plain.sim.field("dof_armature"))


def test_the_stretches_of_ppo_are_graphs():
    plain, fused = (Ppo(RobotEnv(registry.find("cartpole").task(), 6), SMALL, seed=0) for _ in range(2))
    for stretch in ("_act", "_samples", "_losses", "_tame"):
        setattr(fused, stretch, compiled(getattr(fused, stretch)))
    fused._collect, fused._improve = torch.no_grad()(fused._roll_out), torch.no_grad()(fused._update)
    fused._differentiate = fused._differentiate_compiled
    for _ in range(2):
        ours, theirs = fused.learn(), plain.learn()
        for name in theirs:
            if not name.startswith("seconds/"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_the_objective_is_a_graph():
    mean, value = torch.randn(8, 2, requires_grad=True), torch.randn(8, requires_grad=True)
    log_std = torch.zeros(2, requires_grad=True)
    action, scalars = torch.randn(8, 2), torch.randn(8, 4).unbind(1)
    work = compiled(lambda: objective(mean, log_std, value, action, scalars, SMALL))
    ours = torch.autograd.grad(work()[0], (mean, log_std, value))
    theirs = torch.autograd.grad(objective(mean, log_std, value, action, scalars, SMALL)[0], (mean, log_std, value))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
