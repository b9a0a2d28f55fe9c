"""A Gymnasium vector env as a `VecEnv`: numpy on the CPU inside, tensors on the learner's device outside."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.vector import VectorEnv

# Gymnasium is imported inside the functions: it is an extra.

EPISODE_STEPS = 1000
"""The time limit of an env that has none of its own."""
CONTROL_SECONDS = 0.02
"""From one step to the next, where the env does not say."""


class GymnasiumEnv:
    """All autoreset modes look alike from here: the step that ends an episode has its last observation as `final_obs`
    and the next episode's first as `obs`.

    An action of -1 to 1 spans the Box of actions where it has bounds, and is clipped to it; without, it is passed on.
    """

    capturable: bool = False
    log_names: tuple[str, ...] = ("length", "return")

    def __init__(self, envs: "VectorEnv", device: torch.device | str = "cpu", seed: int = 0, first_env: int = 0):
        from gymnasium.spaces import flatdim
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

        self._envs, self._space = envs, envs.single_observation_space
        _check_spaces(envs)
        self.num_envs, self.first_env, self.device = envs.num_envs, first_env, torch.device(device)
        self.num_actions = int(np.prod(envs.single_action_space.shape or (1,)))
        self.max_episode_steps = time_limit(envs.spec) or EPISODE_STEPS
        fps = envs.metadata.get("render_fps")
        self.step_seconds = 1.0 / fps if fps else CONTROL_SECONDS
        bounds = (getattr(envs.single_action_space, name).ravel() for name in ("low", "high"))
        self._low, self._high = (bound.astype(np.float64) for bound in bounds)
        self._bounded = np.isfinite(self._low) & np.isfinite(self._high)
        self._seed, self._steps = seed, 0
        self.observation_spec = {"policy": TensorSpec((flatdim(self._space),))}
        # Of the running episodes, as `log_names`.
        self._sums = np.zeros((self.num_envs, len(self.log_names)))
        # What has no mode resets as Gymnasium's default says.
        mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._same_step = mode == AutoresetMode.SAME_STEP
        known = isinstance(envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        if not (known or self._same_step or self.num_envs == 1):
            self._try_starting_anew()

    def reset(self) -> dict[str, Tensor]:
        obs, _ = self._envs.reset(seed=self._seed_of_worlds())
        self._sums[:] = 0.0
        self._steps += 1
        self._latest = _rows(self._space, obs)
        return self.observe()

    def observe(self) -> dict[str, Tensor]:
        return self._group(self._latest.copy())

    def step(self, actions: Tensor) -> Step:
        obs, reward, terminated, truncated, infos = self._envs.step(self._scaled(actions))
        terminated = np.array(terminated, dtype=bool)
        truncated = np.array(truncated, dtype=bool) & ~terminated
        done, reward = terminated | truncated, np.array(reward, dtype=np.float32)
        obs = final_obs = _rows(self._space, obs)
        if done.any():
            if self._same_step:
                final_obs = self._before_reset(obs, done, infos)
            else:
                obs = self._start_anew(obs, done)
        self._steps += 1
        self._sums += np.stack((np.ones_like(reward), reward), axis=1)
        log = self._tensor(self._sums.astype(np.float32))
        self._sums[done] = 0.0
        flags, self._latest = (self._tensor(terminated), self._tensor(truncated)), obs
        return Step(self.observe(), self._tensor(reward), *flags, self._group(final_obs.copy()), log)

    def prefetch_random(self, steps: int) -> None:
        """Nothing: each world draws its own numbers."""

    def faults(self) -> Tensor:
        """None: whether a world blew up, Gymnasium does not say."""
        return torch.zeros(2, device=self.device)

    def state(self) -> dict[str, Tensor]:
        """No more than counts, because Gymnasium has no way to save a world."""
        return {"steps": torch.tensor(self._steps), "episode_step": torch.from_numpy(self._sums[:, 0].astype(np.int64))}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Start new episodes, with random numbers that no earlier start of the run has used."""
        self._steps = int(state["steps"])
        self.reset()

    def render(self) -> np.ndarray:
        """World 0, if the vector env was made with `render_mode="rgb_array"`: RGB, uint8 [height, width, 3]."""
        pictures = self._envs.render()
        return np.asarray(pictures[0] if isinstance(pictures, (tuple, list)) else pictures)

    def close(self) -> None:
        self._envs.close()

    def _seed_of_worlds(self) -> int:
        """The first world's; the next ones have the next. Small enough for what takes 32 bits."""
        spread = np.random.SeedSequence((self._seed, self._steps)).generate_state(1)[0]
        return int(spread >> 2) + self.first_env

    def _scaled(self, actions: Tensor) -> np.ndarray:
        raw = actions.detach().cpu().numpy().astype(np.float64)
        low, high = np.where(self._bounded, self._low, 0.0), np.where(self._bounded, self._high, 0.0)
        spanned = low + (raw.clip(-1.0, 1.0) + 1.0) / 2.0 * (high - low)
        # Clipped also against rounding, and where there is a bound on one side alone.
        scaled = np.where(self._bounded, spanned, raw).clip(self._low, self._high)
        return scaled.reshape(self._envs.action_space.shape or ()).astype(self._envs.action_space.dtype)

    def _try_starting_anew(self) -> None:
        """Better found out now than by the first episode that ends."""
        self.reset()
        obs = self.step(torch.zeros(self.num_envs, self.num_actions)).obs["policy"]
        self._start_anew(obs.cpu().numpy(), np.arange(self.num_envs) == 0)
        self._steps = 0

    def _start_anew(self, obs: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Reset some worlds now, before their next step would be spent on it: no learner can use a step whose action
        counts for nothing."""
        started, _ = self._envs.reset(options={"reset_mask": done})
        rows = _rows(self._space, started)
        if not np.array_equal(rows[~done], obs[~done], equal_nan=True):
            raise UserError(
                f"{self._envs} cannot reset some of its worlds and leave the others alone (reset_mask), as it must "
                "where the step that ends an episode does not begin the next: use --env.vectorization sync or async"
            )
        return rows

    def _before_reset(self, obs: np.ndarray, done: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
        """The last observation of each world, when `obs` has the next episode's where one ended."""
        from gymnasium.spaces import flatten

        if "final_obs" not in infos:
            raise UserError(f"{self._envs} resets worlds in the step that ends their episode, but gives no final_obs")
        rows, given = obs.copy(), infos["final_obs"]
        if isinstance(given, dict) or given.dtype != object:
            rows[done] = _rows(self._space, given)[done]
        else:
            rows[done] = [flatten(self._space, final) for final in given[done]]
        return rows

    def _group(self, rows: np.ndarray) -> dict[str, Tensor]:
        return {"policy": self._tensor(rows)}

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def time_limit(spec: Any) -> int | None:
    """In steps, of an env's `EnvSpec`; what it was made with counts first."""
    if spec is None:
        return None
    limit = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
    return limit if limit and limit > 0 else None


def _rows(space: "Space", obs: Any) -> np.ndarray:
    """A batch of observations as float32 [world, n], fresh; parts of a Dict in the order that Gymnasium's `flatten`
    has."""
    from gymnasium.spaces import Dict

    if isinstance(space, Dict):
        return np.concatenate([_rows(part, obs[name]) for name, part in space.spaces.items()], axis=1)
    rows = np.array(obs, dtype=np.float32)
    return rows.reshape(len(rows), -1)


def _check_spaces(envs: "VectorEnv") -> None:
    from gymnasium.spaces import Box, Dict

    def flattens(space: "Space") -> bool:
        return isinstance(space, Box) or (isinstance(space, Dict) and all(map(flattens, space.spaces.values())))

    obs, action = envs.single_observation_space, envs.single_action_space
    if not flattens(obs):
        raise UserError(
            f"{envs} has observations of {obs}, not a Box or a Dict of them: register it with the wrapper "
            "gymnasium.wrappers.FlattenObservation under an id of its own"
        )
    if not isinstance(action, Box) or not np.issubdtype(action.dtype, np.floating):
        raise UserError(
            f"{envs} has actions of {action}, but only continuous ones, a Box of floats, can be learnt: choose another "
            "env, or register it with the wrapper gymnasium.wrappers.TransformAction under an id of its own"
        )
