"""The env, the learner and the totals of a run on one rank, from its start or resume to its end."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.sharding import concatenate, shard, to_cpu
from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import VecEnv
from paceline.learners.settings import Settings, flag
from paceline.process.interrupts import Interrupts
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.metrics import ConsoleProgress, EpisodeMeans, open_tensorboard
from paceline.tasks import registry
from paceline.tasks.registry import EnvEntry
from paceline.training.build import check_task, engine_of, load_state, make_env, make_learner
from paceline.training.image_memory import check_image_memory
from paceline.training.periodic_evaluation import PeriodicEvaluation
from paceline.training.pictures import pictures_of
from paceline.training.plan import Plan
from paceline.training.ranks import Member, describe_device, print_header
from paceline.validation import shown

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_METRIC_PREFIX = "measure/"
_TIMINGS = ("seconds/collect", "seconds/update")
"""Metrics that each rank measures for itself."""
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
        plan: Plan,
        members: list[Member],
        interrupts: Interrupts,
        consoles: list[Console],
        began: float,
    ):
        self.config, self.settings, self.group, self.rank = config, settings, group, group.rank
        self._plan, self._interrupts, self._consoles, self._began = plan, interrupts, consoles, began
        self._envs = plan.envs[self.rank.index]
        self.total_envs = sum(map(len, plan.envs))
        self.engine = engine_of(config, self.rank.device)
        self._build(members)
        self.steps_per_iteration = self.total_envs * settings.horizon
        self.episodes = EpisodeMeans()
        self.totals = {"seconds": 0.0, "env_steps": 0, "best_return": -math.inf, "failures": 0, "overflows": 0}
        self._first_iteration, self._saved_iteration = plan.iteration, -1
        self._seconds = 0.0
        self._tensorboard: SummaryWriter | None = None
        self._evaluation: PeriodicEvaluation | None = None
        if plan.saved is not None:
            self._restore(plan.saved)

    def _build(self, members: list[Member]) -> None:
        """Print the header, and create the env and the learner. On Warp, print what is compiled and the time it took.

        An invalid task is refused before the header is printed. That of an `EnvEntry` is known when its env is made.
        """
        started, is_env_entry = time.monotonic(), isinstance(registry.find(self.config.task), EnvEntry)
        if not is_env_entry:
            check_task(self.config)
            self._print_header(members)
        if self.engine == "warp":
            self._print("Compiling MuJoCo Warp's kernels for this model: up to two minutes, once for each cache.")
        self.env = make_env(self.config, self.rank, self._envs)
        if is_env_entry:
            self._print_header(members)
        if images := check_image_memory(self.env, self.settings.horizon):
            self._print(images)
        if isinstance(self.env, RobotEnv):
            for message in self.env.camera_messages:
                self._print(message)
        self.learner = make_learner(self.config, self._stoppable(self.env), self.group)
        if self.engine == "warp":
            self._print(
                f"Envs and networks built in {time.monotonic() - started:.0f} s. The first iteration compiles the "
                "policy and the update, the second records their CUDA graphs."
            )

    def _stoppable(self, env: VecEnv) -> VecEnv:
        """Return an env whose steps a stop request ends. Several ranks must end together, so they have no such env."""
        return env if self.group.is_distributed else cast("VecEnv", _StoppableEnv(env, self._interrupts))

    def _print_header(self, members: list[Member]) -> None:
        for console in self._consoles:
            print_header(console, self.config, self.settings, self.group, self._plan, members)

    def _print(self, text: str) -> None:
        for console in self._consoles:
            console.print(text, soft_wrap=True)

    def _restore(self, saved: dict[str, Any]) -> None:
        """Continue from the checkpoint of the plan."""
        changed = self._plan.changed_options
        remedy = f"; {' '.join(changed)} cannot change in this run" if changed else ""
        with checkpoint.reading(self._plan.checkpoint, remedy):
            load_state(self.learner, saved["learner"] | {"envs": shard(saved["learner"]["envs"], self._envs)})
            if self._plan.new_learning_rate:
                self.learner.set_learning_rate(self.settings.learning_rate)
            self.episodes.load_state(saved["episodes"], self.env.log_names)
            self.totals |= _checked_totals(saved["totals"])

    def loop(self) -> None:
        """Iterate until all iterations are done or a stop is requested."""
        learner, config = self.learner, self.config
        lengths = learner.iteration, config.max_iterations, self.env.max_episode_steps
        exchange = _StopExchange(self.group)
        with ExitStack() as stack:
            if config.logger == "tensorboard" and self.rank.is_main:
                writer = open_tensorboard(self._plan.run.tensorboard, learner.iteration + 1)
                self._tensorboard = stack.enter_context(writer)
            progress = [stack.enter_context(ConsoleProgress(console, *lengths)) for console in self._consoles]
            started = time.monotonic()
            while learner.iteration < config.max_iterations and not exchange.stop:
                iteration_started = time.monotonic()
                try:
                    metrics = learner.learn()
                except StopRequested:
                    break
                now = time.monotonic()
                self._seconds = now - started
                self._log(learner.iteration - 1, exchange.exchange(self._interrupts.requested, metrics))
                self._log(learner.iteration, self._account(metrics, now - iteration_started))
                if config.image_every and (learner.iteration - 1) % config.image_every == 0:
                    self._log_images()
                for line in progress:
                    line.show(learner.iteration, self.steps_per_second(), self.episodes.means())
                if learner.iteration % config.checkpoint_every == 0:
                    self.save()
                if config.eval_every and learner.iteration % config.eval_every == 0:
                    began = time.monotonic()
                    try:
                        self._log(learner.iteration, self._evaluate())
                    except StopRequested:
                        break
                    started += time.monotonic() - began
            self._log(learner.iteration, exchange.finish())

    def _log(self, iteration: int, values: dict[str, float]) -> None:
        if self._tensorboard:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, iteration)

    def _log_images(self) -> None:
        if self._tensorboard:
            for name, picture in pictures_of(self.env).items():
                self._tensorboard.add_image(f"cameras/{name}", picture, self.learner.iteration)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the policy, write the result and return the means to log."""
        if self._evaluation is None:
            self._evaluation = PeriodicEvaluation(self.config, self.group, self._stoppable)
        evaluation = self._evaluation.evaluate(self.learner.policy(), self.learner.iteration)
        if self.rank.is_main:
            evaluation.write(self._plan.run.evaluations)
        estimates = evaluation.randomized or evaluation.nominal or {}
        return {f"eval/{name.removeprefix(_METRIC_PREFIX)}": each.mean for name, each in estimates.items()}

    def _account(self, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """Add an iteration's metrics to the totals of the run; return the values to log."""
        if self.group.is_distributed:
            # Each rank has its own timings; _StopExchange collects those of all ranks.
            metrics = {name: value for name, value in metrics.items() if name not in _TIMINGS}
        sums = {name: metrics.pop(name) for name in ("episodes", *self.env.log_names)}
        if metrics["overflows"] and not self.totals["overflows"]:
            self._print(_OVERFLOW_WARNING)
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

    def save(self) -> None:
        """Write a checkpoint of the current iteration, unless it exists. It holds the envs of all ranks, so that any
        number of ranks can continue from it."""
        if self._saved_iteration == self.learner.iteration:
            return
        self._saved_iteration = self.learner.iteration
        state = self.learner.state()
        shards = self.group.gather(to_cpu(state["envs"]))
        if shards is None:
            return
        if self._tensorboard:
            # A restart continues after this checkpoint, so the values logged before it must be on disk.
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
        checkpoint.save(
            self._plan.run.checkpoints, self.learner.iteration, content, self.config.keep_checkpoints, is_best
        )

    def steps_per_second(self) -> float:
        """Return the env steps per second of this session, including checkpoints and logging."""
        iterations = self.learner.iteration - self._first_iteration
        return iterations * self.steps_per_iteration / self._seconds if self._seconds else 0.0

    def write_result(self, status: str) -> dict[str, Any]:
        result = self.result(status, None)
        if self.rank.is_main:
            self._plan.run.write_result(**result)
        return result

    def result(self, status: str, cause: str | None) -> dict[str, Any]:
        """Return the content of result.json."""
        means = self.episodes.means()
        measures = {n.removeprefix(_METRIC_PREFIX): mean for n, mean in means.items() if n.startswith(_METRIC_PREFIX)}
        return self._plan.result(self.config, status, cause) | {
            "engine": self.engine,
            "device": str(self.rank.device),
            "device_name": describe_device(self.rank.device),
            "world_size": self.rank.world_size,
            "num_envs": len(self._envs),
            "total_envs": self.total_envs,
            "iterations": self.learner.iteration,
            "env_steps": self.totals["env_steps"],
            "steps_per_second": self.steps_per_second(),
            "mean_return": means.get("return"),
            "mean_length": means.get("length"),
            "max_length": self.env.max_episode_steps,
            "measures": measures,
            "failures": self.totals["failures"],
            "overflows": self.totals["overflows"],
            "train_seconds": self.totals["seconds"] + self._seconds,
            "wall_seconds": time.monotonic() - self._began,
        }


class StopRequested(Exception):  # noqa: N818 (not an error)
    """A stop was requested in the middle of a rollout."""


class _StoppableEnv:
    """A `VecEnv` that raises `StopRequested` instead of starting a step after a stop was requested.

    The samples of the incomplete rollout are lost. The envs keep their state, from which the run can continue.
    """

    def __init__(self, env: VecEnv, interrupts: Interrupts):
        self._env, self._interrupts = env, interrupts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, actions: Any) -> Any:
        if self._interrupts.requested:
            raise StopRequested
        return self._env.step(actions)


