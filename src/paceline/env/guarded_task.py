"""A task whose functions are watched: host syncs, writes to the state and changing shapes become findings."""

import copy
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.env.check_env import approach_time_limit, random_actions
from paceline.env.check_task import check_results
from paceline.env.host_syncs import DetectHostWork, DetectSyncs, SyncFindings
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState, Task, overrides

REQUIRED = {
    "control": "control(state)",
    "observe": "observe(state)",
    "reward": "reward(state, terminated)",
    "terminated": "terminated(state)",
    "reset": "reset(state, uniform)",
}
HOOKS = {
    "update_state": "update_state(state, uniform)",
    "resample": "resample(state, uniform)",
    "push_velocity": "push_velocity(state)",
    "mocap_pos": "mocap_pos(state)",
    "metrics": "metrics(state)",
}
"""Functions of a step by name, with their signatures; those of `HOOKS` are optional."""
_STATE = ("qpos", "qvel", "act", "time", "sensordata", "mocap_pos")
# A function whose result has another shape in every step would have one finding per step.
_MOST_FINDINGS = 20


class Guard:
    """Watches the functions of a task, and collects what is wrong with them."""

    def __init__(self, kernels: bool = True):
        """Without `kernels` only calls into torch are watched, see `DetectHostWork`."""
        self._kernels = kernels
        self.calls: Counter[str] = Counter()
        """Number of calls of each function."""
        self.report = SyncFindings()
        self._contract: dict[str, None] = {}
        self._results: dict[str, Any] = {}

    @property
    def syncs(self) -> list[str]:
        """Operations that a CUDA graph cannot hold."""
        return self.report.texts

    @property
    def contract(self) -> list[str]:
        """Writes to the state, and results whose shapes, dtypes or names change."""
        return list(self._contract)[:_MOST_FINDINGS]

    def call(self, name: str, function: Any, state: EnvState, *arguments: Any) -> Any:
        """Call a function of the task and check what it does."""
        self.calls[name] += 1
        signature, outer, before = (REQUIRED | HOOKS)[name], self.report.caller, _versions(state)
        self.report.caller = signature
        try:
            kernels = DetectSyncs(self.report) if self._kernels else nullcontext()
            with kernels, DetectHostWork(self.report):
                result = function(state, *arguments)
        finally:
            self.report.caller = outer
        written = [name for name, version in _versions(state).items() if version != before[name]]
        if written:
            remedy = "the state is read-only: use operations that return new tensors"
            self._contract[f"{signature} writes to {', '.join(written)}: {remedy}"] = None
        kind, first = _kind(result), self._results.setdefault(name, result)
        if kind != _kind(first):
            remedy = "names, shapes and dtypes must be the same in every step"
            self._contract[f"{signature} returns {kind}, but {_kind(first)} in the first step: {remedy}"] = None
        return result


def guarded(task: Task, kernels: bool = True) -> tuple[Any, Guard]:
    """Return a copy of the task, without its cameras, whose functions are watched, and what watches them. The engine
    renders images, and not the task."""
    guard, cameras = Guard(kernels), bool(task.cameras())
    members: dict[str, Any] = {"cameras": lambda self: {}, "geom_classes": lambda self: {}}
    for name in (*REQUIRED, *HOOKS):
        if overrides(task, name):
            members[name] = _watched(guard, name, getattr(task, name))
    if cameras:
        members["observe"] = _with_policy(members["observe"])
    found = copy.copy(task)
    object.__setattr__(found, "__class__", type(type(task).__name__, (type(task),), members))
    return found, guard


def _watched(guard: Guard, name: str, function: Any) -> Any:
    return lambda _, *arguments: guard.call(name, function, *arguments)


def _with_policy(observe: Any) -> Any:
    """Return `observe` with a group "policy", which a task that observes only images lacks."""
    return lambda task, state: {"policy": torch.zeros_like(state.qpos), **observe(task, state)}


@dataclass(frozen=True)
class GuardedRun:
    """Steps of a guarded task."""

    guard: Guard
    terminated: int
    """Number of episodes that terminated."""
    truncated: int
    """Number of episodes that the time limit ended."""
    is_finite: bool
    """True if all rewards, observations and logged numbers were finite."""


def run_guarded(task: Task, num_envs: int = 6, steps: int = 64, seed: int = 1) -> GuardedRun:
    """Step an env of `task` on the C engine and watch its functions. One env fails, and every second one reaches
    its time limit."""
    watched, guard = guarded(task)
    env = RobotEnv(watched, num_envs, "mujoco", seed=seed)
    approach_time_limit(env)
    state = env.state()
    state["sim/qpos"][0] = torch.nan
    env.load_state(state)
    taken, numbers = [], list[dict[str, Tensor]]()
    try:
        with DetectSyncs(guard.report):
            for i, action in enumerate(random_actions(env, steps, seed).unbind()):
                if i % 8 == 0:
                    env.prefetch_random(8)
                taken.append(env.step(action))
            numbers.append(env.reset())
    except Exception:
        # A step cannot use results whose shapes change.
        if not guard.contract:
            raise
    numbers += [obs for s in taken for obs in (s.obs, s.final_obs, {"reward": s.reward, "log": s.log})]
    is_finite = all(bool(tensor.isfinite().all()) for tensors in numbers for tensor in tensors.values())
    terminated, truncated = (sum(int(getattr(s, name).sum()) for s in taken) for name in ("terminated", "truncated"))
    return GuardedRun(guard, terminated, truncated, is_finite)


def host_syncs(env: RobotEnv) -> list[str]:
    """Call every function of the task of an env once, on its current state, and return the operations that a CUDA graph
    cannot hold. On a CPU only the most common ones are found, in little time."""
    task, guard = guarded(env.task, kernels=env.capturable)
    check_results(task, env.env_state)
    return guard.syncs


def _versions(state: EnvState) -> dict[str, int]:
    """Return the number of writes to each tensor that a task may only read."""
    read = {
        f"state.{name}" if name in ("qpos", "qvel") else f"state.sim.{name}": getattr(state.sim, name)
        for name in _STATE
    }
    read |= {f"state.{name}": getattr(state, name) for name in ("action", "last_action", "episode_step")}
    read |= {f"state.task_state[{name!r}]": values for name, values in state.task_state.items()}
    return {name: tensor._version for name, tensor in read.items()}


def _kind(value: Any) -> str:
    """Describe names, shapes and dtypes of a result."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_kind(part)}" for name, part in value.items()) + "}"
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(_kind, value))})"
    return type(value).__name__
