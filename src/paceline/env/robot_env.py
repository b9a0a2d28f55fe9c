"""A task in many worlds: decimation, resets, time limits and episode statistics, all in tensors."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from paceline.env.check_task import check_constants, check_members, check_model, check_results
from paceline.env.randomization import Randomizer, fields
from paceline.env.task import (
    AnyTask,
    HasConstants,
    HasSenses,
    Measures,
    Pushes,
    Randomizes,
    Resamples,
    Senses,
    Start,
    Task,
    TaskWithMemory,
    Worlds,
)
from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError
from paceline.sim.model import sensor_columns
from paceline.sim.simulation import Sim, make_sim
from paceline.tensors import random as draw
from paceline.tensors.graph import fuse
from paceline.validation import LARGEST_COUNT, above_zero, at_least_one

MOST_PHYSICS_STEPS = 10_000
"""In a control step."""


class _Outcome(NamedTuple):
    """What a step came to, and where the worlds that ended start anew."""

    final_obs: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    done: Tensor
    log: Tensor
    start: tuple[Tensor, Tensor]


class _Numbers(NamedTuple):
    """Of one step, in [0, 1)."""

    start: Tensor
    advance: Tensor
    """[world, step_numbers], for a task with memory; others do not look at it."""
    delay: Tensor
    """[world, 1], where delays are drawn; others do not look at it."""
    fields: tuple[Tensor, ...]
    """[world, n] for each field of the model that is drawn again."""


class RobotEnv:
    """A `VecEnv` of one task on one engine. Nothing in `step` waits for the host or has a data-dependent shape."""

    def __init__(
        self,
        task: Task | TaskWithMemory,
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
        # Asked once: to ask of a protocol takes as long as a small tensor operation.
        self._recalls = task if isinstance(task, TaskWithMemory) else None
        self._resamples = task if isinstance(task, Resamples) else None
        self._measures = task if isinstance(task, Measures) else None
        randomization = task.randomization if isinstance(task, Randomizes) else ()
        model = task.model()
        check_model(task, model)
        per_world = fields(randomization, model)
        self.sim: Sim = make_sim(model, num_envs, engine, self.device, per_world, threads=threads)
        self.step_seconds = task.decimation * self.sim.model.opt.timestep
        self.max_episode_steps = _episode_steps(task.episode_seconds, self.step_seconds)

        self._world = torch.arange(first_env, first_env + num_envs, device=self.device)
        self._steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._episode_step = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._actions = torch.zeros(2, num_envs, self.num_actions, device=self.device)
        self._action, self._last_action = self._actions
        self._numbers: list[_Numbers] = []
        parts = self._recalls.memory() if self._recalls else {}
        self._memory = {name: torch.zeros(num_envs, width, device=self.device) for name, width in parts.items()}
        sensors = sensor_columns(self.sim.model)
        rows = task.constants() if isinstance(task, HasConstants) else {}
        check_constants(task, rows)
        constants = {n: torch.tensor([row], dtype=torch.float32, device=self.device) for n, row in rows.items()}
        self._worlds = Worlds(
            self.sim, sensors, self._action, self._last_action, self._episode_step, self._memory, constants
        )
        names = check_results(task, self._worlds)
        self._randomizer = None
        if randomization:
            self._randomizer = Randomizer(randomization, self.sim, seed, self._world, self.step_seconds)
            self._randomizer.begin(self._steps)
        senses = task.senses if isinstance(task, HasSenses) else Senses()
        self._recent = None
        if senses != Senses():
            self._recent = _Recent(senses, task.observe(self._worlds)["policy"])
        self._apply = fuse(self._apply_actions, self.device)
        self._judge = fuse(self._judge_step, self.device)
        self._observe = fuse(self._observe_and_remember, self.device)
        self._push = fuse(lambda: task.push(self._worlds), self.device) if isinstance(task, Pushes) else None

        self._begin_everywhere()
        if self._recent:
            self._observe_and_remember()
        terms, measures = (f"reward/{n}" for n in names.terms), (f"measure/{n}" for n in names.measures)
        self.log_names = ("length", "return", *terms, *measures)
        self._means = len(names.measures)
        self._one = torch.ones(num_envs, 1, device=self.device)
        self._episode = torch.zeros(num_envs, len(self.log_names), device=self.device)
        self.observation_spec = {n: TensorSpec(tuple(o.shape[1:]), o.dtype) for n, o in self.observe().items()}

    def reset(self) -> dict[str, Tensor]:
        self._begin_everywhere()
        for tensor in (self._episode, self._episode_step, self._actions):
            tensor.zero_()
        self._steps += 1
        return self._observe()

    def step(self, actions: Tensor) -> Step:
        self._apply(actions.detach())
        self.sim.step(self.task.decimation)
        numbers = self._next_numbers()
        outcome = self._judge(numbers)
        self._start(outcome, numbers.fields)
        return Step(
            self._observe(), outcome.reward, outcome.terminated, outcome.truncated, outcome.final_obs, outcome.log
        )

    def observe(self) -> dict[str, Tensor]:
        obs = self._fresh_observations()
        if self._recent:
            obs["policy"] = self._recent.seen()
        return obs

    @property
    def worlds(self) -> Worlds:
        """What the task sees."""
        return self._worlds

    def faults(self) -> Tensor:
        return torch.stack((self.sim.failures.sum(), self.sim.overflows.sum())).float()

    def prefetch_random(self, steps: int) -> None:
        step = self._steps + torch.arange(steps, device=self.device)[:, None]
        starting = draw.uniform(self.seed, self._world, step, draw.Stream.RESET, self.task.reset_numbers)
        advancing = delaying = starting
        if self._recalls:
            advancing = draw.uniform(self.seed, self._world, step, draw.Stream.STEP, self._recalls.step_numbers)
        if self._recent and self._recent.drawn:
            delaying = draw.uniform(self.seed, self._world, step, draw.Stream.DELAY, 1)
        # After the draws of the very beginning, which have step 0.
        fields = self._randomizer.numbers(step + 1) if self._randomizer else []
        each = zip(starting.unbind(0), advancing.unbind(0), delaying.unbind(0), *fields, strict=True)
        self._numbers = [_Numbers(start, advance, delay, tuple(rest)) for start, advance, delay, *rest in each][::-1]

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._own_state().items()} | {
            f"sim/{name}": tensor for name, tensor in self.sim.state().items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        if self._recent:
            self._recent.check(state)
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
            **{f"memory/{name}": part for name, part in self._memory.items()},
            **(self._recent.state() if self._recent else {}),
        }

    def _next_numbers(self) -> _Numbers:
        if not self._numbers:
            self.prefetch_random(1)
        return self._numbers.pop()

    def _begin_everywhere(self) -> None:
        everyone, numbers = torch.ones_like(self.sim.failed), self._next_numbers()
        start = self._starts(numbers.start)
        self._take(start.memory, everyone)
        if self._recent:
            self._recent.begin(everyone, numbers.delay)
        self.sim.reset(everyone, start.qpos, start.qvel)
        self.sim.sense()

    def _start(self, outcome: _Outcome, fields: tuple[Tensor, ...]) -> None:
        if self._randomizer:
            self._randomizer.again(outcome.done, self._episode_step, fields)
        self.sim.reset(outcome.done, *outcome.start)
        if self._push:
            self.sim.push(self._push())
        self.sim.sense()

    def _starts(self, numbers: Tensor) -> Start:
        if self._recalls:
            return self._recalls.start(self._worlds, numbers)
        return Start(*cast("Task", self.task).reset(numbers), {})

    def _take(self, memory: dict[str, Tensor], worlds: Tensor) -> None:
        for name, part in memory.items():
            self._memory[name].copy_(torch.where(worlds.unsqueeze(1), part, self._memory[name]))

    def _forget_non_finite(self, failed: Tensor) -> None:
        """Replace what is not finite in the memory of envs that blew up: `start` may build on it, or leave it as it is.
        Finite values, such as a curriculum's level, are kept."""
        for part in self._memory.values():
            part.masked_fill_(failed.unsqueeze(1) & ~part.isfinite(), 0.0)

    def _measured(self) -> dict[str, Tensor]:
        return self._measures.measure(self._worlds) if self._measures else {}

    # The stretches that are tensors alone; on a GPU each is compiled into a few kernels.

    def _apply_actions(self, actions: Tensor) -> None:
        self._last_action.copy_(self._action)
        self._action.copy_(actions)
        self.sim.ctrl.copy_(self.task.control(self._worlds))
        self._episode_step += 1

    def _judge_step(self, numbers: _Numbers) -> _Outcome:
        worlds, failed = self._worlds, None if self.sim.fault_free else self.sim.failed
        if self._recalls:
            for name, part in self._recalls.advance(worlds, numbers.advance).items():
                self._memory[name].copy_(part)
        final_obs, terminated = self._fresh_observations(), self.task.terminated(worlds)
        if self._recent:
            final_obs["policy"] = self._recent.seen(self._recent.followed_by(final_obs["policy"]))
        if failed is not None:
            terminated = terminated | failed
        truncated = (self._episode_step >= self.max_episode_steps) & ~terminated
        done = terminated | truncated
        terms = torch.stack(tuple(self.task.reward(worlds, terminated).values()), dim=1)
        counted = terms
        if self._means:
            counted = torch.cat((terms, torch.stack(tuple(self._measured().values()), dim=1)), dim=1)
        if failed is not None:
            # A world that blew up ends here: its last observation and reward are not to be trusted, so become zero.
            final_obs = {name: _zero_where(failed, obs) for name, obs in final_obs.items()}
            counted = _zero_where(failed, counted)
        reward = counted[:, : terms.shape[1]].sum(1)

        log = self._episode + torch.cat((self._one, reward[:, None], counted), dim=1)
        # Chosen, not multiplied: zero times a reward that is not a number would stay so for ever.
        self._episode.copy_(_zero_where(done, log))
        if self._means:
            log = torch.cat((log[:, : -self._means], log[:, -self._means :] / log[:, :1]), dim=1)
        if failed is not None:
            self._forget_non_finite(failed)
        resampled = self._resamples.resample(worlds, numbers.advance) if self._resamples else {}
        start = self._starts(numbers.start)
        self._take(resampled, ~done)
        self._take(start.memory, done)
        if self._recent:
            self._recent.begin(done, numbers.delay)
        self._episode_step.masked_fill_(done, 0)
        self._actions.masked_fill_(done.unsqueeze(1), 0.0)
        self._steps += 1
        return _Outcome(final_obs, reward, terminated, truncated, done, log, (start.qpos, start.qvel))

    def _fresh_observations(self) -> dict[str, Tensor]:
        """Fresh also where the task hands out the simulation's own tensors."""
        return {name: obs.clone() for name, obs in self.task.observe(self._worlds).items()}

    def _observe_and_remember(self) -> dict[str, Tensor]:
        obs = self._fresh_observations()
        if self._recent:
            obs["policy"] = self._recent.add(obs["policy"], self._episode_step == 0)
        return obs


