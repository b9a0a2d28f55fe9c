"""Checks of a task when its env is made: every function is called once, and an error says what it must return."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import mujoco
import torch
from torch import Tensor

from paceline.env.observations import MAX_HISTORY_STEPS, is_valid_delay
from paceline.env.randomization import Randomization
from paceline.env.task import EnvState, ResetState, Task, overrides
from paceline.errors import UserError

_REQUIRED = {
    "model": "model() -> mujoco.MjModel",
    "reset": "reset(state, uniform) -> ResetState",
    "control": "control(state) -> Tensor",
    "observe": "observe(state) -> dict[str, Tensor]",
    "reward": "reward(state, terminated) -> dict[str, Tensor]",
    "terminated": "terminated(state) -> Tensor",
}
_MINIMUM = {"num_actions": 1, "num_reset_samples": 0, "num_step_samples": 0}
_MEMBERS = tuple(n for n in dict.fromkeys((*vars(Task), *Task.__annotations__)) if not n.startswith("_"))
_FUNCTIONS = tuple(name for name in _MEMBERS if callable(getattr(Task, name, None)))
_SYNONYMS = {
    "measure": "metrics",
    "measures": "metrics",
    "randomize": "randomized_fields",
    "randomization": "randomized_fields",
    "push": "push_velocity",
    "state_shapes": "state_spec",
    "num_observations": "observe",
    "actuate": "control",
    "done": "terminated",
    "is_done": "terminated",
    "history": "observation_history",
    "delay": "observation_delay",
}
"""Other names for members of a task, which an author may use by mistake."""
_SIMILAR, _VERY_SIMILAR = 0.8, 0.9


class Names(NamedTuple):
    """Names of the reward terms and of the metrics of a task."""

    terms: tuple[str, ...]
    metrics: tuple[str, ...]


def check_members(task: Task) -> None:
    """Raise UserError if a member of the task is missing, misspelled or of the wrong type."""
    if not isinstance(task, Task):
        _refuse(task, f"it is no Task: write class {type(task).__name__}(Task), with paceline.env.task.Task")
    _check_spelling(task)
    for name in _FUNCTIONS:
        value = getattr(task, name)
        if not callable(value):
            _refuse(task, f"{name!r} is {value!r}, but {name}() is a function of tasks: rename the option")
    for name, signature in _REQUIRED.items():
        if not overrides(task, name):
            _refuse(task, f"it has no function {name!r}: define {signature}")
    for name, least in _MINIMUM.items():
        value = getattr(task, name, None)
        if not isinstance(value, int) or value < least:
            _refuse(task, f"{name!r} is {value!r}, but must be a whole number, at least {least}")
    if not isinstance(getattr(task, "decimation", None), int):
        _refuse(task, "it has no whole number 'decimation': set the physics steps per control step")
    if not isinstance(getattr(task, "episode_seconds", None), (int, float)):
        _refuse(task, "it has no number 'episode_seconds': set the time limit of an episode, in seconds")
    _check_state_spec(task)
    history, delay, fields = task.observation_history, task.observation_delay, task.randomized_fields()
    if not isinstance(history, int) or not 1 <= history <= MAX_HISTORY_STEPS:
        _refuse(task, f"'observation_history' is {history!r}, but must be from 1 to {MAX_HISTORY_STEPS}")
    if not is_valid_delay(delay):
        _refuse(
            task,
            f"'observation_delay' is {delay!r}, but must be the minimum and the maximum in control steps, for example "
            f"(0, 2), at most {MAX_HISTORY_STEPS}",
        )
    if not isinstance(fields, tuple) or not all(isinstance(item, Randomization) for item in fields):
        _refuse(task, f"randomized_fields() is {fields!r}, but must be a tuple of Randomization")


def _check_spelling(task: Task) -> None:
    """Raise UserError for a public member whose name is close to that of a member of `Task`."""
    options = {field.name for field in dataclasses.fields(task)} if dataclasses.is_dataclass(task) else set()
    for kind in type(task).__mro__[: type(task).__mro__.index(Task)]:
        for name in (*vars(kind), *vars(kind).get("__annotations__", {})):
            if name.startswith("_") or name in _MEMBERS:
                continue
            meant = _nearest(name, _VERY_SIMILAR) if name in options else _SYNONYMS.get(name) or _nearest(name)
            # A group of options, such as `rewards`, cannot be meant as a function.
            if meant and not dataclasses.is_dataclass(getattr(task, name, None)):
                what = "option" if name in options else "member"
                _refuse(task, f"tasks have no {name!r}: did you mean {meant!r}? otherwise rename the {what}")


def _nearest(name: str, cutoff: float = _SIMILAR) -> str | None:
    known = {member: member for member in _MEMBERS} | (_SYNONYMS if cutoff == _SIMILAR else {})
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return known[found[0]] if found else None


def _check_state_spec(task: Task) -> None:
    spec = _dict(task, "state_spec()", task.state_spec())
    for name, width in spec.items():
        if not isinstance(width, int) or width < 1:
            _refuse(task, f"state_spec()[{name!r}] is {width!r}, but must be the width per env, at least 1")
    needs = [name for name in ("update_state", "resample") if overrides(task, name)]
    if needs and not spec:
        _refuse(task, f"it has {_listed(needs)} but no task state: define state_spec() -> dict[str, int]")


def check_model(task: Task, model: Any) -> None:
    """Raise UserError if the model has no joints or no actuators."""
    if isinstance(model, mujoco.MjSpec):
        _refuse(task, "model() is a MjSpec, but must be a MjModel: return spec.compile()")
    if not isinstance(model, mujoco.MjModel):
        _refuse(task, f"model() is {_described(model)}, but must be a mujoco.MjModel")
    if not model.nv:
        _refuse(task, "its model has no joints: give the bodies that move a <joint> or a <freejoint>")
    if not model.nu:
        _refuse(task, "its model has no actuators: add them in the <actuator> section")


def check_constants(task: Task, rows: Any) -> None:
    """Raise UserError if a constant is not a row of numbers."""
    for name, row in _dict(task, "constants()", rows).items():
        # Rows may be long, so only the first number is checked.
        if not isinstance(row, (tuple, list)) or not row or not isinstance(row[0], (int, float)):
            _refuse(task, f"constants()[{name!r}] is {_described(row)}, but must be a tuple of numbers")


def check_results(task: Task, state: EnvState) -> Names:
    """Call every function once. Raise UserError if a result has the wrong type, shape, dtype or device."""
    check, model = _Results(task, state), state.sim.model
    _check_reset(check, task, state)
    check.tensor("control(state)", task.control(state), actuator=model.nu)
    check.observations("observe(state)", task.observe(state))
    terminated = check.tensor("terminated(state)", task.terminated(state), torch.bool)
    terms = check.tensors("reward(state, terminated)", task.reward(state, terminated))
    if not terms:
        _refuse(task, "reward(state, terminated) is empty, but must have at least one term: {'alive': ...}")
    metrics = check.tensors("metrics(state)", task.metrics(state))
    check.tensor("push_velocity(state)", task.push_velocity(state), nv=model.nv)
    return Names(terms, metrics)


def _check_reset(check: "_Results", task: Task, state: EnvState) -> None:
    what, reset = "reset(state, uniform)", task.reset(state, _half(state, task.num_reset_samples))
    if not isinstance(reset, ResetState):
        _refuse(task, f"{what} is {_described(reset)}, but must be a ResetState(qpos, qvel, task_state)")
    model, spec, uniform = state.sim.model, task.state_spec(), _half(state, task.num_step_samples)
    found = check.entries(f"task_state of {what}", reset.task_state, spec)
    found |= check.entries("update_state(state, uniform)", task.update_state(state, uniform), spec)
    found |= check.entries("resample(state, uniform)", task.resample(state, uniform), spec)
    unset = [name for name in spec if name not in found]
    if unset:
        _refuse(task, f"state_spec() has {_listed(unset)}, which reset, update_state and resample never set: remove it")
    qpos = check.tensor(f"qpos of {what}", reset.qpos, nq=model.nq)
    qvel = check.tensor(f"qvel of {what}", reset.qvel, nv=model.nv)
    for name, values in {"qpos": qpos, "qvel": qvel}.items():
        if not values.isfinite().all():
            _refuse(task, f"{name} of {what} has numbers that are not finite")


class _Results:
    """Checks of what a task returned for the envs of `state`."""

    def __init__(self, task: Task, state: EnvState):
        self._task, self._num_envs, self._device = task, len(state.qpos), state.qpos.device

    def tensor(self, what: str, value: Any, dtype: torch.dtype = torch.float32, **sizes: int) -> Tensor:
        """Check a tensor [env, ...]; the names of `sizes` name its dimensions."""
        shape = [self._num_envs, *sizes.values()]
        if not isinstance(value, Tensor) or list(value.shape) != shape or value.dtype != dtype:
            wanted = f"{_kind(dtype)} of shape [{', '.join(('env', *sizes))}], here {shape}"
            _refuse(self._task, f"{what} is {_described(value)}, but must be {wanted}")
        if value.device != self._device:
            _refuse(self._task, f"{what} is on {value.device}, but must be on {self._device}, as state.qpos is")
        return value

    def tensors(self, what: str, values: Any) -> tuple[str, ...]:
        """Check tensors [env] by name and return the names."""
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
                # Images may have any dtype.
                self.tensor(f"{what}[{name!r}]", value, value.dtype, **{f"n{i}": n for i, n in enumerate(sizes)})

    def entries(self, what: str, entries: Any, spec: dict[str, int]) -> set[str]:
        """Check entries of the task state and return their names."""
        for name, value in _dict(self._task, what, entries).items():
            if name not in spec:
                _refuse(self._task, f"{what} has {name!r}, but state_spec() has only {_listed(spec) or 'nothing'}")
            self.tensor(f"{what}[{name!r}]", value, width=spec[name])
        return set(entries)


def _half(state: EnvState, count: int) -> Tensor:
    """Return samples that are all 0.5, [env, count]."""
    return torch.full((len(state.qpos), count), 0.5, device=state.qpos.device)


def _dict(task: Task, what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        _refuse(task, f"{what} is {_described(value)}, but must be a dict with names as keys")
    return value


def _described(value: Any) -> str:
    """Return a short description of a value."""
    if isinstance(value, Tensor):
        return f"{_kind(value.dtype)} of shape {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) < 60 else f"a {type(value).__name__}"


def _kind(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"an {name} tensor" if name.startswith("i") else f"a {name} tensor"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _refuse(task: Any, text: str) -> NoReturn:
    raise UserError(f"task {type(task).__name__}: {text}")
