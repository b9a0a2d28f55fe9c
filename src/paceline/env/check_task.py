"""Checks of a task when its env is made: every function is called once, and an error says what it must return."""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterable
from typing import Any, NoReturn, cast

import mujoco
import torch
from torch import Tensor

from paceline.cameras.camera import Camera
from paceline.env.observations import MAX_HISTORY_STEPS, is_valid_delay
from paceline.env.policy_interface import ActionMapping, CommandRange, ObservationPart
from paceline.env.randomization import Randomization
from paceline.env.task import MAX_DECIMATION, EnvState, ResetState, Task, overrides
from paceline.env.vec_env import action_spec
from paceline.errors import UserError, counted, unknown
from paceline.validation import LARGEST_COUNT, LARGEST_NUMBER

_REQUIRED = ("model", "reset", "control", "observe", "reward", "terminated")
_WHOLE_NUMBERS = {
    "decimation": (1, MAX_DECIMATION),
    "num_actions": (1, LARGEST_COUNT),
    "num_reset_samples": (0, LARGEST_COUNT),
    "num_step_samples": (0, LARGEST_COUNT),
    "observation_history": (1, MAX_HISTORY_STEPS),
}
"""Minimum and maximum of the numbers of a task."""
_MEMBERS = tuple(n for n in dict.fromkeys((*vars(Task), *Task.__annotations__)) if not n.startswith("_"))
_FUNCTIONS = tuple(name for name in _MEMBERS if callable(getattr(Task, name, None)))
_SYNONYMS = {
    "measure": "metrics",
    "randomize": "randomized_fields",
    "randomization": "randomized_fields",
    "push": "push_velocity",
    "num_observations": "observe",
    "actuate": "control",
    "done": "terminated",
    "history": "observation_history",
    "delay": "observation_delay",
}
"""Other names for members of a task, which an author may use by mistake."""
_SIMILAR, _VERY_SIMILAR = 0.8, 0.9


def check_members(task: Task) -> None:
    """Raise UserError if a member of the task is missing, misspelled or of the wrong type."""
    if not isinstance(task, Task):
        _refuse(task, f"it is not a Task: write class {type(task).__name__}(Task), with paceline.env.task.Task")
    _check_spelling(task)
    for name in _FUNCTIONS:
        value = getattr(task, name)
        if not callable(value):
            _refuse(task, f"{name!r} is {value!r}, but {name}() is a function of tasks: rename the option")
    for name in _REQUIRED:
        if not overrides(task, name):
            # Remove the names of modules.
            signature = re.sub(r"[\w.]+\.(\w+)", r"\1", str(inspect.signature(getattr(task, name))))
            _refuse(task, f"it has no function {name!r}: define {name}{signature}")
    for name, (low, high) in _WHOLE_NUMBERS.items():
        value = getattr(task, name, None)
        if not isinstance(value, int) or not low <= value <= high:
            _refuse(task, f"{name!r} is {value!r}, but must be a whole number from {low} to {high}")
    try:
        # A task has the same members for its actions as an env.
        action_spec(cast("Any", task))
    except UserError as error:
        _refuse(task, str(error))
    seconds, delay, fields = getattr(task, "episode_seconds", None), task.observation_delay, task.randomized_fields()
    if not isinstance(seconds, (int, float)) or not 0.0 < seconds <= LARGEST_NUMBER:
        _refuse(task, f"'episode_seconds' is {seconds!r}, but must be the time limit in seconds, above 0")
    if not is_valid_delay(delay):
        allowed = f"the minimum and the maximum in control steps, for example (0, 2), at most {MAX_HISTORY_STEPS}"
        _refuse(task, f"'observation_delay' is {delay!r}, but must be {allowed}")
    if not isinstance(fields, tuple) or not all(isinstance(item, Randomization) for item in fields):
        _refuse(task, f"randomized_fields() is {fields!r}, but must be a tuple of Randomization")
    for name, camera in _dict(task, "cameras()", task.cameras()).items():
        if not isinstance(camera, Camera):
            _refuse(task, f"cameras()[{name!r}] is {_described(camera)}, but must be a paceline.cameras.camera.Camera")
    _dict(task, "geom_classes()", task.geom_classes())
    spec = _dict(task, "state_spec()", task.state_spec())
    for name, width in spec.items():
        if not isinstance(width, int) or width < 1:
            _refuse(task, f"state_spec()[{name!r}] is {width!r}, but must be the width per env, at least 1")
    needs = [name for name in ("update_state", "resample") if overrides(task, name)]
    if needs and not spec:
        _refuse(task, f"it has {_listed(needs)} but no task state: define state_spec() -> dict[str, int]")
    for name, row in _dict(task, "constants()", task.constants()).items():
        # Rows may be long, so only the first number is checked.
        if not isinstance(row, (tuple, list)) or not row or not isinstance(row[0], (int, float)):
            _refuse(task, f"constants()[{name!r}] is {_described(row)}, but must be a tuple of numbers")


