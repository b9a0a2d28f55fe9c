"""An env with the interface of RSL-RL, as mjlab and Isaac Lab have it, as a `VecEnv`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError

_DEFAULT_GROUPS = {"policy": ("policy", "actor"), "critic": ("critic",)}
"""Groups of the env that are looked for if none are given; the first that exists is used."""


class RslRlEnv:
    """Adapter for `rsl_rl.env.VecEnv` of RSL-RL 3 or newer, whose observations are a TensorDict of groups.

    The interface has no observations of the state in which an episode ended: `Step.final_obs` has those before the step
    instead, as RSL-RL uses them to bootstrap a time limit. It cannot save its envs either, so a resumed run starts new
    episodes. Each rank has its own random numbers, so a run depends on the number of ranks.
    """

    capturable: bool = False

    def __init__(
        self,
        env: Any,
        device: torch.device | str = "cpu",
        first_env: int = 0,
        groups: Mapping[str, Sequence[str]] | None = None,
        step_seconds: float | None = None,
    ):
        """`groups` are the groups of the env whose columns the observations "policy" and "critic" consist of. By
        default they are the groups "policy" or "actor", and "critic". `step_seconds` is by default `step_dt` of the
        env."""
        self.env, self.first_env, self.device = env, first_env, torch.device(device)
        self.num_envs, self.num_actions = int(env.num_envs), int(env.num_actions)
        self.max_episode_steps = int(torch.as_tensor(env.max_episode_length).max())
        seconds = getattr(self._unwrapped, "step_dt", None) if step_seconds is None else step_seconds
        if seconds is None:
            raise UserError(f"{type(env).__name__} has no step_dt: give RslRlEnv the time of a step as step_seconds")
        self.step_seconds = float(seconds)
        obs, extras = self._start()
        self._groups = _chosen_groups(obs, groups)
        self._latest = self._observations(obs)
        self.observation_spec = {name: TensorSpec(tuple(rows.shape[1:])) for name, rows in self._latest.items()}
        # A reset reports means over the episodes that it ends, under names that do not change.
        self._logged = tuple(name for name, value in _log(extras).items() if _is_number(value))
        self.log_names: tuple[str, ...] = ("length", "return", *map(_metric_name, self._logged))
        self._sums = torch.zeros(self.num_envs, 2, device=self.device)
        self._is_new = True

    @property
    def _unwrapped(self) -> Any:
        """The env without wrappers, which counts the steps of the run."""
        return getattr(self.env, "unwrapped", self.env)

    def _start(self) -> tuple[Any, Any]:
        """Start new episodes. Return the observations and the extras. RSL-RL itself never calls `reset`, so an env
        may have none, and then has been reset when it was made."""
        if hasattr(self.env, "reset"):
            obs, extras = self.env.reset()
            return obs, extras
        return self.env.get_observations(), {}

    def reset(self) -> dict[str, Tensor]:
        if not self._is_new:
            self._latest = self._observations(self._start()[0])
        self._is_new = False
        self._sums = torch.zeros_like(self._sums)
        return self.observe()

    def observe(self) -> dict[str, Tensor]:
        # Not `get_observations` of the env, which samples the noise of the observations again.
        return {name: rows.clone() for name, rows in self._latest.items()}

    def step(self, actions: Tensor) -> Step:
        before, self._is_new = self._latest, False
        obs, reward, dones, extras = self.env.step(actions)
        done, reward = dones.to(self.device).bool(), reward.to(self.device, torch.float32, copy=True)
        # Without time limits in the extras, every end of an episode is terminal, as for RSL-RL.
        time_outs = extras.get("time_outs")
        truncated = torch.zeros_like(done) if time_outs is None else time_outs.to(self.device).bool() & done
        self._latest = self._observations(obs)
        final_obs = {name: torch.where(done[:, None], before[name], rows) for name, rows in self._latest.items()}
        self._sums = self._sums + torch.stack((torch.ones_like(reward), reward), dim=1)
        log = torch.cat((self._sums, self._logged_means(extras)), dim=1)
        self._sums = self._sums.masked_fill(done[:, None], 0.0)
        return Step(self.observe(), reward, done & ~truncated, truncated, final_obs, log)

    def _logged_means(self, extras: Mapping[str, Any]) -> Tensor:
        """Return the means that the env reports, in the row of every env, [env, names]. Only rows whose episode ended
        are used, so that their mean over a rollout is weighted by episodes."""
        log = _log(extras)
        values = [torch.as_tensor(log.get(name, 0.0), dtype=torch.float32, device=self.device) for name in self._logged]
        row = torch.stack([value.mean() for value in values]) if values else self._sums.new_zeros(0)
        return row.expand(self.num_envs, -1)

    def _observations(self, obs: Any) -> dict[str, Tensor]:
        """Return new tensors with the columns of the chosen groups, float32 [env, n]."""
        found = {}
        for name, parts in self._groups.items():
            rows = [obs[part].to(self.device, torch.float32) for part in parts]
            found[name] = torch.cat(rows, dim=1) if len(rows) > 1 else rows[0].clone()
        return found

    def prefetch_random(self, steps: int) -> None:
        """Do nothing: the env samples its own numbers."""

    def faults(self) -> Tensor:
        """Return zeros: the env does not report failures."""
        return torch.zeros(2, device=self.device)

    def state(self) -> dict[str, Tensor]:
        """Return the number of steps of the running episodes, and of the run, on which curricula depend."""
        steps = int(getattr(self._unwrapped, "common_step_counter", 0))
        return {"steps": torch.tensor(steps), "episode_step": self._sums[:, 0].long()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Start new episodes, with the difficulty that the curricula had."""
        if hasattr(self._unwrapped, "common_step_counter"):
            self._unwrapped.common_step_counter = int(state["steps"])
        self.reset()

    def close(self) -> None:
        self.env.close()


def _chosen_groups(obs: Any, groups: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """Return the groups of the env for the observations "policy" and "critic". Raise UserError if one is missing or is
    not a vector."""
    if not hasattr(obs, "keys"):
        kind = type(obs).__name__
        raise UserError(f"the observations are a {kind}, not a TensorDict: RSL-RL 3 or newer is needed (Isaac Lab 2.3)")
    present = [str(name) for name in obs.keys()]  # noqa: SIM118  iterating over a TensorDict gives its rows
    if groups is None:
        found = {name: [part for part in parts if part in present][:1] for name, parts in _DEFAULT_GROUPS.items()}
        groups = {name: parts for name, parts in found.items() if parts}
    if not groups.get("policy"):
        raise UserError(f"no group of observations for the policy: the env has {', '.join(present)}; give `groups`")
    for name, parts in groups.items():
        if name not in _DEFAULT_GROUPS:
            raise UserError(f"observations {name!r}: learners have {' and '.join(_DEFAULT_GROUPS)}")
        for part in parts:
            if part not in present:
                raise UserError(f"no group {part!r} of observations: the env has {', '.join(present)}")
            if not isinstance(obs[part], Tensor) or obs[part].dim() != 2:
                shape = f"shape {tuple(obs[part].shape[1:])}" if isinstance(obs[part], Tensor) else "several terms"
                raise UserError(f"the group {part!r} of observations has {shape}: only vectors are supported")
    return {name: tuple(parts) for name, parts in groups.items() if parts}


def _log(extras: Mapping[str, Any]) -> Mapping[str, Any]:
    return extras.get("log") or extras.get("episode") or {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) or (isinstance(value, Tensor) and not value.is_complex())


def _metric_name(name: str) -> str:
    """Return a name that TensorBoard groups, as RSL-RL does."""
    return name if "/" in name else f"Episode/{name}"
