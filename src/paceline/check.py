"""Check a task or an env against its contract, on the CPU. Each finding says what to change."""

import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.distributed.rank import Rank
from paceline.env import check_env
from paceline.env.check_env import EnvChecker, Finding, approach_time_limit, check_env_members, random_actions, same
from paceline.env.host_syncs import DetectSyncs, SyncFindings
from paceline.env.vec_env import Step, VecEnv, as_robot_env
from paceline.errors import UserError, counted, one_line
from paceline.learners.rollout import first_non_finite
from paceline.run.config import TrainConfig
from paceline.tasks import registry
from paceline.tasks.registry import EnvEntry
from paceline.training.build import make_env, resolve

# Envs of other simulators need no MuJoCo, so its modules are imported inside the functions.

_TASK, _CAPTURE, _READ_ONLY = "members and results of the task", "no host syncs", "read-only state and fixed shapes"
_FINITE, _STATE, _AGAIN = "finite values", "state round trip", "same results with the same seed"
_RANKS = "same results on 1 and 2 ranks"
_TASK_REMEDIES = {
    _AGAIN: "take random numbers from `uniform`, and keep values that change between steps in the task state",
    _STATE: "keep values that change between steps in the task state: state_spec() declares its entries",
    _RANKS: "compute the values of an env from its own rows only",
}
_ENV_REMEDIES = {
    _AGAIN: "random numbers must depend on the seed, the global env index and the step only",
    _STATE: "state() and load_state() must include all that a step depends on",
    _RANKS: "random numbers of env n must depend on its global index, first_env + n, and no env on the others",
}
# The results of a few steps are compared: rounding errors depend on the number of envs and grow with every step.
_COMPARED_STEPS, _RANK_TOLERANCE = 8, 1e-3
_PACKAGE, _TORCH = (str(Path(file).parent) for file in (__file__, torch.__file__))


@dataclass
class Check:
    """Result of one check."""

    name: str
    state: Literal["ok", "fails", "not run"] = "not run"
    findings: list[str] = field(default_factory=list)
    """Faults with their remedies, one line each."""
    note: str = ""
    """Summary of the check, or the reason why it was not run."""


class _IncompleteError(Exception):
    """Checks cannot continue after the findings so far."""


class _Checks:
    """All checks by name, in their order."""

    def __init__(self, names: Iterable[str]):
        self.all = {name: Check(name) for name in names}

    @contextmanager
    def run(self, *names: str) -> Iterator[None]:
        """Run code that makes these checks. An exception is a finding of the first of them; the others have then not
        been run."""
        try:
            yield
        except _IncompleteError:
            return
        except Exception as error:  # the code of a user may raise any
            self.add(Finding(names[0], _raised(error)))
            return
        for name in names:
            if not self.all[name].findings:
                self.all[name].state = "ok"

    def add(self, *findings: Finding) -> None:
        for name, text in findings:
            self.all[name].state = "fails"
            if text not in self.all[name].findings:
                self.all[name].findings.append(text)

    def found(self, *names: str) -> bool:
        """Return whether one of these checks has a finding."""
        return any(self.all[name].findings for name in names)


def check(
    task: str, options: dict[str, Any] | None = None, num_envs: int = 8, steps: int = 100, seed: int = 0
) -> list[Check]:
    """Check the task or env with the name `task` in random steps of at least 2 envs. `options` are those of the task.
    Raise UserError if there is no such task or an option is invalid."""
    config = TrainConfig(task=task, env=options or {}, num_envs=num_envs, seed=seed, logger=("none",))
    config, _ = resolve(config)
    is_task = not isinstance(registry.find(task), EnvEntry)
    of_task = (_TASK, _CAPTURE, _READ_ONLY) if is_task else (_CAPTURE,)
    checks = _Checks((*of_task, *check_env.CHECKS, _FINITE, _STATE, _AGAIN, _RANKS))
    with ExitStack() as stack:

        def make(envs: range) -> VecEnv:
            env = make_env(config, Rank(), envs)
            if close := getattr(env, "close", None):
                stack.callback(close)
            return env

        made = list[VecEnv]()
        # An error of the task is raised when its env is made.
        with checks.run(_TASK if is_task else check_env.MEMBERS):
            made.append(make(range(num_envs)))
        if made and _check_members(checks, made[0], num_envs, steps, seed):
            env, actions = made[0], random_actions(made[0], steps, seed)
            if first := _check_results(checks, env, actions):
                remedies = _TASK_REMEDIES if is_task else _ENV_REMEDIES
                _compare_envs(checks, env, make, first, actions[:_COMPARED_STEPS], remedies)
    for each in checks.all.values():
        if each.state == "not run" and not each.note:
            each.note = "fix the other findings first"
    return list(checks.all.values())


