"""Every task keeps to what a CUDA graph can hold; and the check finds what it is there to find."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.env.guarded_task import HOOKS, REQUIRED, guarded, run_guarded
from paceline.env.host_syncs import DetectHostWork, DetectSyncs
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState, ResetState, overrides
from paceline.tasks import registry
from paceline.tasks.cartpole import Cartpole
from tests.cameras.small import with_small_camera

VALUES = torch.arange(6.0)
MASK = VALUES > 2.0
PLACES = torch.tensor([0, 2])

SYNCS: dict[str, Callable[[], object]] = {
    "if": lambda: 1 if MASK[0] else 2,
    "not": lambda: not MASK[0],
    "item": lambda: VALUES[0].item(),
    "float": lambda: float(VALUES[0]),
    "int": lambda: int(PLACES[0]),
    "range": lambda: range(PLACES[1]),
    "index by a tensor without dimension": lambda: VALUES[PLACES[0]],
    "contains": lambda: 3.0 in VALUES,
    "format": lambda: f"{VALUES[0]}",
    "max as a number": lambda: max(VALUES),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "allclose": lambda: torch.allclose(VALUES, VALUES),
    "nonzero": lambda: VALUES.nonzero(),
    "argwhere": lambda: VALUES.argwhere(),
    "where with one argument": lambda: torch.where(MASK),
    "read by mask": lambda: VALUES[MASK],
    "read by mask of bytes": lambda: torch.ops.aten.index(VALUES, [MASK.byte()]),
    "write by mask": lambda: VALUES.clone().__setitem__(MASK, 1.0),
    "write tensor by mask": lambda: VALUES.clone().__setitem__(MASK, torch.ones(3)),
    "add by mask": lambda: VALUES.index_put((MASK,), torch.ones(3), accumulate=True),
    "read by mask beside a slice": lambda: torch.zeros(2, 6)[:, MASK],
    "masked_select": lambda: VALUES.masked_select(MASK),
    "unique": lambda: VALUES.unique(),
    "unique_consecutive": lambda: VALUES.unique_consecutive(),
    "bincount": lambda: PLACES.bincount(),
    "repeat_interleave by a tensor": lambda: PLACES.repeat_interleave(PLACES),
    "to another device": lambda: VALUES.to("meta"),
    "copy to another device": lambda: torch.empty(6, device="meta").copy_(VALUES),
}

# On a CPU these run no kernel, or one that the engine may use too: only calls from a task are refused.
HOST_WORK: dict[str, Callable[[], object]] = {
    "numpy": lambda: VALUES.numpy(),
    "asarray": lambda: np.asarray(VALUES),
    "numpy function": lambda: np.stack([VALUES]),
    "tolist": lambda: VALUES.tolist(),
    "cpu": lambda: VALUES.cpu(),
    "to cpu": lambda: VALUES.to("cpu"),
    "to device cpu": lambda: VALUES.to(device="cpu"),
    "tensor": lambda: torch.tensor([1.0, 2.0], device="cpu"),
    "number as tensor": lambda: torch.tensor(1.0, device="cpu"),
    "as_tensor": lambda: torch.as_tensor([1.0], device="cpu"),
    "new_tensor": lambda: VALUES.new_tensor([1.0]),
    "zeros without a device": lambda: torch.zeros(3),
    "arange without a device": lambda: torch.arange(3),
    "rand": lambda: torch.rand(3, device="cpu"),
    "randn_like": lambda: torch.randn_like(VALUES),
    "uniform_": lambda: VALUES.clone().uniform_(),
}

HARMLESS: dict[str, Callable[[], object]] = {
    "where": lambda: torch.where(MASK, 0.0, VALUES),
    "masked_fill": lambda: VALUES.masked_fill(MASK, 0.0),
    "index by numbers": lambda: VALUES[PLACES],
    "write by numbers": lambda: VALUES.clone().index_put_((PLACES,), VALUES[:2]),
    "gather": lambda: VALUES.gather(0, PLACES),
    "write to a slice": lambda: VALUES.clone().__setitem__(slice(0, 2), 1.0),
    "any, kept as a tensor": lambda: MASK.any(),
    "clamp, norm, stack": lambda: torch.stack((VALUES.clamp(-1.0, 1.0).norm(), VALUES.max())),
    "another type": lambda: MASK.float().to(torch.float64),
    "zeros on a device": lambda: torch.zeros(3, device=VALUES.device),
    "like": lambda: torch.ones_like(VALUES).copy_(VALUES),
    "length and shape": lambda: range(len(VALUES), VALUES.shape[0]),
}


@pytest.mark.parametrize("name", SYNCS)
def test_host_syncs_and_data_dependent_shapes_are_found(name: str):
    found = list[str]()
    with DetectSyncs(found.append):
        SYNCS[name]()
    assert found


@pytest.mark.parametrize("name", HOST_WORK)
def test_work_on_the_host_is_found(name: str):
    found = list[str]()
    with DetectHostWork(found.append):
        HOST_WORK[name]()
    assert found


@pytest.mark.parametrize("name", ["if", "not", "item", "float", "int", "nonzero", "read by mask", "write by mask"])
def test_the_most_common_syncs_are_found_without_kernels(name: str):
    found = list[str]()
    with DetectHostWork(found.append):
        SYNCS[name]()
    assert found


@pytest.mark.parametrize("name", HARMLESS)
def test_work_on_the_device_is_let_through(name: str):
    found = list[str]()
    with DetectSyncs(found.append), DetectHostWork(found.append):
        HARMLESS[name]()
    assert not found


class BranchingReward(Cartpole):
    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        return super().reward(state, terminated) if terminated.any() else super().reward(state, ~terminated)


class MaskedObservation(Cartpole):
    def observe(self, state: EnvState) -> dict[str, Tensor]:
        obs = torch.cat((state.qpos, state.qvel), dim=1)
        obs[obs > 1.0] = 1.0
        return {"policy": obs}


class NumpyControl(Cartpole):
    def control(self, state: EnvState) -> Tensor:
        return torch.clamp(state.action, *np.quantile(state.action, (0.0, 1.0)).tolist())


class RandomReset(Cartpole):
    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        return super().reset(state, torch.rand_like(uniform))


@pytest.mark.parametrize(
    ("task", "finding"),
    [
        (BranchingReward, r"reward\(state, terminated\) in test_capturable.py:\d+, `return super.*torch.where"),
        (MaskedObservation, r"observe\(state\) in test_capturable.py:\d+, `obs\[obs > 1.0\] = 1.0`: .*masked_fill"),
        (NumpyControl, r"control\(state\) in test_capturable.py:\d+, .*: takes a tensor to the host"),
        (RandomReset, r"reset\(state, uniform\) in test_capturable.py:\d+, .*: samples from .*num_reset_samples"),
    ],
)
def test_a_task_that_cannot_be_captured_is_found_once_with_its_line(task: type[Cartpole], finding: str):
    (found,) = run_guarded(task()).guard.syncs
    assert re.match(finding, found), found


class WritingReward(Cartpole):
    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        state.qvel.mul_(0.5)
        return super().reward(state, terminated)


class GrowingReward(Cartpole):
    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        calls.append(1)
        more = {"late": torch.zeros_like(state.qpos[:, 0])} if len(calls) > 10 else {}
        return super().reward(state, terminated) | more


calls = list[int]()


@pytest.mark.parametrize(
    ("task", "finding"),
    [
        (WritingReward, "reward(state, terminated) writes to state.qvel: the state is read-only"),
        (GrowingReward, "'late': float32 [6]}, but "),
    ],
)
def test_a_task_that_breaks_its_contract_is_found(task: type[Cartpole], finding: str):
    watched, guard = guarded(task())
    env = RobotEnv(watched, 6)
    with contextlib.suppress(RuntimeError):
        for _ in range(12):
            env.step(torch.zeros(6, 1))
    (found,) = guard.contract
    assert finding in found


@pytest.mark.parametrize(
    "name", [name for name in registry.names() if not isinstance(registry.find(name), registry.EnvEntry)]
)
def test_every_task_can_be_captured(name: str):
    task = with_small_camera(registry.find(name).task())
    run = run_guarded(task)
    assert (run.guard.syncs, run.guard.contract, run.is_finite) == ([], [], True)
    assert run.terminated >= 1
    assert run.truncated >= 1
    for function in (*REQUIRED, *(hook for hook in HOOKS if overrides(task, hook))):
        assert run.guard.calls[function] >= 64, function


@dataclass(frozen=True)
class Quiet(Cartpole):
    """A task without its own terminations: what ends here is the env's doing."""

    def terminated(self, state: EnvState) -> Tensor:
        return torch.zeros_like(state.episode_step, dtype=torch.bool)


def test_the_check_sees_a_failed_env_and_three_time_limits():
    run = run_guarded(Quiet(), num_envs=6, steps=64)
    assert (run.terminated, run.truncated) == (1, 3)


def test_a_guarded_task_gives_what_the_task_gives():
    plain, watched = (RobotEnv(task, 4, seed=3) for task in (Cartpole(), guarded(Cartpole())[0]))
    for i in range(50):
        action = torch.full((4, 1), (-1.0) ** i)
        assert torch.equal(plain.step(action).obs["policy"], watched.step(action).obs["policy"])
