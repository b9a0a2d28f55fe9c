"""Step an env and report the metrics of an iteration, for all learners."""

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.env.vec_env import Step, VecEnv, action_spec
from paceline.errors import UserError
from paceline.learners.encoders import TARGETS, images_of
from paceline.tensors.graph import capture


class Clock:
    """Measures the seconds between laps without a host sync."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.lap()

    def lap(self) -> None:
        self._marks.append(torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter())
        if self._cuda:
            self._marks[-1].record()

    def laps(self) -> list[float]:
        """Return the seconds of each lap. Call it after the device has finished."""
        return [a.elapsed_time(b) / 1000.0 if self._cuda else b - a for a, b in pairwise(self._marks)]


def vector_widths(env: VecEnv, learner: str, images: tuple[str, ...] = (), any_name: bool = False) -> dict[str, int]:
    """Return the width of each observation group that networks observe, except `images`, which the learner encodes.
    Raise UserError if the learner cannot use a group. With `any_name` it uses other groups than "policy" and "critic"
    too."""
    groups = {name: spec for name, spec in env.observation_spec.items() if name not in (*images, TARGETS)}
    for name, spec in groups.items():
        if not (any_name or name in ("policy", "critic")) or len(spec.shape) != 1 or not spec.dtype.is_floating_point:
            raise UserError(
                f"learner {learner} does not use the observation group {name!r} ({spec.dtype}, shape {spec.shape}): "
                'its networks take vectors of floats, from the groups "policy" and "critic"'
            )
    return {name: spec.shape[0] for name, spec in groups.items()}


class RolloutEnv:
    """Steps an env, on CUDA as one graph, and keeps the latest observations and the steps of the current iteration."""

    def __init__(self, env: VecEnv, seed: int, group: Group):
        self.env, self.group, self._seed = env, group, seed
        self.share = env.num_envs / sum(group.all_gather(env.num_envs))
        """Fraction of all envs that are on this rank."""
        self._images = tuple(images_of(env))
        # Allocated once and updated in place, so that CUDA graphs can read them.
        self._obs = {
            name: torch.zeros(env.num_envs, *spec.shape, dtype=spec.dtype, device=env.device)
            for name, spec in env.observation_spec.items()
        }
        for name in self._images:
            self._obs[name] = self._obs[name].contiguous(memory_format=torch.channels_last)
        self._has_obs = False
        self.first_obs: dict[str, Tensor] = {}
        """Observations before the first step of the rollout."""
        self.steps: list[Step] = []
        """Steps of the rollout, without images."""
        self.actions = action_spec(env)
        self._actions = self.actions.zeros(env.num_envs, env.device)
        self._graph = capture(lambda: self._step(self._actions), env.device, warp=True) if env.capturable else None

    @property
    def obs(self) -> dict[str, Tensor]:
        """Copies of the observations on which the policy acts next, [env, ...] for each group."""
        return _clone(self._obs)

    def reset_once(self) -> None:
        """Reset the env, unless it has been reset or restored before."""
        if not self._has_obs:
            self.set_obs(self.env.reset())

    def set_obs(self, obs: dict[str, Tensor]) -> None:
        self._has_obs = True
        for name, latest in self._obs.items():
            latest.copy_(obs[name])

    def begin_iteration(self, iteration: int) -> None:
        """Reset the env if necessary, and seed torch's generator, from which libraries sample, with (seed, rank,
        iteration), so that a checkpoint does not need its state."""
        self.reset_once()
        numbers = torch.tensor((self._seed, self.group.rank.index, iteration), dtype=torch.int64)
        # A multiplicative hash modulo 2^64.
        mixed = (numbers * torch.tensor((6364136223846793005, 1442695040888963407, 3935559000370003845))).sum()
        torch.manual_seed(int(mixed) % 2**63)

    def begin_rollout(self, steps: int, captured: bool = False) -> dict[str, Tensor]:
        """Start to record a rollout of `steps` steps, and return a copy of the first observations. With `captured` the
        whole rollout is part of the caller's CUDA graph and calls `step_captured`."""
        self.steps, self.first_obs = [], self.obs
        if captured or self._graph is None:
            self.env.prefetch_random(steps)
        return self.obs

    @torch.no_grad()
    def step(self, actions: Tensor) -> Step:
        """Step the env. Return new tensors, because libraries keep some of them."""
        actions = actions.to(self._actions.dtype)
        if self._graph is None:
            return self.step_captured(actions)
        self._actions.copy_(actions)
        return self._record(Step(**{name: _clone(value) for name, value in vars(self._graph()).items()}))

    def step_captured(self, actions: Tensor) -> Step:
        """Step the env as a part of the caller's CUDA graph."""
        step = self._step(actions)
        # Copies, because the next step of the env writes to its images.
        return self._record(replace(step, obs=step.obs | {name: step.obs[name].clone() for name in self._images}))

    def _record(self, step: Step) -> Step:
        vectors = {name: obs for name, obs in step.obs.items() if name not in self._images}
        self.steps.append(replace(step, obs=vectors))
        return step

    def _step(self, actions: Tensor) -> Step:
        step = self.env.step(actions)
        self.set_obs(step.obs)
        return step

    def report(self, losses: dict[str, Any], clock: Clock) -> dict[str, float]:
        """Return the metrics of `Learner.learn`, over all ranks by one collective: the recorded episodes, the faults
        of the env and the mean of each loss."""
        device = self.env.device
        values = [
            torch.as_tensor(value, dtype=torch.float64, device=device).detach().mean() for value in losses.values()
        ]
        done = torch.stack([step.terminated | step.truncated for step in self.steps])
        totals = self.totals(done, torch.stack([step.log for step in self.steps]), self.env.faults())
        own = torch.cat((totals, torch.stack(values) * self.share))
        return self.metrics(self.group.sum_(own).tolist(), tuple(losses), clock)

    @staticmethod
    def totals(done: Tensor, log: Tensor, faults: Tensor) -> Tensor:
        """Return the number of episodes that ended in a rollout, the sums over them of the columns of `Step.log`, and
        `VecEnv.faults`, float64. `done` is [step, env], `log` is [step, env, names]."""
        ended = log.masked_fill(~done.unsqueeze(-1), 0.0).sum((0, 1))
        return torch.cat((done.sum().view(1).double(), ended.double(), faults.double()))

    def metrics(self, values: list[float], loss_names: tuple[str, ...], clock: Clock) -> dict[str, float]:
        """Return the metrics by name. `values` are those of `totals`, summed over ranks, followed by the losses."""
        names = ("episodes", *self.env.log_names, "failures", "overflows", *loss_names)
        collect, update = clock.laps()
        return dict(zip(names, values, strict=True)) | {"seconds/collect": collect, "seconds/update": update}

    def average(self, value: float) -> float:
        """Return the average of a number over ranks, weighted by their envs."""
        own = torch.as_tensor(value * self.share, dtype=torch.float64, device=self.env.device)
        return float(self.group.sum_(own))

    def load_state(self, state: dict[str, Any]) -> None:
        self.env.load_state(state)
        self.set_obs(self.env.observe())


