"""Checks of a `VecEnv`: its members, and what `reset`, `step`, `observe` and `state` return."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.env.vec_env import Step, TensorSpec, VecEnv, action_spec
from paceline.errors import UserError
from paceline.validation import LARGEST_COUNT, shown

CHECKED_STEPS = 32
"""Number of steps that are checked at the start of a training."""
# A later step may write to a tensor too, if an env uses several buffers in turn.
_KEPT_STEPS = 3
_STEPS_TO_LIMIT = 4
_COUNTS = {"num_envs": 1, "first_env": 0, "num_actions": 1, "max_episode_steps": 1}
"""Minimum of the whole numbers of an env."""
_METHODS = ("reset", "observe", "step", "prefetch_random", "faults", "state", "load_state")
_VECTORS = ("policy", "critic")


class Finding(NamedTuple):
    """A property that an env lacks."""

    check: str
    """Name of the check, one of `CHECKS`."""
    text: str
    """Fault and its remedy, in one line."""


CHECKS = (
    "members of the env",
    "shapes and dtypes of reset()",
    "shapes and dtypes of step()",
    "terminated and truncated never both",
    "fresh tensors",
    "log names and sums",
    "time limit",
)
"""Checks of members, and of results."""
MEMBERS, *_ = CHECKS
RESULTS, STEP_RESULTS = CHECKS[1:], CHECKS[2:]
RESET, STEPS, ENDS, FRESH, LOG, LIMIT = RESULTS


def check_env_members(env: VecEnv) -> Iterator[Finding]:
    """Yield what is wrong with the attributes and methods of an env."""

    def wrong(text: str) -> Finding:
        return Finding(MEMBERS, text)

    for name in (*_COUNTS, "step_seconds", "device", "capturable", "log_names", "observation_spec", *_METHODS):
        if not hasattr(env, name):
            yield wrong(f"it has no member {name!r}: define it as VecEnv in paceline.env.vec_env does")
    for name, low in _COUNTS.items():
        value = getattr(env, name, low)
        if type(value) is not int or not low <= value <= LARGEST_COUNT:
            yield wrong(f"{name} is {shown(value)}: make it a whole number, at least {low}")
    for name in _METHODS:
        if not callable(getattr(env, name, print)):
            yield wrong(f"{name} is {shown(getattr(env, name))}: make it a method")
    seconds = getattr(env, "step_seconds", 1.0)
    if not isinstance(seconds, (int, float)) or not 0.0 < seconds < math.inf:
        yield wrong(f"step_seconds is {shown(seconds)}: make it the simulated time of a step in seconds, above 0")
    if not isinstance(getattr(env, "device", torch.device("cpu")), torch.device):
        yield wrong(f"device is {shown(env.device)}: make it a torch.device, as `make` receives it")
    if not isinstance(getattr(env, "capturable", False), bool):
        yield wrong(f"capturable is {shown(env.capturable)}: make it True or False")
    try:
        if hasattr(env, "num_actions"):
            action_spec(env)
    except UserError as error:
        yield wrong(str(error))
    yield from _check_spec(getattr(env, "observation_spec", {"policy": TensorSpec((1,))}))
    names = getattr(env, "log_names", ("length", "return"))
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        yield Finding(LOG, f"log_names is {shown(names)}: make it a tuple of strings")
    elif names[:2] != ("length", "return"):
        yield Finding(LOG, f"log_names starts with {shown(names[:2])}: the first two must be 'length' and 'return'")
    elif repeated := [name for name in names if names.count(name) > 1]:
        yield Finding(LOG, f"log_names has {repeated[0]!r} twice: give each column its own name")


def _check_spec(specs: Any) -> Iterator[Finding]:
    if not isinstance(specs, dict) or not all(isinstance(spec, TensorSpec) for spec in specs.values()):
        yield Finding(MEMBERS, f"observation_spec is {shown(specs)}: make it a dict of names and TensorSpec")
        return
    if not any(name == "policy" or len(spec.shape) == 3 for name, spec in specs.items()):
        text = (
            f"observation_spec has {', '.join(map(repr, specs)) or 'nothing'}: it needs the group 'policy' or an image"
        )
        yield Finding(MEMBERS, text)
    for name, spec in specs.items():
        if not isinstance(spec.shape, tuple) or not all(type(size) is int and size > 0 for size in spec.shape):
            text = f"observation_spec[{name!r}].shape is {shown(spec.shape)}: give a tuple of the sizes for one env"
            yield Finding(MEMBERS, f"{text}, each at least 1")


class EnvChecker:
    """Checks the results of an env, one call after the other."""

    def __init__(self, env: VecEnv, values: bool = True):
        """Without `values` only shapes and dtypes are checked, which never waits for a GPU."""
        self._env, self._values = env, values
        self._kept: deque[dict[str, tuple[Tensor, Tensor]]] = deque(maxlen=_KEPT_STEPS)
        self._sums: Tensor | None = None
        self.terminated = self.truncated = 0
        """Number of episodes that ended so far."""

    def reset(self, obs: Any) -> Iterator[Finding]:
        """Yield what is wrong with the result of `reset`."""
        self._sums = torch.zeros(self._env.num_envs, 2, dtype=torch.float64, device=self._env.device)
        yield from self.observations(obs, "reset()")

    def forget(self) -> None:
        """Start again after `load_state`: the sums of the running episodes are unknown."""
        self._sums = None
        self._kept.clear()

    def observations(self, obs: Any, what: str, check: str = RESET) -> Iterator[Finding]:
        """Yield what is wrong with all observation groups."""
        env = self._env
        yield from self._groups(obs, what, env.observation_spec, check)
        if isinstance(obs, dict):
            vectors = {f"{what}[{n!r}]": o for n, o in obs.items() if n in _VECTORS and isinstance(o, Tensor)}
            self._keep(vectors)

    def step(self, step: Any, actions: Tensor, given: Tensor) -> Iterator[Finding]:
        """Yield what is wrong with the result of `step(actions)`. `given` is a copy of the actions before the call."""
        if not isinstance(step, Step):
            text = f"step(actions) returns {type(step).__name__}: return a paceline.env.vec_env.Step"
            yield Finding(STEPS, text)
            return
        env, found = self._env, list[Finding]()
        vectors = {name: spec for name, spec in env.observation_spec.items() if len(spec.shape) == 1}
        found += self._groups(step.obs, "step().obs", env.observation_spec, STEPS)
        found += self._groups(step.final_obs, "step().final_obs", vectors, STEPS)
        for name, dtype in (("reward", torch.float32), ("terminated", torch.bool), ("truncated", torch.bool)):
            found += self._tensor(getattr(step, name), f"step().{name}", (), dtype, STEPS)
        found += self._tensor(step.log, "step().log", (len(env.log_names),), torch.float32, LOG)
        yield from found
        if found or not self._values:
            return
        yield from self._written()
        if not torch.equal(actions, given):
            yield Finding(FRESH, "step(actions) writes to the actions: copy them before you change them")
        self._keep(_named_tensors(step, vectors))
        yield from self._episodes(step)

    def _episodes(self, step: Step) -> Iterator[Finding]:
        """Yield what is wrong with the ends of episodes and with the log."""
        env, done = self._env, step.terminated | step.truncated
        if (step.terminated & step.truncated).any():
            yield Finding(ENDS, "step() sets both terminated and truncated in an env: use truncated & ~terminated")
        self.terminated += int(step.terminated.sum())
        self.truncated += int(step.truncated.sum())
        if self._sums is None:
            return
        self._sums += torch.stack((torch.ones_like(step.reward), step.reward), dim=1)
        expected = self._sums.float()
        for column, name in enumerate(("length", "return")):
            pairs = torch.stack((step.log[:, column], expected[:, column]), dim=1)
            wrong = (pairs[:, 0] - pairs[:, 1]).abs() > 1e-3 * (1.0 + pairs[:, 1].abs())
            if wrong.any():
                logged, counted = pairs[wrong][0].tolist()
                text = (
                    f"step().log has {name} {logged:g} in an env whose episode has {counted:g} so far: log the sums "
                    "since its start, and for an episode that ends those of the whole episode"
                )
                yield Finding(LOG, text)
                self._sums = None
                return
        if expected[:, 0].max() > env.max_episode_steps:
            text = f"an episode is longer than max_episode_steps, {env.max_episode_steps}: truncate it there"
            yield Finding(LIMIT, text)
        self._sums = self._sums.masked_fill(done.unsqueeze(1), 0.0)

    def _groups(self, obs: Any, what: str, specs: dict[str, TensorSpec], check: str) -> Iterator[Finding]:
        if not isinstance(obs, dict):
            yield Finding(check, f"{what} is {type(obs).__name__}: make it a dict of observation groups")
            return
        for name in obs:
            if name not in self._env.observation_spec:
                yield Finding(check, f"{what} has the group {name!r}: add it to observation_spec, or remove it")
        for name, spec in specs.items():
            if name not in obs:
                yield Finding(check, f"{what} has no group {name!r}: observation_spec has it")
                continue
            yield from self._tensor(obs[name], f"{what}[{name!r}]", spec.shape, spec.dtype, check)

    def _tensor(
        self, value: Any, what: str, shape: tuple[int, ...], dtype: torch.dtype, check: str
    ) -> Iterator[Finding]:
        wanted = (self._env.num_envs, *shape)
        if not isinstance(value, Tensor):
            yield Finding(check, f"{what} is {type(value).__name__}: make it a torch tensor of shape {list(wanted)}")
        elif tuple(value.shape) != wanted:
            yield Finding(check, f"{what} has shape {list(value.shape)}: make it {list(wanted)}, one row per env")
        elif value.dtype != dtype:
            yield Finding(check, f"{what} is {value.dtype}: convert it to {dtype}")
        elif value.device != self._env.device:
            yield Finding(check, f"{what} is on {value.device}: move it to {self._env.device}, the device of the env")

    def _keep(self, tensors: dict[str, Tensor]) -> None:
        """Keep tensors that were returned, to find out whether a later step writes to them."""
        if self._values:
            self._kept.append({name: (tensor, tensor.clone()) for name, tensor in tensors.items()})

    def _written(self) -> Iterator[Finding]:
        for tensors in self._kept:
            for name, (tensor, copy) in tensors.items():
                if not same(tensor, copy):
                    yield Finding(FRESH, f"a later step writes to {name}: return a copy, for example by clone()")
                    self._kept.clear()
                    return


def random_actions(env: VecEnv, steps: int, seed: int) -> Tensor:
    """Return actions for a number of steps, [step, env, num_actions]: normal samples, or random choices."""
    generator, shape = torch.Generator().manual_seed(seed), (steps, env.num_envs)
    if choices := getattr(env, "action_choices", ()):
        columns = [torch.randint(count, shape, generator=generator) for count in choices]
        return torch.stack(columns, dim=2).to(env.device)
    return torch.randn(*shape, env.num_actions, generator=generator).to(env.device)


def approach_time_limit(env: VecEnv) -> None:
    """Let every second env reach its time limit in a few steps."""
    state = env.state()
    state["episode_step"][1::2] = state["episode_step"][1::2].clamp(min=env.max_episode_steps - _STEPS_TO_LIMIT)
    env.load_state(state)


def _named_tensors(step: Step, groups: dict[str, TensorSpec]) -> dict[str, Tensor]:
    """Return the tensors of a step that the env must not write to again."""
    tensors = {f"step().{name}": getattr(step, name) for name in ("reward", "terminated", "truncated", "log")}
    for kind in ("obs", "final_obs"):
        tensors |= {f"step().{kind}[{name!r}]": getattr(step, kind)[name] for name in groups}
    return tensors


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


class CheckedEnv:
    """A `VecEnv` whose first results are checked. It raises UserError for the first one that is wrong, because learners
    would broadcast, convert or overwrite it silently."""

    def __init__(self, env: VecEnv, name: str):
        self._env, self._name, self._steps_left = env, name, CHECKED_STEPS
        self._refuse(check_env_members(env))
        self._checker = EnvChecker(env, values=not env.capturable)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self) -> dict[str, Tensor]:
        obs = self._env.reset()
        self._refuse(self._checker.reset(obs))
        return obs

    def observe(self) -> dict[str, Tensor]:
        obs = self._env.observe()
        self._refuse(self._checker.observations(obs, "observe()"))
        return obs

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._env.load_state(state)
        self._checker.forget()

    def step(self, actions: Tensor) -> Step:
        if not self._steps_left:
            return self._env.step(actions)
        self._steps_left -= 1
        given = actions.clone()
        step = self._env.step(actions)
        self._refuse(self._checker.step(step, actions, given))
        return step

    def _refuse(self, findings: Iterator[Finding]) -> None:
        for finding in findings:
            advice = f"`paceline check {self._name}` checks the whole env"
            raise UserError(f"env {type(self._env).__name__}: {finding.text}; {advice}")
