"""The env, the learner and the totals of a run on one rank, from its start or resume to its end."""

import math
import time
from dataclasses import asdict
from typing import Any, cast

from rich.console import Console

from paceline.distributed.group import Group
from paceline.distributed.launch_record import LaunchRecord
from paceline.distributed.sharding import concatenate, shard, to_cpu
from paceline.env.vec_env import VecEnv
from paceline.learners.settings import Settings, flag
from paceline.process.interrupts import Interrupts
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.metrics import ConsoleProgress, EpisodeMeans, TensorBoard
from paceline.run.versions import versions
from paceline.training.build import build, engine_of, load_state
from paceline.training.header import describe_device, print_compilation
from paceline.training.plan import Plan, Start
from paceline.training.stop_exchange import TIMINGS, StopExchange
from paceline.validation import shown

_METRIC_PREFIX = "measure/"
_OVERFLOW_WARNING = (
    "[yellow]Some envs exceeded the number of contacts or constraints that the engine has room for: it dropped some of "
    "them, so the physics of these steps is wrong. result.json counts such steps. If there are many, let fewer geoms "
    "collide.[/]"
)


class NonFiniteError(Exception):
    """A metric is not finite. The message names the cause and what to try."""


class Session:
    """A run from its start or resume to its end, on one rank."""

    def __init__(
        self,
        config: TrainConfig,
        settings: Settings,
        group: Group,
        envs: range,
        plan: Plan,
        start: Start,
        launch: LaunchRecord,
        consoles: list[Console],
        began: float,
    ):
        self.config, self.settings, self.group, self.rank = config, settings, group, group.rank
        self.envs, self.total_envs = envs, start.total_envs
        self._launch, self._restarts, self._consoles, self._began = launch, plan.restarts, consoles, began
        self.interrupts = Interrupts()
        with print_compilation(engine_of(config, self.rank.device), consoles):
            self.env, self.learner = build(config, group, envs, wrap=self._stoppable if group.alone else None)
        self.steps_per_iteration = self.total_envs * settings.horizon
        self.episodes = EpisodeMeans()
        self.totals = {"seconds": 0.0, "env_steps": 0, "best_return": -math.inf, "failures": 0, "overflows": 0}
        self._first_iteration, self._saved_iteration = 0, -1
        self._seconds = 0.0
        self._tensorboard: TensorBoard | None = None
        if start.saved is not None:
            self._restore(start, str(plan.checkpoint))

    def _stoppable(self, env: VecEnv) -> VecEnv:
        return cast("VecEnv", _StoppableEnv(env, self))

    def _restore(self, start: Start, source: str) -> None:
        """Continue from the checkpoint `source`."""
        assert start.saved is not None
        with checkpoint.reading(source):
            state = start.saved["learner"]
            state = state | {"envs": shard(state["envs"], self.envs)}
            load_state(self.learner, state, source, changed=start.changed_options)
            if start.new_learning_rate:
                self.learner.set_learning_rate(self.settings.learning_rate)
            self.episodes.load_state(start.saved["episodes"], self.env.log_names)
            self.totals |= _checked_totals(start.saved["totals"])
            self._first_iteration = self.learner.iteration

    def loop(self, run: RunDir) -> None:
        """Iterate until all iterations are done or a stop is requested."""
        learner, config = self.learner, self.config
        if config.logger == "tensorboard" and self.rank.is_main:
            self._tensorboard = TensorBoard(run.tensorboard, learner.iteration + 1)
        lengths = learner.iteration, config.max_iterations, self.env.max_episode_steps
        progress = [ConsoleProgress(console, *lengths) for console in self._consoles]
        exchange = StopExchange(self.group)
        started = time.monotonic()
        try:
            while learner.iteration < config.max_iterations and not exchange.stop:
                iteration_started = time.monotonic()
                try:
                    metrics = learner.learn()
                except StopRequested:
                    break
                now = time.monotonic()
                self._seconds = now - started
                self._log(learner.iteration - 1, exchange.exchange(self.interrupts.requested, metrics))
                self._log(learner.iteration, self._account(metrics, now - iteration_started))
                for line in progress:
                    line.show(learner.iteration, self.steps_per_second(), self.episodes.means())
                if learner.iteration % config.checkpoint_every == 0:
                    self.save(run)
            self._log(learner.iteration, exchange.finish())
        finally:
            for line in progress:
                line.close()
            if self._tensorboard:
                self._tensorboard.close()
                self._tensorboard = None

    def _log(self, iteration: int, values: dict[str, float]) -> None:
        if self._tensorboard:
            self._tensorboard.write(iteration, values)

    def _account(self, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """Add an iteration's metrics to the totals of the run; return what to log."""
        if not self.group.alone:
            # Each rank has its own timings; StopExchange collects those of all ranks.
            metrics = {name: value for name, value in metrics.items() if name not in TIMINGS}
        sums = {name: metrics.pop(name) for name in ("episodes", *self.env.log_names)}
        if metrics["overflows"] and not self.totals["overflows"]:
            for console in self._consoles:
                console.print(_OVERFLOW_WARNING, soft_wrap=True)
        for fault in ("failures", "overflows"):
            self.totals[fault] = int(metrics[fault])
            metrics[f"faults/{fault}"] = metrics.pop(fault)
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise NonFiniteError(self._explain(name, value))
        self.episodes.add(sums)
        self.totals["env_steps"] += self.steps_per_iteration
        metrics["speed/steps_per_second"] = self.steps_per_iteration / seconds
        return metrics | {n if "/" in n else f"episode/{n}": mean for n, mean in self.episodes.means().items()}

    def _explain(self, name: str, value: float) -> str:
        """Return the cause of a metric that is not finite: the task, or else the settings."""
        found, iteration = self.learner.first_non_finite(), self.learner.iteration
        if found:
            return f"{found} of iteration {iteration}: check how the task {self.config.task} computes it"
        rate = flag(self.settings, "learning_rate")
        remedy = f"try a smaller {rate}, or resume from an earlier checkpoint"
        return f"{name} became {value} in iteration {iteration}: {remedy}"

    def save(self, run: RunDir) -> None:
        """Write a checkpoint of the current iteration, unless there is one. It holds the envs of all ranks, so that any
        number of ranks can continue from it."""
        if self._saved_iteration == self.learner.iteration:
            return
        self._saved_iteration = self.learner.iteration
        state = self.learner.state()
        shards = self.group.gather(to_cpu(state["envs"]))
        if shards is None:
            return
        if self._tensorboard:
            # A restart continues after this checkpoint, so what was logged before must be on disk.
            self._tensorboard.flush()
        mean_return = self.episodes.means().get("return", -math.inf)
        is_best = mean_return > self.totals["best_return"]
        self.totals["best_return"] = max(mean_return, self.totals["best_return"])
        content = {
            "num_envs": self.total_envs,
            "learner": state | {"envs": concatenate(shards)},
            "episodes": self.episodes.state(),
            "totals": self.totals | {"seconds": self.totals["seconds"] + self._seconds},
            "settings": asdict(self.settings),
        }
        checkpoint.save(run.checkpoints, self.learner.iteration, content, self.config.keep_checkpoints, is_best)

    def steps_per_second(self) -> float:
        """Return the env steps per second of this session, checkpoints and logging included."""
        iterations = self.learner.iteration - self._first_iteration
        return iterations * self.steps_per_iteration / self._seconds if self._seconds else 0.0

    def write_result(self, run: RunDir, status: str) -> dict[str, Any]:
        result = self.result(status, None)
        if self.rank.is_main:
            run.write_result(**result)
        return result

    def result(self, status: str, cause: str | None) -> dict[str, Any]:
        """Return the content of result.json."""
        config, means = self.config, self.episodes.means()
        return {
            "status": status,
            "cause": cause,
            "task": config.task,
            "learner": config.learner,
            "engine": engine_of(config, self.rank.device),
            "device": str(self.rank.device),
            "device_name": describe_device(self.rank.device),
            "world_size": self.rank.world_size,
            "num_envs": len(self.envs),
            "total_envs": self.total_envs,
            "iterations": self.learner.iteration,
            "env_steps": self.totals["env_steps"],
            "steps_per_second": self.steps_per_second(),
            "mean_return": means.get("return"),
            "mean_length": means.get("length"),
            "max_length": self.env.max_episode_steps,
            "measures": {
                name.removeprefix(_METRIC_PREFIX): mean
                for name, mean in means.items()
                if name.startswith(_METRIC_PREFIX)
            },
            "failures": self.totals["failures"],
            "overflows": self.totals["overflows"],
            "train_seconds": self.totals["seconds"] + self._seconds,
            "wall_seconds": time.monotonic() - self._began,
            "restarts": self._restarts,
            **self._launch.fields(),
            "versions": versions(),
        }


class StopRequested(Exception):  # noqa: N818 (not an error)
    """A stop was requested in the middle of a rollout."""


class _StoppableEnv:
    """A `VecEnv` that raises `StopRequested` instead of starting a step after a stop was requested.

    The samples of the incomplete rollout are lost. The envs keep their state, from which the run can continue.
    """

    def __init__(self, env: VecEnv, session: Session):
        self._env, self._session = env, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, actions: Any) -> Any:
        if self._session.interrupts.requested:
            raise StopRequested
        return self._env.step(actions)


def _checked_totals(totals: dict[str, Any]) -> dict[str, Any]:
    """Return the totals of a checkpoint. Raise ValueError if a value is impossible."""
    counts, numbers = ("env_steps", "failures", "overflows"), {"seconds": 0.0, "best_return": -math.inf}
    for name in counts:
        checkpoint.whole_number(name, totals[name])
    for name, minimum in numbers.items():
        if type(totals[name]) is not float or not minimum <= totals[name] < math.inf:
            raise ValueError(f"{name} is {shown(totals[name])}, not a number")
    return {name: totals[name] for name in (*counts, *numbers)}