def _check_members(checks: _Checks, env: VecEnv, num_envs: int, steps: int, seed: int) -> bool:
    """Check the members of an env, and the functions of its task. Return whether its results can be checked."""
    with checks.run(check_env.MEMBERS):
        checks.add(*check_env_members(env), *_check_place(env, num_envs))
    if checks.found(check_env.MEMBERS, check_env.LOG):
        return False
    robot_env = as_robot_env(env)
    if robot_env is None:
        if not env.capturable:
            checks.all[_CAPTURE].note = "not needed: `capturable` is False on the CPU"
        return True
    from paceline.env.guarded_task import run_guarded

    with checks.run(_TASK, _CAPTURE, _READ_ONLY):
        guard = run_guarded(robot_env.task, num_envs, steps, seed).guard
        checks.add(*(Finding(_CAPTURE, text) for text in guard.syncs))
        checks.add(*(Finding(_READ_ONLY, text) for text in guard.contract))
    return not checks.found(_TASK, _READ_ONLY)


def _check_results(checks: _Checks, env: VecEnv, actions: Tensor) -> list[dict[str, Tensor]]:
    """Check the results of `reset` and of steps. Return the first of them, as `_record` does; nothing if they cannot be
    compared."""
    checker, obs, first = EnvChecker(env), dict[str, Tensor](), list[dict[str, Tensor]]()
    with checks.run(check_env.RESET):
        obs = env.reset()
        checks.add(*checker.reset(obs), *checker.observations(env.observe(), "observe()"))
    if checks.all[check_env.RESET].state == "ok":
        with checks.run(*check_env.STEP_RESULTS, _FINITE, *([_CAPTURE] if env.capturable else [])):
            first += [_clone(obs), *_check_steps(checks, env, checker, obs, actions)]
    return first if all(checks.all[name].state == "ok" for name in check_env.RESULTS) else []


def _compare_envs(
    checks: _Checks,
    env: VecEnv,
    make: Callable[[range], VecEnv],
    first: list[dict[str, Tensor]],
    actions: Tensor,
    remedies: dict[str, str],
) -> None:
    """Compare the first results of `env` with those of others: with the same seed, after `load_state`, and as ranks."""

    def compare(check: str, expected: Any, got: Any, who: str, tolerance: float = 0.0) -> None:
        if difference := _difference(expected, got, tolerance, who):
            checks.add(Finding(check, f"{difference}: {remedies[check]}"))

    again = None
    with checks.run(_AGAIN):
        again = make(range(env.num_envs))
        again.prefetch_random(len(actions))
        compare(_AGAIN, first, _record(again, actions), "two envs with the same seed")
    if again is None or checks.found(_AGAIN):
        return
    with checks.run(_STATE):
        expected, got = _steps_after_load(checks, env, again, actions)
        compare(_STATE, expected, got, "an env and one that loads its state")
    with checks.run(_RANKS):
        half = env.num_envs // 2
        ranks = (range(half), range(half, env.num_envs))
        parts = [_record(make(envs), actions[:, envs.start : envs.stop]) for envs in ranks]
        joined = [
            {name: torch.cat([part[name] for part in both]) for name in both[0]} for both in zip(*parts, strict=True)
        ]
        compare(_RANKS, first, joined, "1 and 2 ranks", _RANK_TOLERANCE)


def _check_place(env: VecEnv, num_envs: int) -> Iterator[Finding]:
    for name, wanted in (("num_envs", num_envs), ("first_env", 0)):
        if getattr(env, name, wanted) != wanted:
            text = f"{name} is {getattr(env, name)}, but `make` received {wanted}: keep the argument"
            yield Finding(check_env.MEMBERS, text)


