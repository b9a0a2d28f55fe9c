"""One worker's life: rank, env, learner, loop, checkpoints, result."""

import math
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from paceline import checkpoint
from paceline.build import build, engine_of, fingerprint, fit, reading, whole_number
from paceline.checks import flag, shown
from paceline.config import MOST_ENVS, TrainConfig
from paceline.distributed import worker_log
from paceline.distributed.failure import Failure, PeerLostError
from paceline.distributed.gpus import gpu_uuid
from paceline.distributed.group import Group, differences
from paceline.distributed.rank import die_with_launcher, launch_id, this_rank, tune_torch
from paceline.distributed.worlds import cut, joined, on_cpu, shares
from paceline.errors import UserError
from paceline.interrupts import SAME_REQUEST_SECONDS, Interrupts, ignore
from paceline.metrics import ConsoleProgress, EpisodeMeans, TensorBoard
from paceline.run_dir import RunDir
from paceline.versions import versions

# Ctrl-C waits for the end of an iteration that takes no longer than this; a longer one is cut off and undone.
PATIENCE_SECONDS = 0.5
# A rank that stops because another was asked to waits so long to be asked itself: its launcher, which may be about to
# start all ranks anew, would take an earlier end for the end of the run.
_SIGNAL_SECONDS = 15.0
_OVERFLOW = (
    "[yellow]Some worlds ran out of room for contacts or constraints, and lost some in that step: the physics is wrong "
    "there. result.json counts these steps; if they are many, have fewer geoms collide.[/]"
)
# The traceback of what ended a run.
ERROR_FILE = "error.log"
_MEASURE = "measure/"
_TIMINGS = ("seconds/collect", "seconds/update")


class TrainingFailedError(Exception):
    """Training ended before its time; the message names the cause, the host, the rank and where there is more."""


class UnusableNumberError(Exception):
    """A loss or a gradient is not finite; the message says what to try."""


@dataclass(frozen=True)
class Plan:
    """What the main rank decides for all: where the run is, and what it starts from."""

    run: RunDir
    resume_from: Path | None = None
    total_envs: int | None = None
    """Worlds over all ranks, where an earlier start of the run has settled it."""
    restarts: int = 0
    goes_on: bool = False
    """Whether the run's directory is its own already."""


class _Life:
    """What a rank has made so far, for whoever must end it."""

    def __init__(self, group: Group, run: RunDir):
        self.group, self.run = group, run
        self.log = worker_log.none(group.rank)
        self.session: Session | None = None

    def write_down(self, failure: Failure, text: str) -> None:
        """A failure, in this rank's log; the main rank's also in the run."""
        self.log.write(text)
        if self.session is not None and self.group.rank.is_main:
            # The disk may be what failed; the error itself must come out all the same.
            with suppress(OSError, UserError):
                (self.run.path / ERROR_FILE).write_text(text)
                self.session.write_result(self.run, "failed", str(failure))

    def end_with_others(self, failure: Failure) -> None:
        """Another rank has failed, and this one, which may be waiting for it in vain, is about to be ended."""
        self.write_down(failure, f"ending, because another rank failed: {failure}\n")
        if self.group.rank.is_main:
            print(f"paceline: training failed: {failure}", file=sys.stderr, flush=True)


def train(config: TrainConfig, run: RunDir, console: Console, resume_from: Path | None = None) -> dict[str, Any]:
    """Train until `max_iterations`, Ctrl-C or a failure; what is returned is also in result.json, but for `run`, where
    that file is. Under a launcher this is one rank of several; what `run` and `resume_from` say counts on the main one.
    """
    config.check()
    rank = this_rank(config.gpu_ids)
    die_with_launcher()
    tune_torch(rank.device)
    try:
        group = Group(rank, config.timeout_seconds)
    except PeerLostError as error:
        raise TrainingFailedError(str(Failure(rank.index, rank.host, str(error)))) from error
    life = _Life(group, run)
    if group.watch:
        group.watch.start(life.end_with_others)
    try:
        return _live(life, config, console, resume_from)
    except UserError:
        # All ranks refuse alike, and need not be told.
        raise
    except Exception as error:
        failure = _tell_all(error, life)
        raise TrainingFailedError(str(failure)) from error
    finally:
        group.close()


