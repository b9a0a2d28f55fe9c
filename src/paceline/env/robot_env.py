"""A task in many worlds: decimation, resets, time limits and episode statistics, all in tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.checks import above_zero, at_least_one
from paceline.env import draw
from paceline.env.graph import fuse
from paceline.env.task import Task, Worlds
from paceline.env.vec_env import Step
from paceline.sim.model import sensor_columns
from paceline.sim.simulation import Sim, make_sim


class _Outcome(NamedTuple):
    """What a step came to, and where the worlds that ended start anew."""

    final_obs: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    done: Tensor
    log: Tensor
    start: tuple[Tensor, Tensor]


class RobotEnv:
    """A `VecEnv` of one task on one engine. Nothing in `step` waits for the host or has a data-dependent shape."""

    def __init__(
        self,
        task: Task,
        num_envs: int,
        engine: str = "auto",
        device: torch.device | str = "cpu",
        seed: int = 0,
        first_world: int = 0,
        threads: int | None = None,
    ):
        self.task, self.num_envs, self.actions, self.seed = task, num_envs, task.actions, seed
        self.device, self.first_world = torch.device(device), first_world
        self.capturable = self.device.type == "cuda"
        at_least_one("--env.decimation", task.decimation)
        above_zero("--env.episode-seconds", task.episode_seconds)
        self.sim: Sim = make_sim(task.model(), num_envs, engine, self.device, threads=threads)
        self.control_seconds = task.decimation * self.sim.model.opt.timestep
        self.episode_steps = max(1, round(task.episode_seconds / self.control_seconds))

        self._world = torch.arange(first_world, first_world + num_envs, device=self.device)
        self._steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._episode_step = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._actions = torch.zeros(2, num_envs, self.actions, device=self.device)
        self._action, self._last_action = self._actions
        self._numbers: list[Tensor] = []
        self._worlds = Worlds(
            self.sim, sensor_columns(self.sim.model), self._action, self._last_action, self._episode_step
        )
        self._apply = fuse(self._apply_actions, self.device)
        self._judge = fuse(self._judge_step, self.device)
        self._observe = fuse(self._fresh_observations, self.device)

        everyone = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        self._start(everyone, *task.reset(self._next_numbers()))
        terms = tuple(f"reward/{name}" for name in task.reward(self._worlds, ~everyone))
        self.log_names = ("length", "return", *terms)
        self._one = torch.ones(num_envs, 1, device=self.device)
        self._episode = torch.zeros(num_envs, len(self.log_names), device=self.device)

    def reset(self) -> dict[str, Tensor]:
        self._start(torch.ones_like(self.sim.failed), *self.task.reset(self._next_numbers()))
        for tensor in (self._episode, self._episode_step, self._actions):
            tensor.zero_()
        self._steps += 1
        return self._observe()

    def step(self, actions: Tensor) -> Step:
        self._apply(actions.detach())
        self.sim.step(self.task.decimation)
        outcome = self._judge(self._next_numbers())
        self._start(outcome.done, *outcome.start)
        return Step(
            self._observe(), outcome.reward, outcome.terminated, outcome.truncated, outcome.final_obs, outcome.log
        )

    def faults(self) -> Tensor:
        return torch.stack((self.sim.failures.sum(), self.sim.overflows.sum())).float()

    def prefetch(self, steps: int) -> None:
        step = self._steps + torch.arange(steps, device=self.device)[:, None]
        numbers = draw.uniform(self.seed, self._world, step, draw.Stream.RESET, self.task.reset_numbers)
        self._numbers = list(reversed(numbers.unbind(0)))

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._own_state().items()} | {
            f"sim/{name}": tensor for name, tensor in self.sim.state().items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self._own_state().items():
            tensor.copy_(state[name])
        self.sim.load_state({name.removeprefix("sim/"): t for name, t in state.items() if name.startswith("sim/")})
        self._numbers.clear()

    def _own_state(self) -> dict[str, Tensor]:
        return {
            "steps": self._steps,
            "episode_step": self._episode_step,
            "action": self._action,
            "last_action": self._last_action,
            "episode": self._episode,
        }

    def _next_numbers(self) -> Tensor:
        if not self._numbers:
            self.prefetch(1)
        return self._numbers.pop()

    def _start(self, worlds: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        self.sim.reset(worlds, qpos, qvel)
        self.sim.sense()

    # The stretches that are tensors alone; on a GPU each is compiled into a few kernels.

    def _apply_actions(self, actions: Tensor) -> None:
        self._last_action.copy_(self._action)
        self._action.copy_(actions)
        self.sim.ctrl.copy_(self.task.control(self._worlds))
        self._episode_step += 1

    def _judge_step(self, numbers: Tensor) -> _Outcome:
        worlds, failed = self._worlds, None if self.sim.all_well else self.sim.failed
        final_obs, terminated = self._fresh_observations(), self.task.terminated(worlds)
        if failed is not None:
            terminated = terminated | failed
        truncated = (self._episode_step >= self.episode_steps) & ~terminated
        done = terminated | truncated
        terms = torch.stack(tuple(self.task.reward(worlds, terminated).values()), dim=1)
        if failed is not None:
            # A world that blew up ends here: its last observation and reward are not to be trusted, so become zero.
            final_obs = {name: _zero_where(failed, obs) for name, obs in final_obs.items()}
            terms = _zero_where(failed, terms)
        reward = terms.sum(1)

        log = self._episode + torch.cat((self._one, reward[:, None], terms), dim=1)
        # Chosen, not multiplied: zero times a reward that is not a number would stay so for ever.
        self._episode.copy_(_zero_where(done, log))
        self._episode_step.masked_fill_(done, 0)
        self._actions.masked_fill_(done.unsqueeze(1), 0.0)
        self._steps += 1
        return _Outcome(final_obs, reward, terminated, truncated, done, log, self.task.reset(numbers))

    def _fresh_observations(self) -> dict[str, Tensor]:
        """Fresh also where the task hands out the simulation's own tensors."""
        return {name: obs.clone() for name, obs in self.task.observe(self._worlds).items()}


def _zero_where(mask: Tensor, values: Tensor) -> Tensor:
    """`values` [world, ...] with the rows of `mask` replaced, so that a NaN cannot spread."""
    return values.masked_fill(mask.view(-1, *[1] * (values.dim() - 1)), 0)
