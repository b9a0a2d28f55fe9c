"""A task in many envs: decimation, resets, time limits and episode statistics, all in tensors."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.cameras.camera import Camera, group_name
from paceline.cameras.tiled_camera import TiledCamera, prepare_model
from paceline.env.check_task import check_members, check_model, check_results
from paceline.env.observations import ObservationHistory
from paceline.env.randomization import Randomizer, per_env_fields
from paceline.env.step_timer import StepTimer
from paceline.env.task import EnvState, Task, overrides
from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError
from paceline.sim.simulation import make_sim, sensor_columns
from paceline.tensors import graph, random
from paceline.validation import LARGEST_COUNT


class _Samples(NamedTuple):
    """Uniform samples of one step in [0, 1), each [env, n]."""

    reset: Tensor
    step: Tensor
    delay: Tensor
    """Used only where delays are sampled."""
    fields: tuple[Tensor, ...]
    """Samples of `Randomizer`."""


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
        randomize: bool = True,
    ):
        check_members(task)
        self.task, self.num_envs, self.num_actions, self.seed = task, num_envs, task.num_actions, seed
        self.device, self.first_env, self.action_choices = torch.device(device), first_env, task.action_choices
        self.capturable = self.device.type == "cuda"
        self._timer = StepTimer(enabled=not self.capturable)
        self._updates_state, self._resamples = overrides(task, "update_state"), overrides(task, "resample")
        model, cameras = task.model(), task.cameras()
        randomized = task.randomized_fields() if randomize else ()
        check_model(task, model)
        prepare_model(model, cameras)
        self.sim = make_sim(model, num_envs, engine, self.device, per_env_fields(randomized, model), threads)
        self.step_seconds = task.decimation * self.sim.model.opt.timestep
        self.max_episode_steps = max(1, round(task.episode_seconds / self.step_seconds))
        if self.max_episode_steps > LARGEST_COUNT:
            steps = f"{self.max_episode_steps:g} control steps of {self.step_seconds:g} s"
            limit = f"an episode has at most {LARGEST_COUNT}"
            raise UserError(f"--env.episode-seconds {task.episode_seconds:g} is {steps}: {limit}")

        self._env_index = torch.arange(first_env, first_env + num_envs, device=self.device)
        self._steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._episode_step = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._actions = torch.zeros(2, num_envs, self.num_actions, device=self.device)
        self._prefetched: list[_Samples] = []
        self._task_state = {n: torch.zeros(num_envs, w, device=self.device) for n, w in task.state_spec().items()}
        constants = {n: torch.tensor([r], dtype=torch.float32, device=self.device) for n, r in task.constants().items()}
        columns, (action, last_action) = sensor_columns(self.sim.model), self._actions
        self.env_state = state = EnvState(
            self.sim, columns, action, last_action, self._episode_step, self._task_state, constants
        )
        terms, metrics = check_results(task, state)
        self._randomizer = Randomizer(randomized, self.sim, seed, self._env_index, self.step_seconds)
        self._tiled_camera = TiledCamera(
            cameras, task.geom_classes(), self.sim, seed, self._env_index, self.step_seconds
        )
        self._histories = self._make_histories(cameras)
        self._apply = graph.fuse(self._apply_actions, self.device)
        self._evaluate = graph.fuse(self._evaluate_step, self.device)
        self._observe = graph.fuse(self._observe_and_store, self.device)
        self._stack = graph.fuse(self._stack_frames, self.device)
        pushes = overrides(task, "push_velocity")
        self._push = graph.fuse(lambda: task.push_velocity(state), self.device) if pushes else None
        moves_mocap = overrides(task, "mocap_pos")
        self._move_mocap = graph.fuse(self._set_mocap_pos, self.device) if moves_mocap else None

        self.log_names = ("length", "return", *(f"reward/{n}" for n in terms), *(f"measure/{n}" for n in metrics))
        self._num_metrics = len(metrics)
        self._one = torch.ones(num_envs, 1, device=self.device)
        self._episode = torch.zeros(num_envs, len(self.log_names), device=self.device)
        self._reset_all()
        groups = self._observe_and_store() | self._render()
        formats = self._tiled_camera.formats
        self.observation_spec = {
            name: TensorSpec(tuple(obs.shape[1:]), obs.dtype, **formats[name]._asdict() if name in formats else {})
            for name, obs in groups.items()
        }

    @property
    def camera_messages(self) -> list[str]:
        """Statements about the renderers of the cameras, for the header of a run."""
        return self._tiled_camera.messages

    def _make_histories(self, cameras: dict[str, Camera]) -> dict[str, ObservationHistory]:
        """Return the history of each observation group that has one: "policy", and the streams of the cameras."""
        histories, columns = {}, 0
        if "policy" in (vectors := self.task.observe(self.env_state)):
            delay, columns = self.task.observation_delay, 1
            histories["policy"] = ObservationHistory(self.task.observation_history, delay, vectors["policy"], 0)
        for number, (name, camera) in enumerate(cameras.items()):
            for group in (group_name(name, stream) for stream in camera.streams):
                image, column = self._tiled_camera.images[group], columns + number
                histories[group] = ObservationHistory(camera.frames, camera.effects.latency, image, column, group)
        return histories

    def reset(self) -> dict[str, Tensor]:
        self._reset_all()
        for tensor in (self._episode, self._episode_step, self._actions):
            tensor.zero_()
        self._steps += 1
        return self._observe() | self._render()

    def step(self, actions: Tensor) -> Step:
        self._apply(actions.detach())
        with self._timer.measure("physics"):
            self.sim.step(self.task.decimation)
        samples = self._next_samples()
        outcome, done, qpos, qvel = self._evaluate(samples)
        self._randomizer.randomize(done, self._episode_step, samples.fields)
        self.sim.reset(done, qpos, qvel)
        if self._push:
            self.sim.push(self._push())
        if self._move_mocap:
            self._move_mocap()
        with self._timer.measure("physics"):
            self.sim.sense()
        return Step(self._observe() | self._render(), *outcome)

    def observe(self) -> dict[str, Tensor]:
        obs = self._current_observations() | self._tiled_camera.images
        return obs | {name: history.latest(obs[name]) for name, history in self._histories.items()}

    def take_part_seconds(self) -> dict[str, float]:
        """Return the seconds that steps have spent in "physics", and in "rendering" if the task has cameras, since the
        last call; empty on a GPU."""
        return self._timer.take()

    def faults(self) -> Tensor:
        return torch.stack((self.sim.failures.sum(), self.sim.overflows.sum())).float()

    def prefetch_random(self, steps: int) -> None:
        step = self._steps + torch.arange(steps, device=self.device)[:, None]
        reset = self._uniform(step, random.Stream.RESET, self.task.num_reset_samples)
        per_step, delay = reset[..., :0], reset
        if self.task.num_step_samples:
            per_step = self._uniform(step, random.Stream.STEP, self.task.num_step_samples)
        if any(history.samples_delay for history in self._histories.values()):
            columns = 1 + max(history.column for history in self._histories.values())
            delay = self._uniform(step, random.Stream.DELAY, columns)
        rows = zip(reset, per_step, delay, self._randomizer.samples(step), strict=True)
        self._prefetched = [_Samples(*row) for row in rows][::-1]

    def state(self) -> dict[str, Tensor]:
        own = {name: tensor.clone() for name, tensor in self._own_state().items()}
        return own | {f"sim/{name}": tensor for name, tensor in self.sim.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for history in self._histories.values():
            history.check(state)
        for name, tensor in self._own_state().items():
            tensor.copy_(state[name])
        self.sim.load_state({name.removeprefix("sim/"): t for name, t in state.items() if name.startswith("sim/")})
        self._tiled_camera.render(self._episode_step, self._steps)
        self._prefetched.clear()

    def _own_state(self) -> dict[str, Tensor]:
        return {
            "steps": self._steps,
            "episode_step": self._episode_step,
            "action": self.env_state.action,
            "last_action": self.env_state.last_action,
            "episode": self._episode,
            **{f"task_state/{name}": values for name, values in self._task_state.items()},
            **{name: tensor for history in self._histories.values() for name, tensor in history.state().items()},
            **self._tiled_camera.state(),
        }

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
        for history in self._histories.values():
            history.reset(everywhere, samples.delay)
        self.sim.reset(everywhere, reset.qpos, reset.qvel)
        if self._move_mocap:
            self._move_mocap()
        self.sim.sense()

    def _render(self) -> dict[str, Tensor]:
        """Render the cameras that are due and return the images of all cameras. The next step overwrites them."""
        if self._tiled_camera.images:
            with self._timer.measure("rendering"):
                self._tiled_camera.render(self._episode_step, self._steps)
        return self._stack()

    def _set_task_state(self, values: dict[str, Tensor], mask: Tensor) -> None:
        for name, value in values.items():
            self._task_state[name].copy_(torch.where(mask.unsqueeze(1), value, self._task_state[name]))

    # Only tensor operations from here on; on a GPU each function is compiled into a few kernels.

    def _apply_actions(self, actions: Tensor) -> None:
        self.env_state.last_action.copy_(self.env_state.action)
        self.env_state.action.copy_(actions)
        self.sim.ctrl.copy_(self.task.control(self.env_state))
        self._episode_step += 1

    def _set_mocap_pos(self) -> None:
        self.sim.mocap_pos.copy_(self.task.mocap_pos(self.env_state))

    def _evaluate_step(self, samples: _Samples) -> tuple[tuple[Any, ...], Tensor, Tensor, Tensor]:
        """Return the fields of `Step` except `obs`, the envs whose episode ended, and their initial qpos and qvel."""
        state, failed = self.env_state, None if self.sim.fault_free else self.sim.failed
        if self._updates_state:
            for name, values in self.task.update_state(state, samples.step).items():
                self._task_state[name].copy_(values)
        final_obs, terminated = self._current_observations(), self.task.terminated(state)
        if "policy" in final_obs:
            final_obs["policy"] = self._histories["policy"].preview(final_obs["policy"])
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
            # `reset` may depend on the task state or keep it. Finite values, such as a curriculum level, are kept.
            for values in self._task_state.values():
                values.masked_fill_(failed.unsqueeze(1) & ~values.isfinite(), 0.0)
        resampled = self.task.resample(state, samples.step) if self._resamples else {}
        reset = self.task.reset(state, samples.reset)
        self._set_task_state(resampled, ~done)
        self._set_task_state(reset.task_state, done)
        for history in self._histories.values():
            history.reset(done, samples.delay)
        self._episode_step.masked_fill_(done, 0)
        self._actions.masked_fill_(done.unsqueeze(1), 0.0)
        self._steps += 1
        return (reward, terminated, truncated, final_obs, log), done, reset.qpos, reset.qvel

    def _current_observations(self) -> dict[str, Tensor]:
        """Return the observations as copies, because a task may return tensors of the simulation itself."""
        return {name: obs.clone() for name, obs in self.task.observe(self.env_state).items()}

    def _stack_frames(self) -> dict[str, Tensor]:
        images = self._tiled_camera.images
        return {name: self._histories[name].append(image, self._episode_step) for name, image in images.items()}

    def _observe_and_store(self) -> dict[str, Tensor]:
        obs = self._current_observations()
        if "policy" in obs:
            obs["policy"] = self._histories["policy"].append(obs["policy"], self._episode_step)
        return obs


def _zero_where(mask: Tensor, values: Tensor) -> Tensor:
    """Return `values` [env, ...] with the rows of `mask` set to zero, so that a NaN does not spread."""
    return values.masked_fill(mask.view(-1, *[1] * (values.dim() - 1)), 0)