def _live(life: _Life, config: TrainConfig, console: Console, resume_from: Path | None) -> dict[str, Any]:
    group, main = life.group, life.group.rank.is_main
    plan = _agree(group, lambda: _make_plan(life.run, resume_from))
    saved, total = _agree(group, lambda: _start_of(plan, config, group.size))
    session = Session(config, group, total, plan.restarts)
    members = session.meet()
    if saved is not None:
        session.restore(saved, str(plan.resume_from))
    same = 0.0 if group.alone else SAME_REQUEST_SECONDS
    with ExitStack() as stack, Interrupts(same) as interrupts:
        run = _agree(group, lambda: stack.enter_context(plan.run.held(config, plan.goes_on)))
        life.run, life.session = run, session
        life.log = log = worker_log.begin(group.rank, group.alone, config.worker_log_dir, run.path)
        if saved is not None and main:
            checkpoint.set_aside_later(run.checkpoints, session.learner.iteration)
        session.write_result(run, "running")
        for place in log.consoles(console):
            session.introduce(run, place, members)
        session.loop(run, log.consoles(console), interrupts)
        session.save(run)
        status = "completed" if session.learner.iteration >= config.max_iterations else "interrupted"
        result = session.write_result(run, status)
        if status == "interrupted" and launch_id():
            interrupts.wait(_SIGNAL_SECONDS)
    return result | {"run": run.path}


def _make_plan(run: RunDir, resume_from: Path | None) -> Plan:
    """A run that the same launch began and did not complete goes on from its newest checkpoint."""
    earlier = run.of_launch(launch_id())
    if earlier is not None:
        run, result = earlier
        files = checkpoint.listing(run.checkpoints)
        return Plan(run, files[-1] if files else None, result["total_envs"], result["restarts"] + 1, goes_on=True)
    if resume_from is None:
        run.check_new()
    return Plan(run, resume_from, goes_on=resume_from is not None)


def _start_of(plan: Plan, config: TrainConfig, ranks: int) -> tuple[dict[str, Any] | None, int]:
    """The checkpoint to start from, if any, and how many worlds there are over all ranks. A checkpoint's worlds are
    shared out anew among any number of ranks."""
    if plan.resume_from is None:
        return None, plan.total_envs or config.total(ranks)
    saved = checkpoint.load(plan.resume_from)
    worlds, stored = _env_count(saved, str(plan.resume_from)), plan.run.config()
    asked = (config.num_envs, config.total_envs) != (stored.num_envs, stored.total_envs)
    if asked and config.total(ranks) != worlds:
        remedy = f"--num-envs {worlds // ranks}" if worlds % ranks == 0 else f"--total-envs {worlds}"
        raise UserError(f"the checkpoint has {worlds} worlds, this run {config.total(ranks)}: use {remedy}")
    return saved, worlds


def _env_count(saved: dict[str, Any], source: str) -> int:
    """Number of envs in a checkpoint, over all ranks."""
    with reading(source):
        steps = saved["learner"]["worlds"]["env"]["episode_step"]
        if steps.dim() != 1 or not 0 < len(steps) <= MOST_ENVS:
            raise ValueError(f"episode_step has shape {tuple(steps.shape)}, not one number for each env")
        return len(steps)


def _agree(group: Group, decide: Callable[[], Any]) -> Any:
    """What the main rank decides, on all; also its refusal."""
    decision = None
    if group.rank.is_main:
        try:
            decision = decide()
        except UserError as error:
            decision = error
    decision = group.from_main(decision)
    if isinstance(decision, UserError):
        raise decision
    return decision


