"""Find the first number from the envs of a rollout that is not finite."""

import math

import torch
from torch import Tensor

from paceline.env.vec_env import Step, VecEnv
from paceline.tensors.graph import fuse

_REWARD = "the reward"
_TERM = "reward/"


class Recorder:
    """Keeps what the envs gave in the first step of a rollout in which a number is not finite.

    Nothing waits for the host, and tensors are updated in place: recording can be part of a CUDA graph.
    """

    def __init__(self, env: VecEnv, obs: dict[str, Tensor]):
        self._env = env
        self._log = torch.zeros(env.num_envs, len(env.log_names), device=env.device)
        reward, nobody = self._log[:, 0], torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
        # Stands for the step before the first one, less its observations.
        self._blank = _results(reward, nobody, obs)
        self._shapes = {name: part.shape[1:] for name, part in (self._blank | _named(obs)).items()}
        columns = len(env.log_names) + sum(shape.numel() for shape in self._shapes.values())
        self._kept = torch.zeros(env.num_envs, columns, device=env.device)
        self._found = torch.zeros((), dtype=torch.bool, device=env.device)
        self._finite_steps = torch.zeros((), dtype=torch.int64, device=env.device)
        self._on_cpu, self._keep = env.device.type == "cpu", fuse(self._keep_first, env.device)

    def begin(self, obs: dict[str, Tensor]) -> None:
        """Start a rollout from these observations."""
        self._found.fill_(False)
        self._finite_steps.zero_()
        self._keep(self._log, self._blank | _named(obs))

    def add(self, step: Step) -> None:
        """Record the next step of the rollout."""
        numbers = (step.reward, *step.final_obs.values(), *step.obs.values())
        # The host may look at numbers on a CPU, and a sum is faster than a copy.
        if self._on_cpu and all(math.isfinite(part.sum()) for part in numbers):
            self._finite_steps += ~self._found
        else:
            self._keep(step.log, _results(step.reward, step.truncated, step.final_obs) | _named(step.obs))

    def _keep_first(self, log: Tensor, parts: dict[str, Tensor]) -> None:
        table = torch.cat([part.reshape(len(part), -1) for part in (log, *parts.values())], dim=1)
        self._kept.copy_(torch.where(self._found, self._kept, table))
        # Without the log, which has metrics too: a reward term that is not finite makes the reward so.
        self._found |= ~table[:, log.shape[1] :].isfinite().all()
        self._finite_steps += ~self._found

    def find(self) -> str | None:
        """Return a phrase that names the first number that is not finite, or None. This waits for the device."""
        if not self._found:
            return None
        widths = [shape.numel() for shape in self._shapes.values()]
        log, *parts = self._kept.split([self._log.shape[1], *widths], dim=1)
        shaped = [part.reshape(len(part), *shape) for part, shape in zip(parts, self._shapes.values(), strict=True)]
        return _describe(self._env, int(self._finite_steps), dict(zip(self._shapes, shaped, strict=True)), log)


def in_rollout(
    env: VecEnv,
    obs: dict[str, Tensor],
    final_obs: dict[str, Tensor],
    reward: Tensor,
    truncated: Tensor,
    log: Tensor,
) -> str | None:
    """Return a phrase that names the first number of a rollout that is not finite, or None.

    All tensors are [step, env, ...]. Observations start with those before the first step, so they have one step more;
    the last one may be missing.
    """
    for number in range(len(reward) + 1):
        parts, step = _named({group: rows[number] for group, rows in obs.items() if number < len(rows)}), number - 1
        if number:
            final = {group: rows[step] for group, rows in final_obs.items()}
            parts = _results(reward[step], truncated[step], final) | parts
        found = _describe(env, number, parts, log[step])
        if found:
            return found
    return None


def _named(obs: dict[str, Tensor], kind: str = "obs") -> dict[str, Tensor]:
    return {f'{kind}["{group}"]': part for group, part in obs.items()}


def _results(reward: Tensor, truncated: Tensor, final_obs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return reward and last observations; these are zero where no episode was cut, because nobody uses them there."""
    unused = ~truncated
    final_obs = {g: part.masked_fill(unused.view(-1, *[1] * (part.dim() - 1)), 0) for g, part in final_obs.items()}
    return {_REWARD: reward} | _named(final_obs, "final_obs")


def _describe(env: VecEnv, number: int, parts: dict[str, Tensor], log: Tensor) -> str | None:
    """Name the first number that is not finite, in the order of `parts`; step 0 is before the first one."""
    for name, values in parts.items():
        places = values.isfinite().logical_not().nonzero()
        if not len(places):
            continue
        row, *columns = places[0].tolist()
        value = values[(row, *columns)].item()
        if name == _REWARD:
            name, value = _reward_term(env.log_names, log[row].tolist()) or (name, value)
        else:
            name += f"[:, {', '.join(map(str, columns))}]"
        when = f"in step {number}" if number else "before step 1"
        return f"{name} of env {env.first_env + row} became {value} {when} of the rollout"
    return None


def _reward_term(names: tuple[str, ...], sums: list[float]) -> tuple[str, float] | None:
    """Return the first reward term whose sum over the episode is not finite, and that sum."""
    for name, value in zip(names, sums, strict=True):
        if name.startswith(_TERM) and not math.isfinite(value):
            return f"reward term {name.removeprefix(_TERM)!r}", value
    return None
