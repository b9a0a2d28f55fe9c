"""Evaluate a policy: run complete episodes without exploration noise, and estimate means from them."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor

from paceline.env.vec_env import VecEnv
from paceline.errors import UserError, one_line
from paceline.learners.networks import Policy, PolicyRunner
from paceline.run.directory import write_atomically
from paceline.run.versions import versions
from paceline.tensors.graph import capture
from paceline.validation import from_dict, parse_json, read_text

SEED_OFFSET = 1_000_003
"""Added to the seed of a run, so that a policy is evaluated in other episodes than those of its training."""
ENDED_EARLY = "ended_early"
"""Name of the fraction of episodes that ended in a terminal state before the time limit."""
_CHECK_STEPS = 50
"""Number of steps between two checks whether all episodes have ended, each of which waits for the device."""
_Z = NormalDist().inv_cdf(0.975)
_FIRST_QUANTILES = (12.7062, 4.3027, 3.1824)
"""Quantiles of 1, 2 and 3 degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    """Mean over episodes with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Estimates for one policy."""

    task: str
    iteration: int
    engine: str
    device_name: str
    seed: int
    episodes: int
    """Number of episodes of each dict of estimates."""
    checkpoint: str | None = None
    """File of the policy; None in an evaluation during training."""
    nominal: dict[str, Estimate] | None = None
    """Estimates by name in envs that all have the model of the task."""
    randomized: dict[str, Estimate] | None = None
    """Estimates by name in envs with randomized models."""

    @property
    def estimates(self) -> dict[str, Estimate]:
        """Estimates in randomized envs if there are any, otherwise in nominal ones."""
        return self.randomized or self.nominal or {}

    @classmethod
    def read(cls, file: Path) -> "Evaluation":
        try:
            values = parse_json(read_text(file))
            values.pop("versions", None)
            return from_dict(cls, values, "its content")
        except (OSError, ValueError, UserError) as error:
            raise UserError(f"cannot read {file}: {one_line(error)}; evaluate the run again") from None

    def write(self, directory: Path) -> Path:
        """Write the evaluation to a file in a directory, and return the file."""
        file = directory / f"iteration_{self.iteration:08d}_{self.engine}_seed_{self.seed}.json"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(asdict(self) | {"versions": versions()}, indent=2).encode() + b"\n")
        except OSError as error:
            raise UserError(f"cannot write the evaluation {file}: {error.strerror}") from None
        return file


@torch.no_grad()
def run_episodes(
    env: VecEnv,
    policy: Policy,
    per_env: int = 1,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> dict[str, Tensor]:
    """Reset all envs and run `per_env` complete episodes in each. Return the values of each episode by name, float32
    [per_env * num_envs]: the columns of `Step.log` and `ENDED_EARLY`.

    Every env contributes the same number of episodes. The first episodes to end would be a biased choice, because
    short ones end first. `progress` gets the number of steps so far and the largest number of steps. Raise UserError
    if an episode is longer than the time limit.
    """
    episodes = _Episodes(env, policy, per_env)
    step = capture(episodes.step, env.device, warp=True) if env.capturable else episodes.step
    total = per_env * env.max_episode_steps
    for number in range(1, total + 1):
        step()
        if number % _CHECK_STEPS == 0:
            if episodes.all_ended():
                break
            progress(number, total)
    if not episodes.all_ended():
        raise UserError(
            f"an episode did not end within max_episode_steps, {env.max_episode_steps}, the time limit of the env: "
            "truncate it there"
        )
    return episodes.values()


class _Episodes:
    """Steps an env and keeps the values of the episodes that end. All tensors are updated in place."""

    def __init__(self, env: VecEnv, policy: Policy, per_env: int):
        self._env, device = env, env.device
        self._policy = PolicyRunner(policy.to(device).eval(), env.num_envs, device)
        self._obs = {name: obs.clone() for name, obs in env.reset().items()}
        self._ended = torch.zeros(env.num_envs, dtype=torch.int64, device=device)
        self._numbers = torch.arange(per_env, device=device).unsqueeze(1)
        self._values = torch.zeros(per_env, env.num_envs, len(env.log_names) + 1, device=device)

    def step(self) -> None:
        step = self._env.step(self._policy.act(self._obs))
        for name, obs in self._obs.items():
            obs.copy_(step.obs[name])
        over = step.terminated | step.truncated
        self._policy.reset(over)
        values = torch.cat((step.log, step.terminated.unsqueeze(1)), dim=1)
        # [episode, env]: the episode that ends now. Further episodes of an env are not kept.
        now = over & (self._numbers == self._ended)
        self._values.copy_(torch.where(now.unsqueeze(2), values, self._values))
        self._ended += over

    def all_ended(self) -> bool:
        return bool((self._ended >= len(self._numbers)).all())

    def values(self) -> dict[str, Tensor]:
        columns = self._values.flatten(0, 1).cpu().unbind(1)
        return dict(zip((*self._env.log_names, ENDED_EARLY), columns, strict=True))


def estimate(values: Tensor) -> Estimate:
    """Return the mean and its confidence interval: that of Wilson if all values are 0 or 1, otherwise that of
    Student's t-distribution."""
    count, mean = len(values), float(values.double().mean())
    if bool(((values == 0) | (values == 1)).all()):
        center = (mean + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
        half = _Z / (1 + _Z**2 / count) * sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2))
        # Rounding must not lead outside of 0 to 1.
        return Estimate(mean, max(0.0, min(center - half, mean)), min(1.0, max(center + half, mean)))
    if count < 2:
        return Estimate(mean, -float("inf"), float("inf"))
    half = student_quantile(count - 1) * float(values.double().std()) / sqrt(count)
    return Estimate(mean, mean - half, mean + half)


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t-distribution. From 4 degrees of freedom on it is the expansion around
    the normal distribution, which is accurate to 1 %."""
    if freedom <= len(_FIRST_QUANTILES):
        return _FIRST_QUANTILES[freedom - 1]
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
