"""Find the first number from the envs of a rollout that is not finite."""

import math

from torch import Tensor

from paceline.env.vec_env import Step, VecEnv

_REWARD = "the reward"
_TERM = "reward/"


def first_non_finite(env: VecEnv, first_obs: dict[str, Tensor], steps: list[Step]) -> str | None:
    """Return a phrase that names the first number of a rollout that is not finite, or None. `first_obs` are the
    observations before the first step."""
    found = _describe(env, 0, _named("obs", first_obs), None)
    for number, step in enumerate(steps, start=1):
        # Final observations are only used where the time limit ended an episode.
        used = {
            group: part.masked_fill(~step.truncated.view(-1, *[1] * (part.dim() - 1)), 0)
            for group, part in step.final_obs.items()
        }
        parts = {_REWARD: step.reward, **_named("final_obs", used), **_named("obs", step.obs)}
        found = found or _describe(env, number, parts, step.log)
    return found


def _named(kind: str, obs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f'{kind}["{group}"]': part for group, part in obs.items()}


def _describe(env: VecEnv, number: int, parts: dict[str, Tensor], log: Tensor | None) -> str | None:
    """Name the first number that is not finite, in the order of `parts`. Step 0 is before the first one."""
    for name, values in parts.items():
        places = values.isfinite().logical_not().nonzero()
        if not len(places):
            continue
        row, *columns = places[0].tolist()
        value = values[(row, *columns)].item()
        if name == _REWARD and log is not None:
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