def _check_spelling(task: Task) -> None:
    """Raise UserError for a public member whose name is close to that of a member of `Task`."""
    options = {field.name for field in dataclasses.fields(task)} if dataclasses.is_dataclass(task) else set()
    for kind in type(task).__mro__[: type(task).__mro__.index(Task)]:
        for name in (*vars(kind), *vars(kind).get("__annotations__", {})):
            # A group of options, such as `rewards`, cannot be meant as a function.
            if name.startswith("_") or name in _MEMBERS or dataclasses.is_dataclass(getattr(task, name, None)):
                continue
            what, names, cutoff = "member", (*_MEMBERS, *_SYNONYMS), _SIMILAR
            if name in options:
                what, names, cutoff = "option", _MEMBERS, _VERY_SIMILAR
            near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
            if near:
                meant = _SYNONYMS.get(near[0], near[0])
                _refuse(task, f"tasks have no {name!r}: did you mean {meant!r}? otherwise rename the {what}")


def check_model(task: Task, model: Any) -> None:
    """Raise UserError if the model has no joints or no actuators."""
    if not isinstance(model, mujoco.MjModel):
        _refuse(task, f"model() is {_described(model)}, but must be a mujoco.MjModel: call compile() of a MjSpec")
    if not model.nv:
        _refuse(task, "its model has no joints: give the bodies that move a <joint> or a <freejoint>")
    if not model.nu:
        _refuse(task, "its model has no actuators: add them in the <actuator> section")


