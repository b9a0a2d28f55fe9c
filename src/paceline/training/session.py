"""The env, the learner and the totals of a run on one rank, from its start or resume to its end."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from rich.console import Console
from torch import Tensor

from paceline.device.memory import used_mib
from paceline.distributed.group import Group
from paceline.env.check_env import CheckedEnv
from paceline.env.vec_env import VecEnv, as_robot_env
from paceline.learners.settings import Settings, flag
from paceline.process.interrupts import Interrupts
from paceline.process.stage import cursor_restored, stage
from paceline.run import checkpoint
from paceline.run.checkpoint_writer import CheckpointWriter
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.loggers.logger import Loggers, open_loggers
from paceline.run.metrics import ConsoleProgress, EpisodeMeans
from paceline.run.optional_parts import OptionalParts
from paceline.sim.warp_cache import compiled_modules_counter
from paceline.tasks import registry
from paceline.tasks.registry import EnvEntry
from paceline.training.build import check_task, engine_of, load_state, make_env, make_learner
from paceline.training.callbacks import Callback
from paceline.training.image_memory import check_image_memory
from paceline.training.periodic_evaluation import PeriodicEvaluation
from paceline.training.pictures import pictures_of
from paceline.training.plan import Plan
from paceline.training.rank_table import RANK_METRICS, RankTable
from paceline.training.ranks import Member, describe_device, print_header
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
        plan: Plan,
        members: list[Member],
        interrupts: Interrupts,
        consoles: list[Console],
        began: float,
        callbacks: tuple[Callback, ...] = (),
    ):
        self.config, self.settings, self.group, self.rank = config, settings, group, group.rank
        self._plan, self._interrupts, self._consoles, self._began = plan, interrupts, consoles, began
        self.run: RunDir = plan.run
        self._rank_table = RankTable(members, plan.restarts) if group.is_distributed else None
        self._envs = plan.envs[self.rank.index]
        self.total_envs = sum(map(len, plan.envs))
        self.engine = engine_of(config, self.rank.device)
        # Before the envs are built, because that takes minutes on Warp and the checkpoint may be damaged.
        saved_envs = checkpoint.load_envs_of_rank(plan.checkpoint, plan.envs, group) if plan.checkpoint else {}
        self._build(members)
        self.steps_per_iteration = self.total_envs * settings.horizon
        self.episodes = EpisodeMeans()
        self.totals = {"seconds": 0.0, "env_steps": 0, "best_return": -math.inf, "failures": 0, "overflows": 0}
        self._first_iteration, self._saved_iteration = plan.iteration, -1
        self._seconds = 0.0
        self.loggers = Loggers(self.warn)
        """Open on the main rank from the start of `loop` to `close`."""
        self._new_callbacks = callbacks if self.rank.is_main else ()
        self._callbacks = OptionalParts(self.warn)
        """Those that have begun."""
        self._evaluation: PeriodicEvaluation | None = None
        self.checkpoints = CheckpointWriter(self.run.checkpoints, config.keep_checkpoints, group, self.warn)
        if plan.saved is not None:
            self._restore(plan.saved, saved_envs)

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
        with self._stage("Building the envs", counts_modules=True):
            self.env = make_env(self.config, self.rank, self._envs)
        if is_env_entry:
            self.env = cast("VecEnv", CheckedEnv(self.env, self.config.task))
            self._print_header(members)
        if images := check_image_memory(self.env, self.settings.horizon):
            self._print(images)
        if robot_env := as_robot_env(self.env):
            for message in robot_env.camera_messages:
                self._print(message)
            from paceline.env.guarded_task import host_syncs

            for finding in host_syncs(robot_env):
                self.warn(f"This task cannot be captured as a CUDA graph, which training on a GPU needs: {finding}")
        with self._stage("Building the networks"):
            self.learner = make_learner(self.config, self._stoppable(self.env), self.group)
        if self.engine == "warp":
            self._print(
                f"Envs and networks built in {time.monotonic() - started:.0f} s. The first iteration compiles the "
                "policy and the update, the second records their CUDA graphs."
            )

    def _stage(self, text: str, counts_modules: bool = False) -> AbstractContextManager[None]:
        """Show a stage of the start on the terminal of the main rank."""
        detail = compiled_modules_counter() if counts_modules and self.engine == "warp" else str
        return stage(self._consoles[0], text, detail)

    def _stoppable(self, env: VecEnv) -> VecEnv:
        """Return an env whose steps a stop request ends. Several ranks must end together, so they have no such env."""
        return env if self.group.is_distributed else cast("VecEnv", _StoppableEnv(env, self._interrupts))

    def _print_header(self, members: list[Member]) -> None:
        for console in self._consoles:
            print_header(console, self.config, self.settings, self.group, self._plan, members)

    def _print(self, text: str) -> None:
        for console in self._consoles:
            console.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        for console in self._consoles:
            console.print(text, markup=False, soft_wrap=True)

    def _restore(self, saved: dict[str, Any], saved_envs: dict[str, Any]) -> None:
        """Continue from the checkpoint of the plan."""
        changed = self._plan.changed_options
        remedy = f"; {' '.join(changed)} cannot change in this run" if changed else ""
        with checkpoint.reading(self._plan.checkpoint, remedy):
            load_state(self.learner, saved["learner"] | {"envs": saved_envs})
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
            progress = [ConsoleProgress(console, *lengths, self._rank_table) for console in self._consoles]
            for console, line in zip(self._consoles, progress, strict=True):
                stack.enter_context(cursor_restored(console))
                stack.enter_context(line)
            if self.rank.is_main:
                self.loggers = open_loggers(config, self.run, learner.iteration + 1, self._facts(), self.warn)
            for callback in self._new_callbacks:
                self._callbacks.add(callback.name, partial(callback.begin, self))
            started = time.monotonic()
            while learner.iteration < config.max_iterations and not exchange.stop:
                self.checkpoints.check()
                iteration_started = time.monotonic()
                try:
                    metrics = learner.learn()
                except StopRequested:
                    break
                now = time.monotonic()
                self._seconds = now - started
                metrics |= self._rank_metrics()
                self._log(learner.iteration - 1, exchange.exchange(self._interrupts.requested, metrics))
                if self._rank_table:
                    self._rank_table.update(exchange.by_rank)
                self._log(learner.iteration, self._account(metrics, now - iteration_started))
                if config.image_every and (learner.iteration - 1) % config.image_every == 0:
                    self._log_images()
                for line in progress:
                    line.show(learner.iteration, self.steps_per_second(), self.episodes.means())
                self._callbacks.call("after_iteration", self)
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

    def close(self, status: str) -> None:
        """Close the callbacks and the loggers. This may take minutes, so the checkpoint, the result and the report of a
        failure to other ranks come before it."""
        self._callbacks.close(status)
        self.loggers.close(status)

    def _facts(self) -> dict[str, Any]:
        """Return what metrics.jsonl states about this session."""
        return {
            "world_size": self.rank.world_size,
            "total_envs": self.total_envs,
            "steps_per_iteration": self.steps_per_iteration,
            "engine": self.engine,
            "device_name": describe_device(self.rank.device),
            "backend": self.group.backend,
            "cores": self.rank.cores,
        }

    def _log(self, iteration: int, values: dict[str, float]) -> None:
        if values:
            self.loggers.log(iteration, values)

    def _log_images(self) -> None:
        if self.rank.is_main:
            for name, picture in pictures_of(self.env).items():
                self.loggers.log_image(self.learner.iteration, f"cameras/{name}", picture)

    def _rank_metrics(self) -> dict[str, float]:
        """Return the metrics that each rank measures for itself, except those of the learner."""
        robot_env = as_robot_env(self.env)
        seconds = robot_env.render_seconds() if robot_env else None
        rendering = {} if seconds is None else {"seconds/render": seconds}
        return self.group.sync_usage() | rendering | {"memory/used_mib": used_mib(self.rank.device)}

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the policy, write the result and return the means to log."""
        if self._evaluation is None:
            self._evaluation = PeriodicEvaluation(self.config, self.group, self._stoppable)
        evaluation = self._evaluation.evaluate(self.learner.policy(), self.learner.iteration)
        if self.rank.is_main:
            evaluation.write(self.run.evaluations)
        return {f"eval/{name.removeprefix(_METRIC_PREFIX)}": each.mean for name, each in evaluation.estimates.items()}

    def _account(self, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """Add an iteration's metrics to the totals of the run; return the values to log."""
        if self.group.is_distributed:
            # _StopExchange collects the values of all ranks.
            metrics = {name: value for name, value in metrics.items() if name not in RANK_METRICS}
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
        metrics["progress/env_steps"] = self.totals["env_steps"]
        metrics["progress/train_seconds"] = self.totals["seconds"] + self._seconds
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
        """Begin to write a checkpoint of the current iteration, unless it exists. It holds the envs of all ranks, so
        that any number of ranks can continue from it."""
        if self._saved_iteration == self.learner.iteration:
            return
        self._saved_iteration = self.learner.iteration
        # A restart continues after this checkpoint, so the values logged before it must be on disk.
        self.loggers.flush()
        mean_return = self.episodes.means().get("return", -math.inf)
        is_best = mean_return > self.totals["best_return"]
        self.totals["best_return"] = max(mean_return, self.totals["best_return"])
        content = {
            "num_envs": self.total_envs,
            "learner": self.learner.state(),
            "episodes": self.episodes.state(),
            "totals": self.totals | {"seconds": self.totals["seconds"] + self._seconds},
            "settings": asdict(self.settings),
        }
        self.checkpoints.save(self.learner.iteration, content, is_best)

    def steps_per_second(self) -> float:
        """Return the env steps per second of this session, including checkpoints and logging."""
        iterations = self.learner.iteration - self._first_iteration
        return iterations * self.steps_per_iteration / self._seconds if self._seconds else 0.0

    def write_result(self, status: str) -> dict[str, Any]:
        result = self.result(status, None)
        if self.rank.is_main:
            self.run.write_result(**result)
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
    """Exchanges once per iteration whether each rank was requested to stop, and its `RANK_METRICS`.

    The exchange runs during the next iteration, so no rank waits for it, and all ranks stop after the same iteration.
    """

    def __init__(self, group: Group):
        self._group, self.stop = group, False
        self.by_rank: Tensor | None = None
        """`RANK_METRICS` of all ranks in the previous iteration, [rank, metric]."""
        self._pending: Callable[[], Tensor] | None = None

    def exchange(self, stop_requested: bool, metrics: dict[str, float]) -> dict[str, float]:
        """Send the values of this iteration; return the metrics of all ranks in the previous iteration."""
        if not self._group.is_distributed:
            self.stop = stop_requested
            return {}
        previous = self.finish()
        row = [float(stop_requested), *(metrics[name] for name in RANK_METRICS)]
        self._pending = self._group.begin_all_gather(row)
        return previous

    def finish(self) -> dict[str, float]:
        """Wait for the pending exchange; return the minimum, mean and maximum of the metrics over the ranks."""
        if self._pending is None:
            return {}
        table, self._pending = self._pending(), None
        self.stop, self.by_rank = bool(table[:, 0].any()), table[:, 1:]
        return {
            f"{name}/{kind}": float(getattr(values, kind)())
            for name, values in zip(RANK_METRICS, self.by_rank.unbind(1), strict=True)
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
