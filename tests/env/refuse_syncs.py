"""Refuses, on a CPU, what a CUDA graph cannot hold, so that a task which passes here can be captured there."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mujoco
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.env.randomization import Randomization
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState, ResetState, Task, overrides


class RefusedError(Exception):
    """An operation waits for the host, has a data-dependent shape or leaves the device."""


class RefuseSyncs(TorchDispatchMode):
    """Sees every kernel that torch is about to run. Numpy is beyond it: the C engine uses that on purpose, and tasks
    are held back from it by `RefuseHost`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fault = _fault_of_kernel(func, args, kwargs)
        if fault:
            raise RefusedError(f"{func}: {fault}")
        return func(*args, **kwargs)


_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::copy")


def _fault_of_kernel(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    name = func.name().partition(".")[0]
    if torch.Tag.data_dependent_output in func.tags:
        return "takes a tensor's value to the host"
    if name in _INDEXING:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return "indexes by a mask; use torch.where or masked_fill" if masks else None
    if torch.Tag.dynamic_output_shape in func.tags:
        return "the result's shape depends on values"
    if name in _COPIES:
        devices = {tensor.device for tensor in args if isinstance(tensor, Tensor)}
        target = kwargs.get("device")
        if len(devices | ({torch.device(target)} if target is not None else set())) > 1:
            return "copies from one device to another"
    return None


class RefuseHost(TorchFunctionMode):
    """Sees every call into torch, also those that on a CPU run no kernel; for what only tasks must not do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fault = _fault_of_call(func, args, kwargs)
        if fault:
            raise RefusedError(f"{getattr(func, '__name__', func)}: {fault}")
        return func(*args, **kwargs)


_TO_HOST = (Tensor.numpy, Tensor.tolist, Tensor.cpu, Tensor.__array__)
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor)
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.eye)
_GLOBAL_RANDOMNESS = (
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial),
    *(torch.rand_like, torch.randn_like, torch.randint_like, Tensor.bernoulli, Tensor.multinomial),
    *(Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.bernoulli_, Tensor.exponential_),
)


def _fault_of_call(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    if func in _TO_HOST or (func is Tensor.to and "cpu" in (*args[1:], *kwargs.values())):
        return "takes a tensor to the host"
    if func in _FROM_HOST:
        return "copies from the host in every step; use Python numbers, or torch.full with a device"
    if func in _FACTORIES and kwargs.get("device") is None:
        return "names no device, so a GPU's task would get a CPU's tensor"
    if func in _GLOBAL_RANDOMNESS:
        return "samples from torch's global generator; random numbers come from the env"
    return None


class GuardedTask(Task):
    """A task whose functions run under both modes, may only read the state, and must return what `Task` says."""

    def __init__(self, task: Any):
        self._task = task
        self.decimation, self.episode_seconds = task.decimation, task.episode_seconds
        self.num_actions, self.num_reset_samples = task.num_actions, task.num_reset_samples
        self.num_step_samples = task.num_step_samples
        self.observation_history, self.observation_delay = task.observation_history, task.observation_delay
        self.calls: Counter[str] = Counter()
        self.controls = 0

    def model(self) -> mujoco.MjModel:
        model = self._task.model()
        self.controls = model.nu
        return model

    def control(self, state: EnvState) -> Tensor:
        with self.guard("control", state):
            control = self._task.control(state)
        return _checked("control", control, (len(state.qpos), self.controls))

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        with self.guard("observe", state):
            groups = self._task.observe(state)
        if self._task.cameras():
            # Images are rendered by the engine and not by the task, so this env has no cameras.
            groups = {"policy": torch.zeros_like(state.qpos), **groups}
        assert "policy" in groups
        for name, group in groups.items():
            _checked(f"observe: {name}", group, (len(state.qpos), *group.shape[1:]), dtype=group.dtype)
            assert group.dim() >= 2, name
        return groups

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        with self.guard("reward", state):
            terms = self._task.reward(state, terminated)
        for name, term in terms.items():
            _checked(f"reward: {name}", term, (len(state.qpos),))
        return terms

    def terminated(self, state: EnvState) -> Tensor:
        with self.guard("terminated", state):
            ended = self._task.terminated(state)
        return _checked("terminated", ended, (len(state.qpos),), dtype=torch.bool)

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        assert type(uniform) is Tensor
        with self.guard("reset", state):
            reset = self._task.reset(state, uniform)
        _checked("reset: qpos", reset.qpos, (len(uniform), -1))
        _checked("reset: qvel", reset.qvel, (len(uniform), -1))
        self.check_entries("reset", reset.task_state, len(uniform))
        return reset

    def constants(self) -> dict[str, tuple[float, ...]]:
        return self._task.constants()

    def state_spec(self) -> dict[str, int]:
        return self._task.state_spec()

    def randomized_fields(self) -> tuple[Randomization, ...]:
        return self._task.randomized_fields()

    def check_entries(self, function: str, entries: dict[str, Tensor], num_envs: int) -> dict[str, Tensor]:
        for name, values in entries.items():
            _checked(f"{function}: {name}", values, (num_envs, self.state_spec()[name]))
        return entries

    @contextmanager
    def guard(self, function: str, state: EnvState) -> Iterator[None]:
        self.calls[function] += 1
        before = _versions(state)
        with RefuseSyncs(), RefuseHost():
            yield
        written = [name for name, version in _versions(state).items() if version != before[name]]
        assert not written, f"{function} wrote to {written}"


def _versions(state: EnvState) -> dict[str, int]:
    """Return the number of writes to each tensor that a task may only read."""
    names = ("qpos", "qvel", "act", "time", "sensordata")
    read = {name: getattr(state.sim, name) for name in names}
    read |= {"action": state.action, "last_action": state.last_action, "episode_step": state.episode_step}
    read |= state.task_state
    for name, tensor in read.items():
        assert type(tensor) is Tensor, name
    return {name: tensor._version for name, tensor in read.items()}


def _checked(what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    assert type(value) is Tensor, f"{what} is {type(value)}, not a tensor"
    assert value.dtype == dtype, f"{what} is {value.dtype}, not {dtype}"
    fits = value.dim() == len(shape) and all(want in (-1, have) for want, have in zip(shape, value.shape, strict=True))
    assert fits, f"{what} has shape {tuple(value.shape)}, not {shape}"
    return value


def _update_state(self: Any, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
    with self.guard("update_state", state):
        entries = self._task.update_state(state, uniform)
    return self.check_entries("update_state", entries, len(uniform))


def _resample(self: Any, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
    with self.guard("resample", state):
        entries = self._task.resample(state, uniform)
    return self.check_entries("resample", entries, len(uniform))


def _push_velocity(self: Any, state: EnvState) -> Tensor:
    with self.guard("push_velocity", state):
        change = self._task.push_velocity(state)
    return _checked("push_velocity", change, tuple(state.qvel.shape))


def _mocap_pos(self: Any, state: EnvState) -> Tensor:
    with self.guard("mocap_pos", state):
        positions = self._task.mocap_pos(state)
    return _checked("mocap_pos", positions, tuple(state.sim.mocap_pos.shape))


def _metrics(self: Any, state: EnvState) -> dict[str, Tensor]:
    with self.guard("metrics", state):
        metrics = self._task.metrics(state)
    for name, metric in metrics.items():
        _checked(f"metrics: {name}", metric, (len(state.qpos),))
    return metrics


HOOKS = {
    "update_state": _update_state,
    "resample": _resample,
    "push_velocity": _push_velocity,
    "mocap_pos": _mocap_pos,
    "metrics": _metrics,
}


def guarded(task: Task) -> GuardedTask:
    """Return the task with guards around its functions, and around the hooks that it overrides."""
    return type("Guarded", (GuardedTask,), {name: hook for name, hook in HOOKS.items() if overrides(task, name)})(task)


@dataclass(frozen=True)
class Happened:
    calls: Counter[str]
    """Number of calls of each function of the task."""
    terminated: int
    truncated: int


def run_refusing_syncs(task: Task, num_envs: int = 6, steps: int = 64) -> Happened:
    """Step an env of `task` on the C engine while everything is refused that a CUDA graph could not hold. One env fails
    and every second reaches its time limit."""
    watched = guarded(task)
    env = RobotEnv(watched, num_envs, "mujoco", seed=1)
    state = env.state()
    state["sim/qpos"][0] = torch.nan
    state["episode_step"][1::2] = env.max_episode_steps - steps // 2
    env.load_state(state)

    actions = torch.randn(steps, num_envs, env.num_actions, generator=torch.Generator().manual_seed(0))
    taken = []
    with RefuseSyncs():
        for i, action in enumerate(actions.unbind()):
            if i % 8 == 0:
                env.prefetch_random(8)
            taken.append(env.step(action))
        first_obs = env.reset()

    for step in taken:
        for numbers in (step.reward, step.log, *step.obs.values(), *step.final_obs.values(), *first_obs.values()):
            assert torch.isfinite(numbers).all()
    terminated, truncated = (sum(int(getattr(s, name).sum()) for s in taken) for name in ("terminated", "truncated"))
    return Happened(watched.calls, terminated, truncated)