def check_results(task: Task, state: EnvState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Call every function once. Raise UserError if a result has the wrong type, shape, dtype or device. Return the
    names of the reward terms and of the metrics."""
    check, model, spec = _Results(task, state), state.sim.model, task.state_spec()
    # All samples are 0.5.
    counts = task.num_reset_samples, task.num_step_samples
    for_reset, for_step = (state.qpos.new_full((len(state.qpos), count), 0.5) for count in counts)
    what, reset = "reset(state, uniform)", task.reset(state, for_reset)
    if not isinstance(reset, ResetState):
        _refuse(task, f"{what} is {_described(reset)}, but must be a ResetState(qpos, qvel, task_state)")
    found = (
        *check.tensors(f"task_state of {what}", reset.task_state, spec),
        *check.tensors("update_state(state, uniform)", task.update_state(state, for_step), spec),
        *check.tensors("resample(state, uniform)", task.resample(state, for_step), spec),
    )
    unset = [name for name in spec if name not in found]
    if unset:
        _refuse(task, f"state_spec() has {_listed(unset)}, which reset, update_state and resample never set: remove it")
    check.tensor(f"qpos of {what}", reset.qpos, nq=model.nq)
    check.tensor(f"qvel of {what}", reset.qvel, nv=model.nv)
    for name in ("qpos", "qvel"):
        if not getattr(reset, name).isfinite().all():
            _refuse(task, f"{name} of {what} has numbers that are not finite")
    check.tensor("control(state)", task.control(state), actuator=model.nu)
    groups = task.observe(state)
    check.observations("observe(state)", groups, required=not task.cameras())
    _check_interface(task, model, {name: obs.shape[1] for name, obs in groups.items() if obs.dim() == 2})
    terminated = check.tensor("terminated(state)", task.terminated(state), torch.bool)
    terms = check.tensors("reward(state, terminated)", task.reward(state, terminated))
    if not terms:
        _refuse(task, "reward(state, terminated) is empty, but must have at least one term: {'alive': ...}")
    weights = getattr(task, "rewards", None)
    if dataclasses.is_dataclass(weights):
        known = [field.name for field in dataclasses.fields(weights)]
        for name in terms:
            if name not in known:
                _refuse(task, f"{unknown('reward term', name, known)}, or add a weight {name!r} to `rewards`")
    metrics = check.tensors("metrics(state)", task.metrics(state))
    check.tensor("push_velocity(state)", task.push_velocity(state), nv=model.nv)
    check.tensor("mocap_pos(state)", task.mocap_pos(state), nmocap=model.nmocap, n=3)
    return terms, metrics


def _check_interface(task: Task, model: mujoco.MjModel, widths: dict[str, int]) -> None:
    """Raise UserError if the description of the policy's inputs and outputs does not match the task. `widths` are
    those of the observation groups."""
    what = "observation_parts(model)"
    for group, parts in _dict(task, what, task.observation_parts(model)).items():
        if group not in widths:
            _refuse(task, f"{what} has {group!r}, but observe(state) has only {_listed(widths) or 'nothing'}")
        if not isinstance(parts, tuple) or not all(isinstance(part, ObservationPart) for part in parts):
            _refuse(task, f"{what}[{group!r}] is {_described(parts)}, but must be a tuple of ObservationPart")
        if sum(part.width for part in parts) != widths[group]:
            sizes = " + ".join(f"{part.width} ({part.name})" for part in parts) or "0"
            _refuse(task, f"{what}[{group!r}] has the width {sizes}, but observe(state) gives {widths[group]}")
        names = [part.name for part in parts]
        if repeated := [name for name in names if names.count(name) > 1]:
            _refuse(task, f"{what}[{group!r}] has two parts {repeated[0]!r}: give each its own name")
        for part in parts:
            _check_rows(task, f"part {part.name!r} of {what}", part, ("unit", "scale", "offset", "labels"), part.width)
    mapping = task.action_mapping(model)
    if mapping is not None:
        if not isinstance(mapping, ActionMapping):
            _refuse(task, f"action_mapping(model) is {_described(mapping)}, but must be an ActionMapping or None")
        if task.action_choices:
            _refuse(task, f"action_mapping(model) must be None: the actions are choices, {task.action_choices}")
        if task.num_actions != model.nu:
            _refuse(
                task, f"action_mapping(model) must be None: num_actions is {task.num_actions}, and nu is {model.nu}"
            )
        _check_rows(task, "action_mapping(model)", mapping, ("scale", "offset"), model.nu)
    for name, limits in _dict(task, "command_ranges()", task.command_ranges()).items():
        if not isinstance(limits, CommandRange):
            _refuse(task, f"command_ranges()[{name!r}] is {_described(limits)}, but must be a CommandRange")
        _check_rows(task, f"command_ranges()[{name!r}]", limits, ("unit", "low", "high"), len(limits.labels))
        widths = task.state_spec()
        if limits.entry and widths.get(limits.entry) != len(limits.labels):
            place = f"entry {limits.entry!r} of command_ranges()[{name!r}]"
            _refuse(task, f"{place} must be an entry of state_spec() of width {len(limits.labels)}: it is {widths}")


def _check_rows(task: Task, what: str, value: Any, fields: tuple[str, ...], width: int) -> None:
    """Raise UserError if one of the fields is a tuple that does not have one element per column."""
    for field in fields:
        row = getattr(value, field)
        if isinstance(row, tuple) and row and len(row) != width:
            _refuse(
                task, f"{field} of {what} has {counted(len(row), 'element')}, but must have one per column: {width}"
            )


class _Results:
    """Checks the values that a task returns for the envs of `state`."""

    def __init__(self, task: Task, state: EnvState):
        self._task, self._num_envs, self._device = task, len(state.qpos), state.qpos.device

    def tensor(self, what: str, value: Any, dtype: torch.dtype = torch.float32, /, **sizes: int) -> Tensor:
        """Check a tensor [env, ...]; the names of `sizes` name its dimensions."""
        shape = [self._num_envs, *sizes.values()]
        if not isinstance(value, Tensor) or list(value.shape) != shape or value.dtype != dtype:
            wanted = f"{_kind(dtype)} of shape [{', '.join(('env', *sizes))}], here {shape}"
            _refuse(self._task, f"{what} is {_described(value)}, but must be {wanted}")
        if value.device != self._device:
            _refuse(self._task, f"{what} is on {value.device}, but must be on {self._device}, as state.qpos is")
        return value

    def tensors(self, what: str, values: Any, spec: dict[str, int] | None = None) -> tuple[str, ...]:
        """Check tensors by name, each [env], or entries of the task state, each [env, width]; return the names."""
        for name, value in _dict(self._task, what, values).items():
            if spec is not None and name not in spec:
                _refuse(self._task, f"{what} has {name!r}, but state_spec() has only {_listed(spec) or 'nothing'}")
            self.tensor(f"{what}[{name!r}]", value, **({} if spec is None else {"width": spec[name]}))
        return tuple(values)

    def observations(self, what: str, groups: Any, required: bool) -> None:
        if "policy" not in _dict(self._task, what, groups) and required:
            _refuse(self._task, f"{what} has {_listed(groups) or 'nothing'}, but must have 'policy'")
        for name, value in groups.items():
            shape = value.shape[1:] if isinstance(value, Tensor) else ()
            # Images may have any dtype.
            dtype = value.dtype if len(shape) > 1 else torch.float32
            sizes = {f"n{i or ''}": max(1, size) for i, size in enumerate(shape)} or {"n": 1}
            self.tensor(f"{what}[{name!r}]", value, dtype, **sizes)


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
