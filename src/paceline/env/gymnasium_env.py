"""A Gymnasium vector env as a `VecEnv`: numpy on the CPU, converted to tensors on the device of the learner."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.env.vec_env import Step, TensorSpec, action_spec
from paceline.errors import UserError

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.vector import VectorEnv

# Gymnasium is an extra, so it is imported inside the functions.

EPISODE_STEPS = 1000
"""Default time limit, in steps."""
CONTROL_SECONDS = 0.02
"""Default simulated time of a step, s."""


class GymnasiumEnv:
    """Adapter for all autoreset modes. The step that ends an episode returns its last observation as `final_obs` and
    the first observation of the next episode as `obs`.

    Continuous actions from -1 to 1 are scaled to the bounds of the action space and clipped. Dimensions without bounds
    are not scaled. Discrete actions are numbers from 0, to which the smallest action of the space is added.
    """

    capturable: bool = False
    log_names: tuple[str, ...] = ("length", "return")

    def __init__(self, envs: "VectorEnv", device: torch.device | str = "cpu", seed: int = 0, first_env: int = 0):
        from gymnasium.spaces import flatdim
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

        _check_spaces(envs)
        self.envs, self._space, actions = envs, envs.single_observation_space, envs.single_action_space
        self.num_envs, self.first_env, self.device = envs.num_envs, first_env, torch.device(device)
        self.num_actions, self.action_choices = int(np.prod(actions.shape or (1,))), _choices(actions)
        self.max_episode_steps = time_limit(envs.spec) or EPISODE_STEPS
        self.step_seconds = _step_seconds(envs)
        if self.action_choices:
            self._start = np.ravel(getattr(actions, "start", 0))
        else:
            self._low, self._high = (getattr(actions, name).ravel().astype(np.float64) for name in ("low", "high"))
        self._seed, self._steps = seed, 0
        self.observation_spec = {"policy": TensorSpec((flatdim(self._space),))}
        # Columns as in `log_names`, for the running episodes.
        self._sums = np.zeros((self.num_envs, len(self.log_names)))
        # Gymnasium's default is the next step.
        mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._same_step = mode == AutoresetMode.SAME_STEP
        known = isinstance(envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        if not (known or self._same_step or self.num_envs == 1):
            # Fail now, not when the first episode ends, if the vector env ignores `reset_mask`.
            self.reset()
            self.step(action_spec(self).zeros(self.num_envs, self.device))
            self._reset_some(self._latest, np.arange(self.num_envs) == 0)
            self._steps = 0

    def reset(self) -> dict[str, Tensor]:
        # Consecutive envs have consecutive seeds. A seed fits into 32 bits.
        spread = np.random.SeedSequence((self._seed, self._steps)).generate_state(1)[0]
        obs, _ = self.envs.reset(seed=int(spread >> 2) + self.first_env)
        self._sums[:] = 0.0
        self._steps += 1
        self._latest = _rows(self._space, obs)
        return self.observe()

    def observe(self) -> dict[str, Tensor]:
        return {"policy": self._tensor(self._latest)}

    def step(self, actions: Tensor) -> Step:
        obs, reward, terminated, truncated, infos = self.envs.step(self.scale_actions(actions))
        terminated = np.array(terminated, dtype=bool)
        truncated = np.array(truncated, dtype=bool) & ~terminated
        done, reward = terminated | truncated, np.array(reward, dtype=np.float32)
        self._latest = final_obs = _rows(self._space, obs)
        if done.any():
            if self._same_step:
                final_obs = self._final_observations(final_obs, done, infos)
            else:
                self._latest = self._reset_some(final_obs, done)
        self._steps += 1
        self._sums += np.stack((np.ones_like(reward), reward), axis=1)
        log = self._sums.astype(np.float32)
        self._sums[done] = 0.0
        reward, terminated, truncated, log = map(self._tensor, (reward, terminated, truncated, log))
        return Step(self.observe(), reward, terminated, truncated, {"policy": self._tensor(final_obs)}, log)

    def prefetch_random(self, steps: int) -> None:
        """Do nothing: each Gymnasium env samples its own numbers."""

    def faults(self) -> Tensor:
        """Return zeros: Gymnasium does not report failures."""
        return torch.zeros(2, device=self.device)

    def state(self) -> dict[str, Tensor]:
        """Return the step counts only, because Gymnasium cannot save the state of an env."""
        return {"steps": torch.tensor(self._steps), "episode_step": torch.from_numpy(self._sums[:, 0].astype(np.int64))}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Start new episodes, with seeds that the run has not used before."""
        self._steps = int(state["steps"])
        self.reset()

    def render(self) -> np.ndarray:
        # The vector env needs `render_mode="rgb_array"`.
        images = self.envs.render()
        return np.asarray(images[0] if isinstance(images, (tuple, list)) else images)

    def close(self) -> None:
        self.envs.close()

    def scale_actions(self, actions: Tensor) -> np.ndarray:
        """Return actions [env, action] in the shape and dtype of the action space; continuous ones are scaled to the
        bounds."""
        if self.action_choices:
            return self._shaped(actions.cpu().numpy() + self._start)
        raw = actions.detach().cpu().numpy().astype(np.float64)
        bounded = np.isfinite(self._low) & np.isfinite(self._high)
        low, high = np.where(bounded, self._low, 0.0), np.where(bounded, self._high, 0.0)
        spanned = low + (raw.clip(-1.0, 1.0) + 1.0) / 2.0 * (high - low)
        # Clipping removes rounding errors and applies one-sided bounds.
        return self._shaped(np.where(bounded, spanned, raw).clip(self._low, self._high))

    def _shaped(self, actions: np.ndarray) -> np.ndarray:
        return actions.reshape(self.envs.action_space.shape or ()).astype(self.envs.action_space.dtype)

    def _reset_some(self, obs: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Reset the envs in `done` and return the observations of all envs, [env, n]. Otherwise Gymnasium would reset
        them in their next step and ignore its action."""
        started, _ = self.envs.reset(options={"reset_mask": done})
        rows = _rows(self._space, started)
        if not np.array_equal(rows[~done], obs[~done], equal_nan=True):
            raise UserError(
                f"{self.envs} cannot reset some of its envs without the others (reset_mask), which the autoreset mode "
                "next_step needs: use --env.vectorization sync or async"
            )
        return rows

    def _final_observations(self, obs: np.ndarray, done: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
        """Return the latest observation of each episode. Where one ended, `obs` has the first of the next one."""
        from gymnasium.spaces import flatten

        if "final_obs" not in infos:
            raise UserError(f"{self.envs} resets envs in the step that ends their episode, but returns no final_obs")
        rows, given = obs.copy(), infos["final_obs"]
        if isinstance(given, dict) or given.dtype != object:
            rows[done] = _rows(self._space, given)[done]
        else:
            rows[done] = [flatten(self._space, final) for final in given[done]]
        return rows

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.tensor(values, device=self.device)


def time_limit(spec: Any) -> int | None:
    """Return the time limit of an `EnvSpec` in steps. An option of `gymnasium.make` takes precedence."""
    if spec is None:
        return None
    limit = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
    return limit if limit and limit > 0 else None


def _step_seconds(envs: "VectorEnv") -> float:
    """Return the simulated time of a step, s: `dt` of the env, which envs of MuJoCo compute from the time step of their
    model, else that of the frame rate of its videos, which may be rounded."""
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    inner: Any = envs.unwrapped
    seconds = getattr(inner, "dt", None)
    if isinstance(inner, (SyncVectorEnv, AsyncVectorEnv)) and inner.call("has_wrapper_attr", "dt")[0]:
        seconds = inner.call("dt")[0]
    if isinstance(seconds, (float, np.floating)) and 0.0 < seconds < np.inf:
        return float(seconds)
    fps = envs.metadata.get("render_fps")
    return 1.0 / fps if fps else CONTROL_SECONDS


def _choices(actions: "Space") -> tuple[int, ...]:
    """Return the number of choices of each column of discrete actions; empty for other actions."""
    from gymnasium.spaces import Discrete, MultiDiscrete

    if isinstance(actions, Discrete):
        return (int(actions.n),)
    return tuple(actions.nvec.ravel().tolist()) if isinstance(actions, MultiDiscrete) else ()


def _rows(space: "Space", obs: Any) -> np.ndarray:
    """Return a copy of a batch of observations as float32 [env, n], in the order of Gymnasium's `flatten`."""
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
            "gymnasium.wrappers.FlattenObservation under another id"
        )
    if not _choices(action) and not (isinstance(action, Box) and np.issubdtype(action.dtype, np.floating)):
        raise UserError(
            f"{envs} has actions of {action}, but learners need a Box of floats, Discrete or MultiDiscrete: choose "
            "another env, or register it with the wrapper gymnasium.wrappers.TransformAction under another id"
        )