def _check_steps(
    checks: _Checks, env: VecEnv, checker: EnvChecker, first_obs: dict[str, Tensor], actions: Tensor
) -> list[dict[str, Tensor]]:
    """Check steps after a reset. Return the first results, as `_record` does."""
    syncs, taken, first = SyncFindings(), list[Step](), list[dict[str, Tensor]]()
    for number, action in enumerate(actions.unbind()):
        if number == _COMPARED_STEPS and as_robot_env(env):
            approach_time_limit(env)
        given = action.clone()
        with DetectSyncs(syncs) if env.capturable else nullcontext():
            taken.append(env.step(action))
        checks.add(*checker.step(taken[-1], action, given))
        if checks.found(check_env.STEPS, check_env.LOG):
            raise _IncompleteError
        if number < _COMPARED_STEPS:
            first.append(_flat(taken[-1]))
    if non_finite := first_non_finite(env, first_obs, taken):
        checks.add(Finding(_FINITE, f"{non_finite}: end the episode before values overflow, or clamp them"))
    faults = env.faults()
    if not isinstance(faults, Tensor) or faults.shape != (2,) or faults.dtype != torch.float32:
        checks.add(Finding(check_env.STEPS, "faults() must be a float32 tensor of shape [2]: failures and overflows"))
    checks.add(*(Finding(_CAPTURE, text) for text in syncs.texts))
    steps = counted(len(taken), "step")
    seen = f"{checker.terminated} terminated, {checker.truncated} truncated in {steps}"
    if not checker.terminated + checker.truncated:
        seen = f"no episode ended in {steps}: --steps {env.max_episode_steps + 1} reaches the time limit"
    checks.all[check_env.ENDS].note = seen
    return first


def _steps_after_load(checks: _Checks, env: VecEnv, other: VecEnv, actions: Tensor) -> tuple[Any, Any]:
    """Load the state of `env` into `other`. Return the results of the next steps of both."""
    saved, findings = env.state(), list[str]()
    for name, values in saved.items():
        if not isinstance(values, Tensor):
            findings.append(f"state()[{name!r}] is {type(values).__name__}: make it a tensor")
        elif values.dim() and len(values) != env.num_envs:
            shape = list(values.shape)
            findings.append(f"state()[{name!r}] has shape {shape}: give it one row per env, or make it a scalar")
    steps = saved.get("episode_step")
    if not isinstance(steps, Tensor) or tuple(steps.shape) != (env.num_envs,):
        findings.append("state() has no 'episode_step' of shape [env]: add the steps of the running episodes")
    checks.add(*(Finding(_STATE, text) for text in findings))
    if findings or steps is None:
        raise _IncompleteError
    copies, before = _clone(saved), _clone(env.observe())
    expected = [before, *(_flat(env.step(action)) for action in actions.unbind())]
    for name, values in saved.items():
        if not same(values, copies[name]):
            text = f"a later step writes to state()[{name!r}]: return a copy, for example by clone()"
            checks.add(Finding(_STATE, text))
            raise _IncompleteError
    other.load_state(copies)
    if bool(steps.any()) and not bool(other.state()["episode_step"].any()):
        checks.all[_STATE].note = "load_state() starts new episodes, so a resumed run is not exact"
        return [], []
    return expected, [_clone(other.observe()), *(_flat(other.step(action)) for action in actions.unbind())]


def _record(env: VecEnv, actions: Tensor) -> list[dict[str, Tensor]]:
    """Return copies of the first observations and of the results of each step, by name."""
    return [_clone(env.reset()), *(_flat(env.step(action)) for action in actions.unbind())]


def _flat(step: Step) -> dict[str, Tensor]:
    parts = {name: getattr(step, name) for name in ("reward", "terminated", "truncated", "log")}
    for kind in ("obs", "final_obs"):
        parts |= {f"{kind}[{name!r}]": value for name, value in getattr(step, kind).items()}
    return _clone(parts)


def _clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _difference(
    expected: list[dict[str, Tensor]], got: list[dict[str, Tensor]], tolerance: float, who: str
) -> str | None:
    """Describe the first step in which two records differ."""
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        when = f"in step {number}" if number else "before the first step"
        for name, values in one.items():
            if name not in other or other[name].shape != values.shape:
                return f"{name} has another shape {when} in {who}"
            a, b = values.double(), other[name].double()
            if not (same(a, b) or (tolerance and torch.allclose(a, b, tolerance, tolerance, equal_nan=True))):
                env = int((a != b).flatten(1).any(1).nonzero()[0]) if a.dim() > 1 else int((a != b).nonzero()[0])
                return f"{name} of env {env} differs {when} between {who}"
    return None


def _raised(error: Exception) -> str:
    """Describe an exception by its place in the code of the user."""
    if isinstance(error, UserError):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TORCH)]
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)] or frames
    place = own[-1]
    line = linecache.getline(place.filename, place.lineno or 0).strip()
    where = f"{Path(place.filename).name}:{place.lineno}, `{line}`"
    return f"{type(error).__name__} in {where}: {one_line(error)}"