def _clone(value: Any) -> Any:
    """Copy a tensor, or the tensors of a dict."""
    return {name: tensor.clone() for name, tensor in value.items()} if isinstance(value, dict) else value.clone()


def first_non_finite(env: VecEnv, first_obs: dict[str, Tensor], steps: list[Step]) -> str | None:
    """Return a phrase that names the first number of a rollout that is not finite, or None. `first_obs` are the
    observations before the first step."""
    found = _describe(env, _named("obs", first_obs), "before step 1")
    for number, step in enumerate(steps, start=1):
        terms = {
            f"reward term {name.removeprefix('reward/')!r}": total.masked_fill(step.reward.isfinite(), 0.0)
            for name, total in zip(env.log_names, step.log.unbind(1), strict=True)
            if name.startswith("reward/")
        }
        # Final observations are only used where the time limit ended an episode.
        used = {
            group: obs.masked_fill(~step.truncated.view(-1, *[1] * (obs.dim() - 1)), 0)
            for group, obs in step.final_obs.items()
        }
        parts = terms | {"the reward": step.reward} | _named("final_obs", used) | _named("obs", step.obs)
        found = found or _describe(env, parts, f"in step {number}")
    return found


def _named(kind: str, obs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f'{kind}["{group}"]': part for group, part in obs.items()}


def _describe(env: VecEnv, parts: dict[str, Tensor], when: str) -> str | None:
    """Return a phrase that names the first number that is not finite, in the order of `parts`, or None."""
    for name, values in parts.items():
        for place in values.isfinite().logical_not().nonzero().tolist()[:1]:
            row, *columns = place
            column = f"[:, {', '.join(map(str, columns))}]" if columns else ""
            value = values[tuple(place)].item()
            return f"{name}{column} of env {env.first_env + row} became {value} {when} of the rollout"
    return None
