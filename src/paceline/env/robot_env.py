"""A task in many envs: decimation, resets, time limits and episode statistics, all in tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.env.check_task import check_constants, check_members, check_model, check_results
from paceline.env.observations import ObservationHistory
from paceline.env.randomization import Randomizer, per_env_fields
from paceline.env.task import EnvState, Task, overrides
from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError
from paceline.sim.simulation import Sim, make_sim, sensor_columns
from paceline.tensors import random
from paceline.tensors.graph import fuse
from paceline.validation import LARGEST_COUNT, above_zero, at_least_one

MAX_DECIMATION = 10_000


class _Outcome(NamedTuple):
    """Result of a step, and the initial state of the envs whose episode ended."""

    final_obs: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    done: Tensor
    log: Tensor
    qpos: Tensor
    qvel: Tensor


class _Samples(NamedTuple):
    """Uniform samples of one step, in [0, 1)."""

    reset: Tensor
    """[env, num_reset_samples]."""
    step: Tensor
    """[env, num_step_samples]."""
    delay: Tensor
    """[env, 1]; used only where delays are sampled."""
    fields: tuple[Tensor, ...]
    """[env, n] for each field of the model that is sampled again."""


class RobotEnv:
    """A `VecEnv` of one task on one engine. No operation of `step` waits for the host or has a data-dependent shape."""

    def __init__(
        self,
        task: Task,
        num_envs: int,
        engine: str = "auto",
        device: torch.device | str = "cpu",
        seed: int = 0,
        first_env: int = 0,
        threads: int | None = None,
    ):
        check_members(task)
        self.task, self.num_envs, self.num_actions, self.seed = task, num_envs, task.num_actions, seed
        self.device, self.first_env = torch.device(device), first_env
        self.capturable = self.device.type == "cuda"
        check_timing(task)
        self._updates_state, self._resamples = overrides(task, "update_state"), overrides(task, "resample")
        model, randomized = task.model(), task.randomized_fields()
        check_model(task, model)
        self.sim: Sim = make_sim(
            model, num_envs, engine, self.device, per_env_fields(randomized, model), threads=threads
        )
        self.step_seconds = task.decimation * self.sim.model.opt.timestep
        self.max_episode_steps = _episode_steps(task.episode_seconds, self.step_seconds)

        self._env_index = torch.arange(first_env, first_env + num_envs, device=self.device)
        self._steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._episode_step = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._actions = torch.zeros(2, num_envs, self.num_actions, device=self.device)
        self._action, self._last_action = self._actions
        self._prefetched: list[_Samples] = []
        spec = task.state_spec()
        self._task_state = {name: torch.zeros(num_envs, spec[name], device=self.device) for name in spec}
        self.env_state = EnvState(
            self.sim,
            sensor_columns(self.sim.model),
            self._action,
            self._last_action,
            self._episode_step,
            self._task_state,
            self._constants(),
        )
        names = check_results(task, self.env_state)
        self._randomizer = None
        if randomized:
            self._randomizer = Randomizer(randomized, self.sim, seed, self._env_index, self.step_seconds)
            self._randomizer.randomize_all(self._steps)
        self._history = None
        history, delay = task.observation_history, task.observation_delay
        if history > 1 or delay[1] > 0:
            self._history = ObservationHistory(history, delay, task.observe(self.env_state)["policy"])
        self._apply = fuse(self._apply_actions, self.device)
        self._judge = fuse(self._judge_step, self.device)
        self._observe = fuse(self._observe_and_store, self.device)
        self._push = None
        if overrides(task, "push_velocity"):
            self._push = fuse(lambda: task.push_velocity(self.env_state), self.device)

        self._reset_all()
        if self._history:
            self._observe_and_store()
        terms, metrics = (f"reward/{n}" for n in names.terms), (f"measure/{n}" for n in names.metrics)
        self.log_names = ("length", "return", *terms, *metrics)
        self._num_metrics = len(names.metrics)
        self._one = torch.ones(num_envs, 1, device=self.device)
        self._episode = torch.zeros(num_envs, len(self.log_names), device=self.device)
        self.observation_spec = {n: TensorSpec(tuple(o.shape[1:]), o.dtype) for n, o in self.observe().items()}

    def reset(self) -> dict[str, Tensor]:
        self._reset_all()
        for tensor in (self._episode, self._episode_step, self._actions):
            tensor.zero_()
        self._steps += 1
        return self._observe()

    def step(self, actions: Tensor) -> Step:
        self._apply(actions.detach())
        self.sim.step(self.task.decimation)
        samples = self._next_samples()
        outcome = self._judge(samples)
        self._reset_done(outcome, samples.fields)
        return Step(
            self._observe(), outcome.reward, outcome.terminated, outcome.truncated, outcome.final_obs, outcome.log
        )

    def observe(self) -> dict[str, Tensor]:
        obs = self._current_observations()
        if self._history:
            obs["policy"] = self._history.stacked()
        return obs

    def faults(self) -> Tensor:
        return torch.stack((self.sim.failures.sum(), self.sim.overflows.sum())).float()

    def prefetch_random(self, steps: int) -> None:
        step = self._steps + torch.arange(steps, device=self.device)[:, None]
        reset = self._uniform(step, random.Stream.RESET, self.task.num_reset_samples)
        per_step, delay = reset[..., :0], reset
        if self.task.num_step_samples:
            per_step = self._uniform(step, random.Stream.STEP, self.task.num_step_samples)
        if self._history and self._history.samples_delay:
            delay = self._uniform(step, random.Stream.DELAY, 1)
        # Step 0 is that of `randomize_all`.
        fields = self._randomizer.samples(step + 1) if self._randomizer else []
        per_field = zip(*fields, strict=True) if fields else [()] * steps
        rows = zip(reset.unbind(0), per_step.unbind(0), delay.unbind(0), per_field, strict=True)
        self._prefetched = [_Samples(*row) for row in rows][::-1]

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._own_state().items()} | {
            f"sim/{name}": tensor for name, tensor in self.sim.state().items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        if self._history:
            self._history.check(state)
        for name, tensor in self._own_state().items():
            tensor.copy_(state[name])
        self.sim.load_state({name.removeprefix("sim/"): t for name, t in state.items() if name.startswith("sim/")})
        self._prefetched.clear()

    def _own_state(self) -> dict[str, Tensor]:
        return {
            "steps": self._steps,
            "episode_step": self._episode_step,
            "action": self._action,
            "last_action": self._last_action,
            "episode": self._episode,
            **{f"task_state/{name}": values for name, values in self._task_state.items()},
            **(self._history.state() if self._history else {}),
        }

    def _constants(self) -> dict[str, Tensor]:
        rows = self.task.constants()
        check_constants(self.task, rows)
        return {name: torch.tensor([row], dtype=torch.float32, device=self.device) for name, row in rows.items()}

    def _uniform(self, step: Tensor, stream: random.Stream, count: int) -> Tensor:
        return random.uniform(self.seed, self._env_index, step, stream, count)

    def _next_samples(self) -> _Samples:
        if not self._prefetched:
            self.prefetch_random(1)
        return self._prefetched.pop()

    def _reset_all(self) -> None:
        everywhere, samples = torch.ones_like(self.sim.failed), self._next_samples()
        reset = self.task.reset(self.env_state, samples.reset)
        self._set_task_state(reset.task_state, everywhere)
        if self._history:
            self._history.reset(everywhere, samples.delay)
        self.sim.reset(everywhere, reset.qpos, reset.qvel)
        self.sim.sense()

    def _reset_done(self, outcome: _Outcome, fields: tuple[Tensor, ...]) -> None:
        if self._randomizer:
            self._randomizer.randomize(outcome.done, self._episode_step, fields)
        self.sim.reset(outcome.done, outcome.qpos, outcome.qvel)
        if self._push:
            self.sim.push(self._push())
        self.sim.sense()

    def _set_task_state(self, values: dict[str, Tensor], mask: Tensor) -> None:
        for name, value in values.items():
            self._task_state[name].copy_(torch.where(mask.unsqueeze(1), value, self._task_state[name]))

    def _zero_non_finite_task_state(self, failed: Tensor) -> None:
        """Set non-finite values of the task state of failed envs to zero: `reset` may depend on them or keep them.
        Finite values, such as the level of a curriculum, are kept."""
        for values in self._task_state.values():
            values.masked_fill_(failed.unsqueeze(1) & ~values.isfinite(), 0.0)

    # Only tensor operations from here on; on a GPU each function is compiled into a few kernels.

    def _apply_actions(self, actions: Tensor) -> None:
        self._last_action.copy_(self._action)
        self._action.copy_(actions)
        self.sim.ctrl.copy_(self.task.control(self.env_state))
        self._episode_step += 1

    def _judge_step(self, samples: _Samples) -> _Outcome:
        state, failed = self.env_state, None if self.sim.fault_free else self.sim.failed
        if self._updates_state:
            for name, values in self.task.update_state(state, samples.step).items():
                self._task_state[name].copy_(values)
        final_obs, terminated = self._current_observations(), self.task.terminated(state)
        if self._history:
            final_obs["policy"] = self._history.stacked(self._history.with_newest(final_obs["policy"]))
        if failed is not None:
            terminated = terminated | failed
        truncated = (self._episode_step >= self.max_episode_steps) & ~terminated
        done = terminated | truncated
        terms = torch.stack(tuple(self.task.reward(state, terminated).values()), dim=1)
        logged = terms
        if self._num_metrics:
            logged = torch.cat((terms, torch.stack(tuple(self.task.metrics(state).values()), dim=1)), dim=1)
        if failed is not None:
            # The last observation and reward of a failed env are meaningless.
            final_obs = {name: _zero_where(failed, obs) for name, obs in final_obs.items()}
            logged = _zero_where(failed, logged)
        reward = logged[:, : terms.shape[1]].sum(1)

        log = self._episode + torch.cat((self._one, reward[:, None], logged), dim=1)
        # A product with zero would keep a NaN.
        self._episode.copy_(_zero_where(done, log))
        if self._num_metrics:
            log = torch.cat((log[:, : -self._num_metrics], log[:, -self._num_metrics :] / log[:, :1]), dim=1)
        if failed is not None:
            self._zero_non_finite_task_state(failed)
        resampled = self.task.resample(state, samples.step) if self._resamples else {}
        reset = self.task.reset(state, samples.reset)
        self._set_task_state(resampled, ~done)
        self._set_task_state(reset.task_state, done)
        if self._history:
            self._history.reset(done, samples.delay)
        self._episode_step.masked_fill_(done, 0)
        self._actions.masked_fill_(done.unsqueeze(1), 0.0)
        self._steps += 1
        return _Outcome(final_obs, reward, terminated, truncated, done, log, reset.qpos, reset.qvel)

    def _current_observations(self) -> dict[str, Tensor]:
        """Return the observations as copies, because a task may return tensors of the simulation itself."""
        return {name: obs.clone() for name, obs in self.task.observe(self.env_state).items()}

    def _observe_and_store(self) -> dict[str, Tensor]:
        obs = self._current_observations()
        if self._history:
            obs["policy"] = self._history.append(obs["policy"], self._episode_step == 0)
        return obs


def check_timing(task: Task) -> None:
    """Raise UserError if the decimation or the time limit is out of range."""
    at_least_one("--env.decimation", task.decimation, MAX_DECIMATION)
    above_zero("--env.episode-seconds", task.episode_seconds)


def _episode_steps(episode_seconds: float, step_seconds: float) -> int:
    steps = episode_seconds / step_seconds
    if steps > LARGEST_COUNT:
        raise UserError(
            f"--env.episode-seconds {episode_seconds:g} is {steps:g} control steps of {step_seconds:g} s: "
            f"an episode has at most {LARGEST_COUNT}"
        )
    return max(1, round(steps))


def _zero_where(mask: Tensor, values: Tensor) -> Tensor:
    """Return `values` [env, ...] with the rows of `mask` set to zero, so that a NaN does not spread."""
    return values.masked_fill(mask.view(-1, *[1] * (values.dim() - 1)), 0)
