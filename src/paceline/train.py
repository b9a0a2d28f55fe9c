"""One worker's life: rank, env, learner, loop, checkpoints, result."""

import math
import time
import traceback
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from paceline import checkpoint
from paceline.build import build, fit
from paceline.config import TrainConfig
from paceline.distributed.rank import Rank, this_rank, tune_torch
from paceline.errors import UserError
from paceline.interrupts import Interrupts
from paceline.metrics import ConsoleProgress, EpisodeMeans, TensorBoard
from paceline.run_dir import RunDir
from paceline.sim.simulation import choose_engine

# Ctrl-C waits for the end of an iteration that takes no longer than this; a longer one is cut off and undone.
PATIENCE_SECONDS = 0.5


# The traceback of what ended a run.
ERROR_FILE = "error.log"


class TrainingFailedError(Exception):
    """Training ended before its time; the message names the cause, the host, the rank and the run."""


class UnusableNumberError(Exception):
    """A loss or a gradient is not finite; the message says what to try."""


def train(config: TrainConfig, run: RunDir, console: Console, resume_from: Path | None = None) -> dict[str, Any]:
    """Train until `max_iterations`, Ctrl-C or a failure; what is returned is also in result.json, but for `run`, where
    that file is."""
    config.check()
    rank = this_rank(config.gpu_ids)
    tune_torch(rank.device)
    saved = checkpoint.load(resume_from) if resume_from else None
    session = Session(config, rank)
    if saved is not None:
        session.restore(saved, str(resume_from))
    with run.held(config, resumed=saved is not None) as run, Interrupts() as interrupts:
        if saved is not None:
            checkpoint.set_aside_later(run.checkpoints, session.learner.iteration)
        run.write_result(**session.result("running", None))
        session.introduce(run, console)
        try:
            session.loop(run, console, interrupts)
            session.save(run)
        except Exception as error:
            # The disk may be what failed; the error itself must come out all the same.
            with suppress(OSError):
                (run.path / ERROR_FILE).write_text(traceback.format_exc())
                run.write_result(**session.result("failed", f"{type(error).__name__}: {error}"))
            place = f"rank {rank.index} on {rank.host}"
            raise TrainingFailedError(f"{_cause(error)}; {place}, more in {run.path / ERROR_FILE}") from error
        status = "completed" if session.learner.iteration >= config.max_iterations else "interrupted"
        result = session.result(status, None)
        run.write_result(**result)
    return result | {"run": run.path}


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, UnusableNumberError) else f"{type(error).__name__}: {error}"


