"""Check a task when its env is made: every function is called once, and an error says what it must return."""

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, cast

import mujoco
import torch
from torch import Tensor

from paceline.env.randomization import Randomization
from paceline.env.task import (
    AnyTask,
    Measures,
    Pushes,
    Resamples,
    Senses,
    Start,
    Task,
    TaskWithMemory,
    Worlds,
)
from paceline.errors import UserError

_FUNCTIONS = {
    "model": "model() -> mujoco.MjModel",
    "control": "control(worlds) -> Tensor",
    "observe": "observe(worlds) -> dict[str, Tensor]",
    "reward": "reward(worlds, terminated) -> dict[str, Tensor]",
    "terminated": "terminated(worlds) -> Tensor",
}
_RESET = {"reset": "reset(uniform) -> tuple[Tensor, Tensor]"}
_OF_MEMORY = {
    "memory": "memory() -> dict[str, int]",
    "advance": "advance(worlds, uniform) -> dict[str, Tensor]",
    "start": "start(worlds, uniform) -> Start",
}
_HOOKS = ("constants", "push", "measure", "resample", "shown", "at_its_end")
_LEAST = {"actions": 1, "reset_numbers": 0}


class Names(NamedTuple):
    """Names of a task's reward terms and metrics."""

    terms: tuple[str, ...]
    measures: tuple[str, ...]


def check_members(task: AnyTask) -> None:
    """Refuse a task that lacks a member or has something else under its name."""
    with_memory = [name for name in (*_OF_MEMORY, "resample") if callable(getattr(task, name, None))]
    for name, signature in (_FUNCTIONS | (_OF_MEMORY if with_memory else _RESET)).items():
        if not callable(getattr(task, name, None)):
            why = f", because a task that has {_listed(with_memory)} needs it" if name in _OF_MEMORY else ""
            _refuse(task, f"it has no function {name!r}: define {signature}{why}")
    for name in _HOOKS:
        if hasattr(task, name) and not callable(getattr(task, name)):
            _refuse(
                task, f"{name!r} is {getattr(task, name)!r}, but {name}() is a function of tasks: rename the option"
            )
    for name, least in (_LEAST | ({"step_numbers": 0} if with_memory else {})).items():
        value = getattr(task, name, None)
        if not isinstance(value, int) or value < least:
            _refuse(task, f"{name!r} is {value!r}, but must be a whole number, at least {least}")
    if not isinstance(getattr(task, "decimation", None), int):
        _refuse(task, "it has no whole number 'decimation': set the physics steps per control step")
    if not isinstance(getattr(task, "episode_seconds", None), (int, float)):
        _refuse(task, "it has no number 'episode_seconds': set the time limit of an episode, in seconds")
    if with_memory:
        for name, width in _dict(task, "memory()", cast("TaskWithMemory", task).memory()).items():
            if not isinstance(width, int) or width < 1:
                _refuse(task, f"memory()[{name!r}] is {width!r}, but must be the numbers per env, at least 1")
    senses, items = getattr(task, "senses", Senses()), getattr(task, "randomization", ())
    if not isinstance(senses, Senses):
        _refuse(task, f"'senses' is {senses!r}, but must be a Senses")
    if not isinstance(items, tuple) or not all(isinstance(item, Randomization) for item in items):
        _refuse(task, f"'randomization' is {items!r}, but must be a tuple of Randomization")


def check_model(task: AnyTask, model: Any) -> None:
    """Refuse a model that cannot be moved by actions."""
    if isinstance(model, mujoco.MjSpec):
        _refuse(task, "model() is a MjSpec, but must be a MjModel: return spec.compile()")
    if not isinstance(model, mujoco.MjModel):
        _refuse(task, f"model() is {_described(model)}, but must be a mujoco.MjModel")
    if not model.nv:
        _refuse(task, "its model has no joints: give the bodies that move a <joint> or a <freejoint>")
    if not model.nu:
        _refuse(task, "its model has no actuators: add them in the <actuator> section")


def check_constants(task: AnyTask, rows: Any) -> None:
    """Refuse constants that are not rows of numbers."""
    for name, row in _dict(task, "constants()", rows).items():
        # Rows may be long: the first number is enough.
        if not isinstance(row, (tuple, list)) or not row or not isinstance(row[0], (int, float)):
            _refuse(task, f"constants()[{name!r}] is {_described(row)}, but must be a tuple of numbers")


def check_results(task: Task | TaskWithMemory, worlds: Worlds) -> Names:
    """Call every function once; refuse results of the wrong type, shape, dtype or device."""
    check, model = _Results(task, worlds), worlds.sim.model
    _check_start(check, task, worlds)
    check.tensor("control(worlds)", task.control(worlds), actuator=model.nu)
    check.observations("observe(worlds)", task.observe(worlds))
    terminated = check.tensor("terminated(worlds)", task.terminated(worlds), torch.bool)
    terms = check.tensors("reward(worlds, terminated)", task.reward(worlds, terminated))
    if not terms:
        _refuse(task, "reward(worlds, terminated) is empty, but must have at least one term: {'alive': ...}")
    measures = check.tensors("measure(worlds)", task.measure(worlds)) if isinstance(task, Measures) else ()
    if isinstance(task, Pushes):
        check.tensor("push(worlds)", task.push(worlds), nv=model.nv)
    return Names(terms, measures)


