"""An env one step at a time, for learners that decide between steps; and what all of these have in common."""

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.env.vec_env import Step, VecEnv
from paceline.errors import UserError
from paceline.learners.non_finite import Recorder
from paceline.tensors.graph import capture

_FAULT_NAMES = ("failures", "overflows")


class Clock:
    """Seconds between laps, without making the device wait."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.lap()

    def lap(self) -> None:
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self._marks.append(mark)
        else:
            self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """To be called once the device is known to be done."""
        return [a.elapsed_time(b) / 1000.0 if self._cuda else b - a for a, b in pairwise(self._marks)]


class LatestObservations:
    """The observations on which the policy acts next, [env, ...] for each group. The tensors are allocated once and
    updated in place, so that CUDA graphs can read them."""

    def __init__(self, env: VecEnv):
        self._env, self._is_set = env, False
        self.groups = {
            name: torch.zeros(env.num_envs, *spec.shape, dtype=spec.dtype, device=env.device)
            for name, spec in env.observation_spec.items()
        }

    def start(self) -> None:
        """Reset the env, unless observations have been set before."""
        if not self._is_set:
            self.set(self._env.reset())

    def set(self, obs: dict[str, Tensor]) -> None:
        self._is_set = True
        for name, latest in self.groups.items():
            latest.copy_(obs[name])


def vector_widths(env: VecEnv, learner: str) -> dict[str, int]:
    """Return the width of each observation group. Raise UserError if the learner cannot use a group."""
    for name, spec in env.observation_spec.items():
        if name not in ("policy", "critic") or len(spec.shape) != 1 or not spec.dtype.is_floating_point:
            raise UserError(
                f"learner {learner} does not use the observation group {name!r} ({spec.dtype}, shape {spec.shape}): "
                'its networks take vectors of floats, from the groups "policy" and "critic"'
            )
    return {name: spec.shape[0] for name, spec in env.observation_spec.items()}


class Stepper:
    """Steps an env, on CUDA by one graph, and keeps what a library should not have to: the latest observations, the
    sums over episodes that ended, and the seed of each iteration."""

    def __init__(self, env: VecEnv, seed: int, group: Group):
        self.env, self.group, self._seed = env, group, seed
        self.share = env.num_envs / sum(group.all_gather(env.num_envs))
        """This rank's part of all worlds."""
        self._latest = LatestObservations(env)
        self._actions = torch.zeros(env.num_envs, env.num_actions, device=env.device)
        self._tally = torch.zeros(1 + len(env.log_names), dtype=torch.float64, device=env.device)
        self._recorder = Recorder(env, self._latest.groups)
        self._graph = capture(lambda: self.take(self._actions), env.device, warp=True) if env.capturable else None

    @property
    def obs(self) -> dict[str, Tensor]:
        """What to act on next, by group; fresh."""
        return {name: obs.clone() for name, obs in self._latest.groups.items()}

    def begin(self, iteration: int, steps: int = 0) -> None:
        """An iteration, the numbers of whose next `steps` are drawn at once. Torch's own generator, which the libraries
        draw from, starts anew in each, so that nothing of it need be saved; and differently on each rank."""
        mixed = torch.tensor((self._seed, self.group.rank.index, iteration), dtype=torch.int64)
        # Multiplied by odd constants that spread neighbours apart, modulo 2^64.
        spread = (mixed * torch.tensor((6364136223846793005, 1442695040888963407, 3935559000370003845))).sum()
        torch.manual_seed(int(spread) % 2**63)
        self._tally.zero_()
        self._latest.start()
        self._recorder.begin(self._latest.groups)
        if steps and self._graph is None:
            self.env.prefetch_random(steps)

    @torch.no_grad()
    def step(self, actions: Tensor) -> Step:
        """Every tensor is fresh: libraries keep some, and write into others."""
        if self._graph is None:
            return self.take(actions)
        self._actions.copy_(actions)
        step = self._graph()
        return Step(
            {name: obs.clone() for name, obs in step.obs.items()},
            step.reward.clone(),
            step.terminated.clone(),
            step.truncated.clone(),
            {name: obs.clone() for name, obs in step.final_obs.items()},
            step.log,
        )

    def take(self, actions: Tensor) -> Step:
        """The same as `step`, as a part of the caller's graph."""
        step = self.env.step(actions)
        self._latest.set(step.obs)
        self._recorder.add(step)
        done = (step.terminated | step.truncated).unsqueeze(1)
        ended = torch.cat((done.float(), step.log.masked_fill(~done, 0.0)), dim=1)
        self._tally += ended.sum(0)
        return step

    def report(self, losses: dict[str, float | Tensor], clock: Clock) -> dict[str, float]:
        """An iteration's numbers over all ranks, as `Learner.learn` returns them: episodes, faults, the mean of each
        loss, in one collective; and this rank's seconds."""
        values = [torch.as_tensor(value, dtype=torch.float64, device=self._tally.device) for value in losses.values()]
        own = torch.stack([value.detach().mean() for value in values]) * self.share
        summed = self.group.sum_(torch.cat((self._tally, self.env.faults().double(), own)))
        names = ("episodes", *self.env.log_names, *_FAULT_NAMES, *losses)
        found = dict(zip(names, summed.tolist(), strict=True))
        collect, update = clock.laps()
        return found | {"seconds/collect": collect, "seconds/update": update}

    def first_non_finite(self) -> str | None:
        """Return as `Learner.first_non_finite` does."""
        return self._recorder.find()

    def state(self) -> dict[str, Any]:
        """The worlds' part of `Learner.state`."""
        return self.env.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.env.load_state(state)
        self._latest.set(self.env.observe())


def same_on_all_ranks(group: Group, tensors: list[Tensor]) -> None:
    """Give each tensor the main rank's values, in place."""
    for tensor in tensors:
        # Exact, because all others add zeros.
        shared = tensor.detach().clone() if group.rank.is_main else torch.zeros_like(tensor)
        tensor.detach().copy_(group.sum_(shared))


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """As nested dicts with words for keys, as a checkpoint holds them."""
    found = optimizer.state_dict()
    return {
        "learning_rate": [float(group["lr"]) for group in found["param_groups"]],
        "parameters": {
            str(index): {name: torch.as_tensor(value).clone() for name, value in moments.items()}
            for index, moments in found["state"].items()
        },
    }


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    whole = optimizer.state_dict()
    for group, rate in zip(whole["param_groups"], state["learning_rate"], strict=True):
        group["lr"] = _like(group["lr"], rate)
    # Copies, because the optimiser keeps what it is given and works in place.
    whole["state"] = {
        int(index): {name: tensor.clone() for name, tensor in moments.items()}
        for index, moments in state.get("parameters", {}).items()
    }
    optimizer.load_state_dict(whole)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = _like(group["lr"], learning_rate)


def _like(present: float | Tensor, learning_rate: float) -> float | Tensor:
    """Return a learning rate as a tensor where the optimizer has one, because it is part of a graph."""
    return torch.as_tensor(learning_rate).to(present) if isinstance(present, Tensor) else learning_rate