def _tell_all(error: Exception, life: _Life) -> Failure:
    """Write down what happened, and have all other ranks end as well."""
    if not life.group.alone:
        ignore()  # a launcher that sees another rank end asks this one to
    group, rank = life.group, life.group.rank
    own_words = isinstance(error, (UnusableNumberError, PeerLostError))
    cause = str(error) if own_words else f"{type(error).__name__}: {error}"
    where = str(life.run.path / ERROR_FILE) if group.alone else life.log.path
    failure = Failure(rank.index, rank.host, cause, where)
    if group.watch:
        # What came over from another rank is for that one to tell.
        infected = isinstance(error, UnusableNumberError) and life.session is not None and life.session.learner.sound()
        failure = group.watch.report(cause, where, echo=infected or isinstance(error, PeerLostError))
    life.write_down(failure, traceback.format_exc())
    return failure


class Session:
    """A run from its start or resume to its end, as one rank sees it."""

    def __init__(self, config: TrainConfig, group: Group, total_envs: int, restarts: int = 0):
        self._began = time.monotonic()
        self.config, self.group, self.rank = config, group, group.rank
        if total_envs < self.rank.world_size:
            raise UserError(f"{total_envs} worlds are too few for {self.rank.world_size} ranks: each needs one")
        self.total_envs, self._restarts = total_envs, restarts
        self.worlds = shares(total_envs, self.rank.world_size)[self.rank.index]
        self.env, self.learner = build(config, group, self.worlds)
        self.steps_per_iteration = total_envs * config.settings.horizon
        self.episodes = EpisodeMeans()
        self.totals = {"seconds": 0.0, "env_steps": 0, "best_return": -math.inf, "failures": 0, "overflows": 0}
        self._first_iteration, self._saved_iteration = 0, -1
        self._session_seconds = 0.0
        self._board: TensorBoard | None = None

    def meet(self) -> list[dict[str, str]]:
        """Where each rank is and what it has, by rank; they must agree in all that the run depends on."""
        device = self.rank.device
        member = {
            "host": self.rank.host,
            "device": _describe(device),
            "uuid": gpu_uuid(device) if device.type == "cuda" else "",
            "cores": str(self.rank.cores),
            "worlds": str(len(self.worlds)),
        }
        members, prints = zip(*self.group.everyone((member, fingerprint(self.config))), strict=True)
        unlike = differences(prints)
        if unlike:
            index, name, theirs, ours = unlike[0]
            more = f" ({len(unlike) - 1} more differences)" if len(unlike) > 1 else ""
            raise UserError(
                f"rank {index} on {members[index]['host']} has {name} {theirs}, the main rank on {members[0]['host']} "
                f"has {ours}: all ranks need the same{more}"
            )
        return list(members)

    def restore(self, saved: dict[str, Any], source: str) -> None:
        with reading(source):
            self._restore(saved, source)

    def _restore(self, saved: dict[str, Any], source: str) -> None:
        state = saved["learner"]
        whole_number("iteration", state["iteration"])
        if state["iteration"] >= self.config.max_iterations:
            raise UserError(
                f"the run has done {state['iteration']} iterations already: "
                f"ask for more in all with --max-iterations (now {self.config.max_iterations})"
            )
        fit(self.learner, state | {"worlds": cut(state["worlds"], self.worlds)}, source)
        self.episodes.load_state(saved["episodes"], self.env.log_names)
        self.totals |= _checked_totals(saved["totals"])
        self._first_iteration = self.learner.iteration

    def introduce(self, run: RunDir, console: Console, members: list[dict[str, str]]) -> None:
        config, start = self.config, f", from iteration {self._first_iteration}" if self._first_iteration else ""
        again = f", restart {self._restarts}" if self._restarts else ""
        where = (
            _describe(self.rank.device) if self.group.alone else f"{len(members)} rank{'s' if len(members) > 1 else ''}"
        )
        lines = [
            f"[bold]{config.task}[/]: {self.total_envs} worlds on {where}, "
            f"engine {engine_of(config, self.rank.device)}, {config.learner}, seed {config.seed}",
            f"{config.max_iterations} iterations of {self.steps_per_iteration:,} env steps{start}{again} "
            f"-> [bold]{escape(str(run.path))}[/]",
        ]
        if not self.group.alone:
            lines += _introduce_ranks(members)
            batch = self.steps_per_iteration // config.settings.minibatches
            lines.append(f"  {batch:,} samples of all ranks in each update, over {self.group.backend}")
        console.print("\n".join(lines), highlight=False, soft_wrap=True)

    def loop(self, run: RunDir, consoles: list[Console], interrupts: Interrupts) -> None:
        """Iterate until done or asked to stop; a failure is left to the caller."""
        learner, config = self.learner, self.config
        if config.logger == "tensorboard" and self.rank.is_main:
            self._board = TensorBoard(run.tensorboard, learner.iteration + 1)
        lines = [ConsoleProgress(c, learner.iteration, config.max_iterations, self.env.episode_steps) for c in consoles]
        news = _News(self.group)
        seconds, loop_started = math.inf, time.monotonic()
        try:
            while learner.iteration < config.max_iterations and not news.stop:
                cut_in = seconds > PATIENCE_SECONDS and self.group.alone
                before, started = learner.state() if cut_in else None, time.monotonic()
                try:
                    with interrupts.cutting_in(cut_in):
                        values = learner.learn()
                except KeyboardInterrupt:
                    assert before is not None
                    learner.load_state(before)
                    break
                seconds, self._session_seconds = time.monotonic() - started, time.monotonic() - loop_started
                self._log(learner.iteration - 1, news.exchange(interrupts.asked, values))
                overflows = self.totals["overflows"]
                self._log(learner.iteration, self._account(values, seconds))
                if self.totals["overflows"] and not overflows:
                    for console in consoles:
                        console.print(_OVERFLOW, soft_wrap=True)
                for line in lines:
                    line.show(learner.iteration, self.steps_per_second(), self.episodes.means())
                if learner.iteration % config.checkpoint_every == 0:
                    self.save(run)
            self._log(learner.iteration, news.last())
        finally:
            for line in lines:
                line.close()
            if self._board:
                self._board.close()
                self._board = None

    def _log(self, iteration: int, values: dict[str, float]) -> None:
        if self._board:
            self._board.write(iteration, values)

    def _account(self, values: dict[str, float], seconds: float) -> dict[str, float]:
        """Take an iteration's numbers into the run's; return what to log."""
        if not self.group.alone:
            # Each rank has its own; `_News` brings those of all.
            values = {name: value for name, value in values.items() if name not in _TIMINGS}
        sums = {name: values.pop(name) for name in ("episodes", *self.env.log_names)}
        for fault in ("failures", "overflows"):
            self.totals[fault] = int(values[fault])
            values[f"faults/{fault}"] = values.pop(fault)
        for name, value in values.items():
            if not math.isfinite(value):
                raise UnusableNumberError(
                    f"{name} became {value} in iteration {self.learner.iteration}: "
                    f"try a smaller {flag(self.config.settings, 'learning_rate')}, or resume from an earlier checkpoint"
                )
        self.episodes.add(sums)
        self.totals["env_steps"] += self.steps_per_iteration
        values["speed/steps_per_second"] = self.steps_per_iteration / seconds
        return values | {n if "/" in n else f"episode/{n}": mean for n, mean in self.episodes.means().items()}

    def save(self, run: RunDir) -> None:
        """A checkpoint of the present iteration, unless there is one. The worlds of all ranks come together in it, so
        that any number of ranks can go on from there."""
        if self._saved_iteration == self.learner.iteration:
            return
        self._saved_iteration = self.learner.iteration
        state = self.learner.state()
        parts = self.group.to_main(on_cpu(state["worlds"]))
        if parts is None:
            return
        if self._board:
            # What is logged up to here must outlive this process, because a restart begins after it.
            self._board.flush()
        mean_return = self.episodes.means().get("return", -math.inf)
        best = mean_return > self.totals["best_return"]
        self.totals["best_return"] = max(mean_return, self.totals["best_return"])
        totals = self.totals | {"seconds": self.totals["seconds"] + self._session_seconds}
        whole = {"learner": state | {"worlds": joined(parts)}, "episodes": self.episodes.state(), "totals": totals}
        checkpoint.save(run.checkpoints, self.learner.iteration, whole, self.config.keep_checkpoints, best)

    def steps_per_second(self) -> float:
        """Over this session's iterations, checkpoints and logging included."""
        done = (self.learner.iteration - self._first_iteration) * self.steps_per_iteration
        return done / self._session_seconds if self._session_seconds else 0.0

    def write_result(self, run: RunDir, status: str, cause: str | None = None) -> dict[str, Any]:
        result = self.result(status, cause)
        if self.rank.is_main:
            run.write_result(**result)
        return result

    def result(self, status: str, cause: str | None) -> dict[str, Any]:
        config, means = self.config, self.episodes.means()
        return {
            "status": status,
            "cause": cause,
            "task": config.task,
            "learner": config.learner,
            "engine": engine_of(config, self.rank.device),
            "device": str(self.rank.device),
            "device_name": _describe(self.rank.device),
            "world_size": self.rank.world_size,
            "num_envs": len(self.worlds),
            "total_envs": self.total_envs,
            "iterations": self.learner.iteration,
            "env_steps": self.totals["env_steps"],
            "steps_per_second": self.steps_per_second(),
            "mean_return": means.get("return"),
            "mean_length": means.get("length"),
            "max_length": self.env.episode_steps,
            "measures": {n.removeprefix(_MEASURE): mean for n, mean in means.items() if n.startswith(_MEASURE)},
            "failures": self.totals["failures"],
            "overflows": self.totals["overflows"],
            "train_seconds": self.totals["seconds"] + self._session_seconds,
            "wall_seconds": time.monotonic() - self._began,
            "restarts": self._restarts,
            "launch": launch_id(),
            "versions": versions(),
        }