def _check_start(check: "_Results", task: Task | TaskWithMemory, worlds: Worlds) -> None:
    model, uniform = worlds.sim.model, _numbers(worlds, task.reset_numbers)
    if isinstance(task, TaskWithMemory):
        what, start = "start(worlds, uniform)", task.start(worlds, uniform)
        if not isinstance(start, Start):
            _refuse(task, f"{what} is {_described(start)}, but must be a Start(qpos, qvel, memory)")
        _check_memory(check, task, worlds, start)
    else:
        what, start = "reset(uniform)", cast("Task", task).reset(uniform)
        if not isinstance(start, tuple) or len(start) != 2:
            _refuse(task, f"{what} is {_described(start)}, but must be a tuple (qpos, qvel)")
    qpos = check.tensor(f"qpos of {what}", start[0], nq=model.nq)
    qvel = check.tensor(f"qvel of {what}", start[1], nv=model.nv)
    for name, values in {"qpos": qpos, "qvel": qvel}.items():
        if not values.isfinite().all():
            _refuse(task, f"{name} of {what} has numbers that are not finite")


def _check_memory(check: "_Results", task: TaskWithMemory, worlds: Worlds, start: Start) -> None:
    widths, uniform = task.memory(), _numbers(worlds, task.step_numbers)
    found = check.parts("memory of start(worlds, uniform)", start.memory, widths)
    found |= check.parts("advance(worlds, uniform)", task.advance(worlds, uniform), widths)
    if isinstance(task, Resamples):
        found |= check.parts("resample(worlds, uniform)", task.resample(worlds, uniform), widths)
    unset = [name for name in widths if name not in found]
    if unset:
        _refuse(task, f"memory() has {_listed(unset)}, which start, advance and resample never set: remove it")


class _Results:
    """Checks what a task returned for the envs of `worlds`."""

    def __init__(self, task: AnyTask, worlds: Worlds):
        self._task, self._envs, self._device = task, len(worlds.qpos), worlds.qpos.device

    def tensor(self, what: str, value: Any, dtype: torch.dtype = torch.float32, **sizes: int) -> Tensor:
        """Refuse anything but a tensor [env, ...]; the names of `sizes` say what they count."""
        shape = [self._envs, *sizes.values()]
        if not isinstance(value, Tensor) or list(value.shape) != shape or value.dtype != dtype:
            wanted = f"{_kind(dtype)} of shape [{', '.join(('env', *sizes))}], here {shape}"
            _refuse(self._task, f"{what} is {_described(value)}, but must be {wanted}")
        if value.device != self._device:
            _refuse(self._task, f"{what} is on {value.device}, but must be on {self._device}, as worlds.qpos is")
        return value

    def tensors(self, what: str, values: Any) -> tuple[str, ...]:
        """Check one number per env under each name; return the names."""
        for name, value in _dict(self._task, what, values).items():
            self.tensor(f"{what}[{name!r}]", value)
        return tuple(values)

    def observations(self, what: str, groups: Any) -> None:
        if "policy" not in _dict(self._task, what, groups):
            _refuse(self._task, f"{what} has {_listed(groups) or 'nothing'}, but must have 'policy'")
        for name, value in groups.items():
            sizes = tuple(value.shape[1:]) if isinstance(value, Tensor) else ()
            if len(sizes) < 2:
                self.tensor(f"{what}[{name!r}]", value, n=max((1, *sizes)))
            else:
                # Pictures may have any dtype.
                self.tensor(f"{what}[{name!r}]", value, value.dtype, **{f"n{i}": n for i, n in enumerate(sizes)})

    def parts(self, what: str, parts: Any, widths: dict[str, int]) -> set[str]:
        """Check parts of the memory; return their names."""
        for name, part in _dict(self._task, what, parts).items():
            if name not in widths:
                _refuse(self._task, f"{what} has {name!r}, but memory() has only {_listed(widths)}")
            self.tensor(f"{what}[{name!r}]", part, width=widths[name])
        return set(parts)


def _numbers(worlds: Worlds, count: int) -> Tensor:
    """Return numbers in [0, 1), [env, count]."""
    return torch.full((len(worlds.qpos), count), 0.5, device=worlds.qpos.device)


def _dict(task: AnyTask, what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        _refuse(task, f"{what} is {_described(value)}, but must be a dict with names as keys")
    return value


def _described(value: Any) -> str:
    """Say what a value is, in short."""
    if isinstance(value, Tensor):
        return f"{_kind(value.dtype)} of shape {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) < 60 else f"a {type(value).__name__}"


def _kind(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"an {name} tensor" if name.startswith("i") else f"a {name} tensor"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _refuse(task: AnyTask, text: str) -> NoReturn:
    raise UserError(f"task {type(task).__name__}: {text}")