class _StopExchange:
    """Exchanges once per iteration whether each rank was requested to stop, and its timings.

    The exchange runs during the next iteration, so no rank waits for it, and all ranks stop after the same iteration.
    """

    def __init__(self, group: Group):
        self._group, self.stop = group, False
        self._pending: Callable[[], Tensor] | None = None

    def exchange(self, stop_requested: bool, metrics: dict[str, float]) -> dict[str, float]:
        """Send the values of this iteration; return the timings of all ranks in the previous iteration."""
        if not self._group.is_distributed:
            self.stop = stop_requested
            return {}
        timings = self.finish()
        row = [float(stop_requested), *(metrics[name] for name in _TIMINGS)]
        self._pending = self._group.begin_all_gather(row)
        return timings

    def finish(self) -> dict[str, float]:
        """Wait for the pending exchange; return the timings of all ranks."""
        if self._pending is None:
            return {}
        stop, *timings = self._pending().unbind(1)
        self._pending = None
        self.stop = bool(stop.any())
        return {
            f"{name}/{kind}": float(getattr(seconds, kind)())
            for name, seconds in zip(_TIMINGS, timings, strict=True)
            for kind in ("min", "mean", "max")
        }


def _checked_totals(totals: dict[str, Any]) -> dict[str, Any]:
    """Return the totals of a checkpoint. Raise ValueError if a value is impossible."""
    counts, numbers = ("env_steps", "failures", "overflows"), {"seconds": 0.0, "best_return": -math.inf}
    for name in counts:
        checkpoint.whole_number(name, totals[name])
    for name, minimum in numbers.items():
        if type(totals[name]) is not float or not minimum <= totals[name] < math.inf:
            raise ValueError(f"{name} is {shown(totals[name])}, not a number")
    return {name: totals[name] for name in (*counts, *numbers)}