class _News:
    """What each rank has to say once per iteration: that it is asked to stop, and how long it took. It travels during
    the next iteration, so nobody waits for it, and all ranks stop after the same one."""

    def __init__(self, group: Group):
        self._group, self.stop = group, False
        self._under_way: Callable[[], Tensor] | None = None

    def exchange(self, asked: bool, values: dict[str, float]) -> dict[str, float]:
        """Send this iteration's; return the timings of all ranks in the one before."""
        if self._group.alone:
            self.stop = asked
            return {}
        found = self.last()
        self._under_way = self._group.begin_table([float(asked), *(values[name] for name in _TIMINGS)])
        return found

    def last(self) -> dict[str, float]:
        if self._under_way is None:
            return {}
        asked, *timings = self._under_way().unbind(1)
        self._under_way = None
        self.stop = bool(asked.any())
        return {
            f"{name}/{kind}": float(getattr(seconds, kind)())
            for name, seconds in zip(_TIMINGS, timings, strict=True)
            for kind in ("min", "mean", "max")
        }


def _checked_totals(totals: dict[str, Any]) -> dict[str, Any]:
    """Of a checkpoint, as `Session.totals`; a ValueError says what cannot be right."""
    counts, numbers = ("env_steps", "failures", "overflows"), {"seconds": 0.0, "best_return": -math.inf}
    for name in counts:
        whole_number(name, totals[name])
    for name, least in numbers.items():
        if type(totals[name]) is not float or not least <= totals[name] < math.inf:
            raise ValueError(f"{name} is {shown(totals[name])}, not a number")
    return {name: totals[name] for name in (*counts, *numbers)}


def _introduce_ranks(members: list[dict[str, str]]) -> list[str]:
    """One line for each stretch of ranks that are alike."""
    lines, first = [], 0
    for index in range(1, len(members) + 1):
        alike = [{**m, "uuid": ""} for m in (members[first], members[index] if index < len(members) else {})]
        if alike[0] == alike[1]:
            continue
        ranks = f"rank {first}" if index - first == 1 else f"ranks {first} to {index - 1}"
        member = members[first]
        shared = ""
        uuids = [m["uuid"] for m in members[first:index] if m["uuid"]]
        if len(set(uuids)) < len(uuids):
            shared = ", sharing a GPU: sums go over gloo, slower than nccl"
        each = " each" if index - first > 1 else ""
        lines.append(f"  {ranks} on {member['host']}: {member['device']}, {member['worlds']} worlds{each}{shared}")
        first = index
    return lines


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
