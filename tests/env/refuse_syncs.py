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
from paceline.env.task import (
    AnyTask,
    HasConstants,
    HasSenses,
    Measures,
    Pushes,
    Randomizes,
    Resamples,
    Senses,
    Start,
    TaskWithMemory,
    Worlds,
)


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
    name = func._schema.name
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
        return "draws from torch's global generator; random numbers come from the env"
    return None


class GuardedTask:
    """A task whose functions run under both modes, may only read their worlds, and must return what `Task` says."""

    def __init__(self, task: Any):
        self._task = task
        self.decimation, self.episode_seconds = task.decimation, task.episode_seconds
        self.num_actions, self.reset_numbers = task.num_actions, task.reset_numbers
        self.calls: Counter[str] = Counter()
        self.controls = 0

    def model(self) -> mujoco.MjModel:
        model = self._task.model()
        self.controls = model.nu
        return model

    def control(self, worlds: Worlds) -> Tensor:
        with self.guard("control", worlds):
            control = self._task.control(worlds)
        return _checked("control", control, (len(worlds.qpos), self.controls))

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        with self.guard("observe", worlds):
            groups = self._task.observe(worlds)
        assert "policy" in groups
        for name, group in groups.items():
            _checked(f"observe: {name}", group, (len(worlds.qpos), *group.shape[1:]), dtype=group.dtype)
            assert group.dim() >= 2, name
        return groups

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        with self.guard("reward", worlds):
            terms = self._task.reward(worlds, terminated)
        for name, term in terms.items():
            _checked(f"reward: {name}", term, (len(worlds.qpos),))
        return terms

    def terminated(self, worlds: Worlds) -> Tensor:
        with self.guard("terminated", worlds):
            ended = self._task.terminated(worlds)
        return _checked("terminated", ended, (len(worlds.qpos),), dtype=torch.bool)

    def reset(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        assert type(uniform) is Tensor
        with self.guard("reset", None):
            qpos, qvel = self._task.reset(uniform)
        return _checked("reset: qpos", qpos, (len(uniform), -1)), _checked("reset: qvel", qvel, (len(uniform), -1))

    @contextmanager
    def guard(self, function: str, worlds: Worlds | None) -> Iterator[None]:
        self.calls[function] += 1
        before = _versions(worlds)
        with RefuseSyncs(), RefuseHost():
            yield
        written = [name for name, version in _versions(worlds).items() if version != before[name]]
        assert not written, f"{function} wrote to {written}"


def _versions(worlds: Worlds | None) -> dict[str, int]:
    """How often each tensor that a task may only read has been written to."""
    if worlds is None:
        return {}
    names = ("qpos", "qvel", "act", "time", "sensordata")
    read = {name: getattr(worlds.sim, name) for name in names}
    read |= {"action": worlds.action, "last_action": worlds.last_action, "episode_step": worlds.episode_step}
    read |= worlds.memory
    for name, tensor in read.items():
        assert type(tensor) is Tensor, name
    return {name: tensor._version for name, tensor in read.items()}


def _checked(what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    assert type(value) is Tensor, f"{what} is {type(value)}, not a tensor"
    assert value.dtype == dtype, f"{what} is {value.dtype}, not {dtype}"
    fits = value.dim() == len(shape) and all(want in (-1, have) for want, have in zip(shape, value.shape, strict=True))
    assert fits, f"{what} has shape {tuple(value.shape)}, not {shape}"
    return value


class _WithMemory(GuardedTask):
    @property
    def step_numbers(self) -> int:
        return self._task.step_numbers

    def memory(self) -> dict[str, int]:
        return self._task.memory()

    def advance(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        with self.guard("advance", worlds):
            parts = self._task.advance(worlds, uniform)
        return self._checked_parts("advance", parts, len(uniform))

    def start(self, worlds: Worlds, uniform: Tensor) -> Start:
        with self.guard("start", worlds):
            start = self._task.start(worlds, uniform)
        _checked("start: qpos", start.qpos, (len(uniform), -1))
        _checked("start: qvel", start.qvel, (len(uniform), -1))
        self._checked_parts("start", start.memory, len(uniform))
        return start

    def _checked_parts(self, function: str, parts: dict[str, Tensor], worlds: int) -> dict[str, Tensor]:
        for name, part in parts.items():
            _checked(f"{function}: {name}", part, (worlds, self.memory()[name]))
        return parts


class _Resampling(_WithMemory):
    def resample(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        with self.guard("resample", worlds):
            parts = self._task.resample(worlds, uniform)
        return self._checked_parts("resample", parts, len(uniform))


class _WithConstants(GuardedTask):
    def constants(self) -> dict[str, tuple[float, ...]]:
        return self._task.constants()


class _Pushing(GuardedTask):
    def push(self, worlds: Worlds) -> Tensor:
        with self.guard("push", worlds):
            change = self._task.push(worlds)
        return _checked("push", change, tuple(worlds.qvel.shape))


class _Measuring(GuardedTask):
    def measure(self, worlds: Worlds) -> dict[str, Tensor]:
        with self.guard("measure", worlds):
            measures = self._task.measure(worlds)
        for name, measure in measures.items():
            _checked(f"measure: {name}", measure, (len(worlds.qpos),))
        return measures


class _Randomizing(GuardedTask):
    @property
    def randomization(self) -> tuple[Randomization, ...]:
        return self._task.randomization


class _Sensing(GuardedTask):
    @property
    def senses(self) -> Senses:
        return self._task.senses


def guarded(task: AnyTask) -> Any:
    """With those of the guards that the task has something for."""
    kinds = {
        Resamples: _Resampling,
        TaskWithMemory: _WithMemory,
        HasConstants: _WithConstants,
        Pushes: _Pushing,
        Measures: _Measuring,
        Randomizes: _Randomizing,
        HasSenses: _Sensing,
    }
    guards = tuple(guard for protocol, guard in kinds.items() if isinstance(task, protocol))
    return type("Guarded", (*guards, GuardedTask), {})(task)


@dataclass(frozen=True)
class Happened:
    calls: Counter[str]
    """How often each of the task's functions ran."""
    terminated: int
    truncated: int


def run_refusing_syncs(task: AnyTask, worlds: int = 6, steps: int = 64) -> Happened:
    """Step an env of `task` on the C engine while everything is refused that a CUDA graph could not hold. On the way
    one world fails and every second reaches its time limit."""
    watched = guarded(task)
    env = RobotEnv(watched, worlds, "mujoco", seed=1)
    state = env.state()
    state["sim/qpos"][0] = torch.nan
    state["episode_step"][1::2] = env.max_episode_steps - steps // 2
    env.load_state(state)

    actions = torch.randn(steps, worlds, env.num_actions, generator=torch.Generator().manual_seed(0))
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