def check_timing(task: AnyTask) -> None:
    """Refuse options that no task can have."""
    at_least_one("--env.decimation", task.decimation, MOST_PHYSICS_STEPS)
    above_zero("--env.episode-seconds", task.episode_seconds)


class _Recent:
    """What the policy's group was in the latest control steps, and how late each world sees it."""

    def __init__(self, senses: Senses, obs: Tensor):
        self._fewest, self._most = senses.delay
        self.drawn = self._fewest < self._most
        self._history = torch.arange(senses.history, device=obs.device)
        self._delay = torch.full((len(obs),), self._fewest, device=obs.device)
        # [world, step, ...], newest last.
        self._kept = torch.stack([obs] * (senses.history + self._most), dim=1)

    def state(self) -> dict[str, Tensor]:
        return {"senses/delay": self._delay, "senses/recent": self._kept}

    def check(self, state: dict[str, Tensor]) -> None:
        """Whether a state is of worlds that see alike."""
        kept, late = state.get("senses/recent"), state.get("senses/delay")
        alike = kept is not None and kept.shape[1:] == self._kept.shape[1:]
        if not alike or late is None or not bool(((late >= self._fewest) & (late <= self._most)).all()):
            raise UserError(
                f"the run's worlds do not see {len(self._history)} observations at once, {self._fewest} to "
                f"{self._most} control steps late: resume with the history and the delay that the run has"
            )

    def begin(self, worlds: Tensor, numbers: Tensor) -> None:
        """A new episode's delay."""
        if self.drawn:
            delay = self._fewest + (numbers[:, 0] * (self._most - self._fewest + 1)).long()
            self._delay.copy_(torch.where(worlds, delay, self._delay))

    def add(self, obs: Tensor, first: Tensor) -> Tensor:
        """What the policy sees now that there is `obs`; `first` are worlds in which there was nothing before it."""
        kept = self.followed_by(obs)
        kept = torch.where(first.view(-1, *[1] * obs.dim()), obs.unsqueeze(1), kept)
        self._kept.copy_(kept)
        return self.seen(kept)

    def followed_by(self, obs: Tensor) -> Tensor:
        return torch.cat((self._kept[:, 1:], obs.unsqueeze(1)), dim=1)

    def seen(self, kept: Tensor | None = None) -> Tensor:
        """[world, history * n]; of pictures, [world, history * channels, ...]."""
        kept = self._kept if kept is None else kept
        if not self.drawn:
            return kept[:, : len(self._history)].flatten(1, 2)
        places = (self._most - self._delay)[:, None] + self._history
        places = places.view(*places.shape, *[1] * (kept.dim() - 2)).expand(-1, -1, *kept.shape[2:])
        return kept.gather(1, places).flatten(1, 2)


def _episode_steps(episode_seconds: float, step_seconds: float) -> int:
    steps = episode_seconds / step_seconds
    if steps > LARGEST_COUNT:
        raise UserError(
            f"--env.episode-seconds {episode_seconds:g} is {steps:g} control steps of {step_seconds:g} s: "
            f"an episode has at most {LARGEST_COUNT}"
        )
    return max(1, round(steps))


def _zero_where(mask: Tensor, values: Tensor) -> Tensor:
    """`values` [world, ...] with the rows of `mask` replaced, so that a NaN cannot spread."""
    return values.masked_fill(mask.view(-1, *[1] * (values.dim() - 1)), 0)