class Session:
    """A run from its start or resume to its end."""

    def __init__(self, config: TrainConfig, rank: Rank):
        self._began = time.monotonic()
        self.config, self.rank = config, rank
        self.env, self.learner = build(config, rank)
        self.steps_per_iteration = config.num_envs * config.ppo.horizon * rank.world_size
        self.episodes = EpisodeMeans()
        self.totals = {"seconds": 0.0, "env_steps": 0, "best_return": -math.inf, "failures": 0, "overflows": 0}
        self._first_iteration, self._saved_iteration = 0, -1
        self._session_seconds = 0.0

    def restore(self, saved: dict[str, Any], source: str) -> None:
        worlds = saved["learner"]["env"]["episode_step"].shape[0]
        if worlds != self.env.num_envs:
            raise UserError(
                f"the checkpoint has {worlds} worlds, this run {self.env.num_envs}: use --num-envs {worlds}"
            )
        if saved["learner"]["iteration"] >= self.config.max_iterations:
            raise UserError(
                f"the run has done {saved['learner']['iteration']} iterations already: "
                f"ask for more in all with --max-iterations (now {self.config.max_iterations})"
            )
        fit(self.learner.load_state, saved["learner"], source)
        self.episodes.load_state(saved["episodes"])
        self.totals |= saved["totals"]
        self._first_iteration = self.learner.iteration

    def introduce(self, run: RunDir, console: Console) -> None:
        config, start = self.config, f", from iteration {self._first_iteration}" if self._first_iteration else ""
        console.print(
            f"[bold]{config.task}[/]: {config.num_envs} worlds on {_describe(self.rank.device)}, "
            f"engine {choose_engine(config.engine, self.rank.device)}, {config.learner}, seed {config.seed}\n"
            f"{config.max_iterations} iterations of {self.steps_per_iteration:,} env steps{start} "
            f"-> [bold]{escape(str(run.path))}[/]",
            highlight=False,
            soft_wrap=True,
        )

    def loop(self, run: RunDir, console: Console, interrupts: Interrupts) -> None:
        """Iterate until done or asked to stop; a failure is left to the caller."""
        learner, config = self.learner, self.config
        board = TensorBoard(run.tensorboard, learner.iteration + 1) if config.logger == "tensorboard" else None
        progress = ConsoleProgress(console, learner.iteration, config.max_iterations, self.env.episode_steps)
        seconds, loop_started = math.inf, time.monotonic()
        try:
            while learner.iteration < config.max_iterations and not interrupts.asked:
                before, started = learner.state() if seconds > PATIENCE_SECONDS else None, time.monotonic()
                try:
                    with interrupts.cutting_in(before is not None):
                        values = learner.learn()
                except KeyboardInterrupt:
                    assert before is not None
                    learner.load_state(before)
                    break
                seconds, self._session_seconds = time.monotonic() - started, time.monotonic() - loop_started
                values = self._account(values, seconds)
                if board:
                    board.write(learner.iteration, values)
                progress.show(learner.iteration, self.steps_per_second(), self.episodes.means())
                if learner.iteration % config.checkpoint_every == 0:
                    self.save(run)
        finally:
            progress.close()
            if board:
                board.close()

    def _account(self, values: dict[str, float], seconds: float) -> dict[str, float]:
        """Take an iteration's numbers into the run's; return what to log."""
        sums = {name: values.pop(name) for name in ("episodes", *self.env.log_names)}
        for fault in ("failures", "overflows"):
            self.totals[fault] = int(values[fault])
            values[f"faults/{fault}"] = values.pop(fault)
        for name, value in values.items():
            if not math.isfinite(value):
                raise UnusableNumberError(
                    f"{name} became {value} in iteration {self.learner.iteration}: "
                    "try a smaller --ppo.learning-rate, or resume from an earlier checkpoint"
                )
        self.episodes.add(sums)
        self.totals["env_steps"] += self.steps_per_iteration
        values["speed/steps_per_second"] = self.steps_per_iteration / seconds
        return values | {n if "/" in n else f"episode/{n}": mean for n, mean in self.episodes.means().items()}

    def save(self, run: RunDir) -> None:
        """A checkpoint of the present iteration, unless there is one."""
        if self._saved_iteration == self.learner.iteration:
            return
        mean_return = self.episodes.means().get("return", -math.inf)
        best = mean_return > self.totals["best_return"]
        self.totals["best_return"] = max(mean_return, self.totals["best_return"])
        totals = self.totals | {"seconds": self.totals["seconds"] + self._session_seconds}
        state = {"learner": self.learner.state(), "episodes": self.episodes.state(), "totals": totals}
        checkpoint.save(run.checkpoints, self.learner.iteration, state, self.config.keep_checkpoints, best)
        self._saved_iteration = self.learner.iteration

    def steps_per_second(self) -> float:
        """Over this session's iterations, checkpoints and logging included."""
        done = (self.learner.iteration - self._first_iteration) * self.steps_per_iteration
        return done / self._session_seconds if self._session_seconds else 0.0

    def result(self, status: str, cause: str | None) -> dict[str, Any]:
        config, means = self.config, self.episodes.means()
        return {
            "status": status,
            "cause": cause,
            "task": config.task,
            "learner": config.learner,
            "engine": choose_engine(config.engine, self.rank.device),
            "device": str(self.rank.device),
            "world_size": self.rank.world_size,
            "num_envs": config.num_envs,
            "total_envs": config.num_envs * self.rank.world_size,
            "iterations": self.learner.iteration,
            "env_steps": self.totals["env_steps"],
            "steps_per_second": self.steps_per_second(),
            "mean_return": means.get("return"),
            "mean_length": means.get("length"),
            "max_length": self.env.episode_steps,
            "failures": self.totals["failures"],
            "overflows": self.totals["overflows"],
            "train_seconds": self.totals["seconds"] + self._session_seconds,
            "wall_seconds": time.monotonic() - self._began,
            "restarts": 0,
            "versions": _versions(),
        }


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _versions() -> dict[str, str]:
    found = {"python": python_version()}
    for package in ("paceline", "torch", "mujoco", "mujoco-warp", "warp-lang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
