"""A task in many worlds: decimation, resets, time limits and episode statistics, all in tensors."""

import torch
from torch import Tensor

from paceline.env import draw
from paceline.env.task import Task, Worlds
from paceline.env.vec_env import Step
from paceline.sim.simulation import Sim, make_sim


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
    ):
        self.task, self.num_envs, self.actions, self.seed = task, num_envs, task.actions, seed
        self.device, self.first_world = torch.device(device), first_world
        self.sim: Sim = make_sim(task.model(), num_envs, engine, self.device)
        self.control_seconds = task.decimation * self.sim.model.opt.timestep
        self.episode_steps = round(task.episode_seconds / self.control_seconds)

        self._world = torch.arange(first_world, first_world + num_envs, device=self.device)
        self._steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._episode_step = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._action = torch.zeros(num_envs, self.actions, device=self.device)
        self._last_action = torch.zeros_like(self._action)
        self._numbers, self._taken = torch.empty(0, num_envs, task.reset_numbers, device=self.device), 0

        everyone = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        self._reset_worlds(everyone)
        terms = tuple(f"reward/{name}" for name in task.reward(self._worlds(), ~everyone))
        self._episode_names = ("episodes", "return", "length", *terms)
        self.log_names = (*self._episode_names, "failures", "overflows")
        self._episode = torch.zeros(num_envs, len(self._episode_names), device=self.device)

    def reset(self) -> dict[str, Tensor]:
        self._reset_worlds(torch.ones_like(self.sim.failed))
        self._episode.zero_()
        self._steps += 1
        return self._observe()

    def step(self, actions: Tensor) -> Step:
        self._last_action.copy_(self._action)
        self._action.copy_(actions.detach())
        self.sim.ctrl.copy_(self.task.control(self._worlds()))
        self.sim.step(self.task.decimation)
        self._episode_step += 1

        worlds, failed = self._worlds(), self.sim.failed
        # A world that blew up ends here: its last observation and reward are not to be trusted, so they become zero.
        final_obs = {k: _zero_where(failed, obs) for k, obs in self.task.observe(worlds).items()}
        terminated = self.task.terminated(worlds) | failed
        truncated = (self._episode_step >= self.episode_steps) & ~terminated
        terms = torch.stack(tuple(self.task.reward(worlds, terminated).values()), dim=1)
        terms = _zero_where(failed, terms)
        reward = terms.sum(1)
        done = terminated | truncated
        log = self._log(reward, terms, done)

        self._reset_worlds(done)
        self._steps += 1
        return Step(self._observe(), reward, terminated, truncated, final_obs, log)

    def prefetch(self, steps: int) -> None:
        step = self._steps + torch.arange(steps, device=self.device)[:, None]
        self._numbers = draw.uniform(self.seed, self._world, step, draw.Stream.RESET, self.task.reset_numbers)
        self._taken = 0

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._own_state().items()} | {
            f"sim/{name}": tensor for name, tensor in self.sim.state().items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self._own_state().items():
            tensor.copy_(state[name])
        self.sim.load_state({name.removeprefix("sim/"): t for name, t in state.items() if name.startswith("sim/")})
        self._numbers, self._taken = self._numbers[:0], 0

    def _own_state(self) -> dict[str, Tensor]:
        return {
            "steps": self._steps,
            "episode_step": self._episode_step,
            "action": self._action,
            "last_action": self._last_action,
            "episode": self._episode,
        }

    def _worlds(self) -> Worlds:
        return Worlds(self.sim, self._action, self._last_action, self._episode_step)

    def _observe(self) -> dict[str, Tensor]:
        """Fresh tensors, also where the task hands out the simulation's own."""
        return {name: obs.clone() for name, obs in self.task.observe(self._worlds()).items()}

    def _log(self, reward: Tensor, terms: Tensor, done: Tensor) -> Tensor:
        """Add this step to the running episodes; return the sums over those that end."""
        ones = torch.ones_like(reward)
        self._episode[:, 1:] += torch.cat((torch.stack((reward, ones), dim=1), terms), dim=1)
        self._episode[:, 0] = 1.0
        # Chosen, not multiplied: zero times a reward that is not a number would stay so for ever, and in every sum.
        sums = _zero_where(~done, self._episode).sum(0)
        self._episode.masked_fill_(done[:, None], 0.0)
        faults = torch.stack((self.sim.failed.sum(), self.sim.overflowed.sum())).float()
        return torch.cat((sums, faults))

    def _reset_worlds(self, done: Tensor) -> None:
        if self._taken == len(self._numbers):
            self.prefetch(1)
        numbers = self._numbers[self._taken]
        self._taken += 1
        self.sim.reset(done, *self.task.reset(numbers))
        self.sim.sense()
        self._episode_step.masked_fill_(done, 0)
        self._action.masked_fill_(done[:, None], 0.0)
        self._last_action.masked_fill_(done[:, None], 0.0)


def _zero_where(mask: Tensor, values: Tensor) -> Tensor:
    """`values` [world, ...] with the rows of `mask` replaced, so that a NaN cannot spread."""
    return values.masked_fill(mask.view(-1, *[1] * (values.dim() - 1)), 0)
