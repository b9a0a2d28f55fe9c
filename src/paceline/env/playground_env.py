"""Envs of MuJoCo Playground as a `VecEnv`: JAX computes the steps, and their results are copied to tensors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError

# MuJoCo Playground and JAX are extras, so they are imported inside the functions.

_GROUPS = {"state": "policy", "privileged_state": "critic"}
"""Observation groups of Playground and of Paceline."""
_TERM, _METRIC = "reward/", "measure/"


class PlaygroundProgram:
    """Reset and step of many envs, which JAX compiles once for each number of envs.

    An env that ends an episode is reset to a new random state. An env whose reward is not finite has failed: its
    episode ends with zero reward.
    """

    def __init__(self, env: Any, max_episode_steps: int):
        import jax

        self.env, self.max_episode_steps = env, max_episode_steps
        one = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
        self._metrics = tuple(sorted(one.metrics))
        names = (name if name.startswith(_TERM) else f"{_METRIC}{name}" for name in self._metrics)
        self.log_names = ("length", "return", *names)
        self.observation_spec = {name: TensorSpec(tuple(obs.shape)) for name, obs in groups_of(one.obs).items()}
        self.reset, self.step = jax.jit(self._reset), jax.jit(self._step)

    def _reset(self, keys: Any, step: Any) -> Any:
        import jax

        return jax.vmap(lambda key: self.env.reset(jax.random.key_data(jax.random.fold_in(key, step))))(keys)

    def _step(self, state: Any, episode_step: Any, sums: Any, keys: Any, step: Any, action: Any) -> Any:
        """Return the new state, episode steps and sums, and the parts of a `Step`."""
        import jax
        import jax.numpy as jnp

        after = jax.vmap(self.env.step)(state, action.clip(-1.0, 1.0))
        failed = ~jnp.isfinite(after.reward)
        terminated = (after.done > 0.5) | failed
        episode_step = episode_step + 1
        truncated = (episode_step >= self.max_episode_steps) & ~terminated
        done = terminated | truncated
        reward = jnp.where(failed, 0.0, after.reward).astype(jnp.float32)
        metrics = [jnp.nan_to_num(after.metrics[name]) for name in self._metrics]
        sums = sums + jnp.stack([jnp.ones_like(reward), reward, *metrics], axis=1)
        is_mean = jnp.array([name.startswith(_METRIC) for name in self.log_names])
        log = jnp.where(is_mean, sums / sums[:, :1], sums)
        final_obs = {name: jnp.nan_to_num(obs) for name, obs in groups_of(after.obs).items()}

        def select(fresh: Any, old: Any) -> Any:
            return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), fresh.astype(old.dtype), old)

        # Resets are computed only in steps that end an episode.
        after = jax.lax.cond(done.any(), lambda: jax.tree.map(select, self._reset(keys, step), after), lambda: after)
        carried = after, jnp.where(done, 0, episode_step), jnp.where(done[:, None], 0.0, sums)
        parts = {"reward": reward, "terminated": terminated, "truncated": truncated, "log": log}
        return carried, parts, final_obs, failed.sum()


class PlaygroundEnv:
    """Envs of a `PlaygroundProgram`. Actions are clipped to -1 to 1."""

    capturable: bool = False

    def __init__(
        self,
        program: PlaygroundProgram,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        first_env: int = 0,
    ):
        import jax
        import jax.numpy as jnp

        self._program, self.num_envs, self.first_env, self.device = program, num_envs, first_env, torch.device(device)
        self.num_actions, self.step_seconds = int(program.env.action_size), float(program.env.dt)
        self.max_episode_steps, self.log_names = program.max_episode_steps, program.log_names
        self.observation_spec = program.observation_spec
        # A key has 64 bits.
        key = jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], dtype=jnp.uint32))
        self._keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(first_env, first_env + num_envs))
        self._steps, self._failures = 0, 0.0
        self._episode_step = jnp.zeros(num_envs, dtype=jnp.int32)
        self._sums = jnp.zeros((num_envs, len(self.log_names)))
        self._state = program.reset(self._keys, 0)

    def reset(self) -> dict[str, Tensor]:
        self._steps += 1
        self._state = self._program.reset(self._keys, self._steps)
        self._episode_step, self._sums = 0 * self._episode_step, 0.0 * self._sums
        return self.observe()

    def observe(self) -> dict[str, Tensor]:
        return self._tensors(groups_of(self._state.obs))

    def step(self, actions: Tensor) -> Step:
        self._steps += 1
        action = np.ascontiguousarray(actions.detach().cpu().numpy(), dtype=np.float32)
        carried, parts, final_obs, failures = self._program.step(
            self._state, self._episode_step, self._sums, self._keys, self._steps, action
        )
        self._state, self._episode_step, self._sums = carried
        self._failures += float(failures)
        return Step(obs=self.observe(), final_obs=self._tensors(final_obs), **self._tensors(parts))

    def prefetch_random(self, steps: int) -> None:
        """Do nothing: JAX samples the numbers in each step."""

    def faults(self) -> Tensor:
        return torch.tensor((self._failures, 0.0), device=self.device)

    def state(self) -> dict[str, Tensor]:
        import jax

        leaves = jax.tree.leaves((self._state, self._sums))
        tensors = {f"leaf/{number}": _to_tensor(leaf) for number, leaf in enumerate(leaves)}
        return tensors | {"steps": torch.tensor(self._steps), "episode_step": _to_tensor(self._episode_step).long()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        import jax
        import jax.numpy as jnp

        leaves, tree = jax.tree.flatten((self._state, self._sums))
        restored = [
            jnp.asarray(state[f"leaf/{number}"].cpu().numpy()).astype(leaf.dtype) for number, leaf in enumerate(leaves)
        ]
        self._state, self._sums = jax.tree.unflatten(tree, restored)
        self._episode_step = jnp.asarray(state["episode_step"].cpu().numpy()).astype(self._episode_step.dtype)
        self._steps = int(state["steps"])

    def _tensors(self, arrays: dict[str, Any]) -> dict[str, Tensor]:
        return {name: _to_tensor(array).to(self.device) for name, array in arrays.items()}


def groups_of(obs: Any) -> dict[str, Any]:
    """Return the observations of Playground by the names of Paceline's groups. Raise UserError if they have images."""
    groups = obs if isinstance(obs, dict) else {"state": obs}
    others = [name for name in groups if name not in _GROUPS]
    if others:
        raise UserError(
            f"the observations {', '.join(others)} of the env are not supported: use --env.options vision=false"
        )
    return {_GROUPS[name]: value for name, value in groups.items()}


def _to_tensor(array: Any) -> Tensor:
    """Return a copy of an array as a tensor. Unsigned integers, which torch hardly supports, become int64."""
    values = np.array(array)
    return torch.from_numpy(values.astype(np.int64) if values.dtype.kind == "u" else values)
