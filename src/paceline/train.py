"""Train one run as one rank: set up, plan, build, restore, loop, finish."""

import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from paceline.build import build, engine_of, fingerprint, fit, resolve
from paceline.device.cpu import tune_torch
from paceline.device.gpus import gpu_uuid
from paceline.distributed import worker_log
from paceline.distributed.failure import Failure, PeerLostError, Watch
from paceline.distributed.group import Group, differences
from paceline.distributed.launch_record import LaunchRecord, merged, this_launch
from paceline.distributed.rank import Rank, die_with_launcher, this_rank, under_elastic_agent
from paceline.distributed.sharding import cut, joined, on_cpu, shares
from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.learners.settings import Settings, check_samples, flag
from paceline.plan import Plan, Start, load_start, make_plan
from paceline.process.interrupts import NOTICE, SAME_REQUEST_SECONDS, Interrupts, ignore
from paceline.run import checkpoint
from paceline.run.checkpoint import reading, whole_number
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.metrics import ConsoleProgress, EpisodeMeans, TensorBoard
from paceline.run.versions import versions
from paceline.validation import shown

# Ctrl-C waits for the end of an iteration that takes no longer than this; a longer one is interrupted and undone, where
# there is one rank and the env can restore its state.
PATIENCE_SECONDS = 0.5
# A rank that stops because another was asked to waits so long to be asked itself: its launcher, which may be about to
# start all ranks anew, would take an earlier end for the end of the run.
_SIGNAL_SECONDS = 15.0
_OVERFLOW = (
    "[yellow]Some worlds ran out of room for contacts or constraints, and lost some in that step: the physics is wrong "
    "there. result.json counts these steps; if they are many, have fewer geoms collide.[/]"
)
_MEASURE = "measure/"
_TIMINGS = ("seconds/collect", "seconds/update")


class TrainingFailedError(Exception):
    """Training ended before its time; the message names the cause, the host, the rank and where there is more."""


class RunCompletedError(Exception):
    """The run had completed before, so there is nothing to train."""


class UnusableNumberError(Exception):
    """A loss or a gradient is not finite; the message says what to try."""


class _SharedRefusalError(UserError):
    """A refusal that all ranks raise alike."""


class _Worker:
    """What a rank has made so far, for the code that ends it after a failure."""

    def __init__(self, rank: Rank, run: RunDir):
        self.rank, self.run = rank, run
        self.log = worker_log.none(rank)
        self.session: Session | None = None
        self.holds_directory = False
        self.result: Callable[[str, str], dict[str, Any]] | None = None
        """Returns the content of result.json for a status and a cause. None while that of an earlier start is kept."""

    def record(self, failure: Failure, details: str) -> bool:
        """Write a failure to this rank's log and, on the main rank, to the run's directory. Return whether error.log
        was written: the disk may be what failed."""
        self.log.write(details)
        if not self.holds_directory or not self.rank.is_main:
            return False
        written = False
        with suppress(OSError):
            # A new run without files has removed its directory.
            self.run.path.mkdir(parents=True, exist_ok=True)
            self.run.error_file.write_text(details)
            written = True
        with suppress(OSError, UserError):
            if self.result:
                self.run.write_result(**self.result("failed", str(failure)))
        return written

    def mark_interrupted(self) -> None:
        """Record in result.json that the run ends at once, without a checkpoint."""
        if self.rank.is_main:
            self.run.mark_ended("interrupted")

    def end_with_others(self, failure: Failure) -> None:
        """Record the failure of another rank. The watch ends this process afterwards."""
        self.record(failure, f"ending, because another rank failed: {failure}\n")
        if self.rank.is_main:
            print(f"paceline: {'' if failure.refused else 'training failed: '}{failure}", file=sys.stderr, flush=True)


def train(config: TrainConfig, run: RunDir, console: Console, resume_from: Path | None = None) -> dict[str, Any]:
    """Train until `max_iterations`, Ctrl-C or a failure. Return the content of result.json and, as `run`, the directory
    it is in. Under a launcher this is one rank of several, and the main rank's `run` and `resume_from` count.
    """
    config, settings = resolve(config)
    rank = this_rank(config.gpu_ids)
    die_with_launcher()
    tune_torch(rank.device)
    worker = _Worker(rank, run)
    try:
        group = Group(rank, config.timeout_seconds, worker.end_with_others)
    except PeerLostError as error:
        raise TrainingFailedError(str(Failure(rank.index, rank.host, str(error)))) from error
    try:
        return _run(worker, group, config, settings, console, resume_from)
    except RunCompletedError:
        raise
    except _SharedRefusalError as error:
        error.reported = True
        raise
    except UserError as error:
        if group.watch is None:
            raise
        raise _error_of(_refuse_on_all_ranks(error, worker, group.watch)) from error
    except Exception as error:
        raise _error_of(_fail_on_all_ranks(error, worker, group)) from error
    finally:
        group.close()


def _run(
    worker: _Worker,
    group: Group,
    config: TrainConfig,
    settings: Settings,
    console: Console,
    resume_from: Path | None,
) -> dict[str, Any]:
    rank, began = group.rank, time.monotonic()
    launch = merged(group.everyone(this_launch()))
    plan = _agree(group, lambda: make_plan(config, worker.run, resume_from, launch))
    if plan.completed:
        raise RunCompletedError(f"{plan.run.path} has completed before: nothing to do.")
    start = _agree(group, lambda: load_start(plan, config, settings, group.size))
    envs = _agree(group, lambda: _share_envs(settings, start.total_envs, group.size))[rank.index]
    members = _check_ranks_agree(config, group, len(envs))
    warn = partial(console.print, markup=False, soft_wrap=True)
    with ExitStack() as stack:
        run = _agree(group, lambda: stack.enter_context(plan.run.held(plan.is_new, warn)))
        worker.run, worker.holds_directory = run, True
        worker.log = worker_log.begin(rank, group.alone, config.worker_log_dir, run.worker_logs)
        if plan.is_new:
            worker.result = partial(_early_result, config, launch)
        consoles = worker.log.consoles(console)
        for place in consoles:
            _print_header(place, config, settings, group, plan, start, members, run)
        session = Session(config, settings, group, start.total_envs, envs, launch, plan.restarts, began, consoles)
        if start.saved is not None:
            session.restore(start, str(plan.checkpoint))
        # Wait for all ranks: a run exists only if each of them could be built.
        group.everyone(None)
        worker.result, worker.session = session.result, session
        if rank.is_main:
            checkpoint.set_aside_later(run.checkpoints, session.learner.iteration)
            run.write_config(config)
        same_seconds, notice = 0.0 if group.alone else SAME_REQUEST_SECONDS, NOTICE if rank.is_main else ""
        with Interrupts(same_seconds, notice, worker.mark_interrupted) as interrupts:
            session.write_result(run, "running")
            session.loop(run, consoles, interrupts)
            session.save(run)
            status = "completed" if session.learner.iteration >= config.max_iterations else "interrupted"
            result = session.write_result(run, status)
            if status == "interrupted" and under_elastic_agent():
                if group.watch:
                    group.watch.stop()  # the other ranks may end before this one
                interrupts.wait(_SIGNAL_SECONDS)
    return result | {"run": run.path}


def _agree(group: Group, decide: Callable[[], Any]) -> Any:
    """Return on all ranks what the main rank decides; raise its refusal on all ranks."""
    decision = None
    if group.rank.is_main:
        try:
            decision = decide()
        except UserError as error:
            decision = error
    decision = group.from_main(decision)
    if isinstance(decision, UserError):
        raise _SharedRefusalError(str(decision)) from decision
    return decision


def _share_envs(settings: Settings, total_envs: int, ranks: int) -> list[range]:
    """Return the global indices of each rank's envs."""
    if total_envs < ranks:
        raise UserError(f"{total_envs} envs are too few for {ranks} ranks: each needs one")
    found = shares(total_envs, ranks)
    check_samples(settings, min(map(len, found)))
    return found


def _check_ranks_agree(config: TrainConfig, group: Group, num_envs: int) -> list[dict[str, str]]:
    """Return each rank's host, device and number of envs. Raise if versions, settings or code differ between ranks."""
    rank, device = group.rank, group.rank.device
    member = {
        "host": rank.host,
        "device": _describe(device),
        "uuid": gpu_uuid(device) if device.type == "cuda" else "",
        "cores": str(rank.cores),
        "envs": str(num_envs),
    }
    members, prints = zip(*group.everyone((member, fingerprint(config))), strict=True)
    unlike = differences(prints)
    if unlike:
        index, name, theirs, ours = unlike[0]
        more = f" ({len(unlike) - 1} more differences)" if len(unlike) > 1 else ""
        raise _SharedRefusalError(
            f"rank {index} on {members[index]['host']} has {name} {theirs}, the main rank on {members[0]['host']} "
            f"has {ours}: all ranks need the same{more}"
        )
    return list(members)


def _refuse_on_all_ranks(error: UserError, worker: _Worker, watch: Watch) -> Failure:
    """End all ranks because this one refuses its input. Return the failure that was reported first."""
    ignore()  # a launcher that sees another rank end asks this one to
    rank = worker.rank
    failure = watch.report(Failure(rank.index, rank.host, str(error), refused=True))
    worker.record(failure, f"{failure}\n")
    return failure


def _error_of(failure: Failure) -> Exception:
    """Return the exception for a failure that all ranks know of."""
    if not failure.refused:
        return TrainingFailedError(str(failure))
    refusal = UserError(str(failure))
    refusal.reported = True
    return refusal


def _fail_on_all_ranks(error: Exception, worker: _Worker, group: Group) -> Failure:
    """Record the failure of this rank and end all ranks. Return the failure that was reported first."""
    if not group.alone:
        ignore()  # a launcher that sees another rank end asks this one to
    session, log = worker.session, worker.log.path
    if group.alone and worker.holds_directory:
        log = str(worker.run.error_file)
    failure = Failure(group.rank.index, group.rank.host, _cause(error), log)
    if group.watch:
        # A value that became NaN on another rank is reported there.
        infected = (
            isinstance(error, UnusableNumberError)
            and session is not None
            and session.learner.first_non_finite() is None
        )
        failure = group.watch.report(failure, echo=infected or isinstance(error, PeerLostError))
    details = traceback.format_exc()
    if not worker.record(failure, details) and group.alone:
        print(details, file=sys.stderr)
        return replace(failure, log="")
    return failure


def _cause(error: Exception) -> str:
    """Describe an error in one line, with the line of a task's code that raised it."""
    if isinstance(error, (UnusableNumberError, PeerLostError)):
        return str(error)
    installed = str(Path(__file__).parent), sys.prefix, sys.base_prefix
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*installed, "<"))]
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _early_result(config: TrainConfig, launch: LaunchRecord, status: str, cause: str) -> dict[str, Any]:
    """Return result.json's content for a run that failed before its first iteration."""
    told = {"status": status, "cause": cause, "task": config.task, "learner": config.learner, "restarts": 0}
    return told | launch.fields() | {"versions": versions()}


class Session:
    """A run from its start or resume to its end, as one rank sees it."""

    def __init__(
        self,
        config: TrainConfig,
        settings: Settings,
        group: Group,
        total_envs: int,
        envs: range,
        launch: LaunchRecord,
        restarts: int,
        began: float,
        consoles: list[Console],
    ):
        self._began = began
        self.config, self.settings, self.group, self.rank = config, settings, group, group.rank
        self.total_envs, self._launch, self._restarts = total_envs, launch, restarts
        self.worlds = envs
        with _compiling(config, self.rank.device, consoles):
            self.env, self.learner = build(config, group, envs)
        self.steps_per_iteration = total_envs * settings.horizon
        self.episodes = EpisodeMeans()
        self.totals = {"seconds": 0.0, "env_steps": 0, "best_return": -math.inf, "failures": 0, "overflows": 0}
        self._first_iteration, self._saved_iteration = 0, -1
        self._session_seconds = 0.0
        self._board: TensorBoard | None = None

    def restore(self, start: Start, source: str) -> None:
        """Continue from a checkpoint; `source` is its file."""
        with reading(source):
            self._restore(start, source)

    def _restore(self, start: Start, source: str) -> None:
        saved = start.saved
        assert saved is not None
        state = saved["learner"]
        whole_number("iteration", state["iteration"])
        if state["iteration"] >= self.config.max_iterations:
            raise _SharedRefusalError(
                f"the run has done {state['iteration']} iterations already: "
                f"ask for more in all with --max-iterations (now {self.config.max_iterations})"
            )
        state = state | {"envs": cut(state["envs"], self.worlds)}
        fit(self.learner, state, source, changed=start.changed_options)
        if start.new_learning_rate:
            self.learner.set_learning_rate(self.settings.learning_rate)
        self.episodes.load_state(saved["episodes"], self.env.log_names)
        self.totals |= _checked_totals(saved["totals"])
        self._first_iteration = self.learner.iteration

    def loop(self, run: RunDir, consoles: list[Console], interrupts: Interrupts) -> None:
        """Iterate until done or asked to stop; a failure is left to the caller."""
        learner, config = self.learner, self.config
        if config.logger == "tensorboard" and self.rank.is_main:
            self._board = TensorBoard(run.tensorboard, learner.iteration + 1)
        lines = [
            ConsoleProgress(c, learner.iteration, config.max_iterations, self.env.max_episode_steps) for c in consoles
        ]
        news = _News(self.group)
        seconds, loop_started = math.inf, time.monotonic()
        try:
            while learner.iteration < config.max_iterations and not news.stop:
                # Other envs than our own may not restore their state exactly, or not survive an exception in a step.
                cut_in = seconds > PATIENCE_SECONDS and self.group.alone and isinstance(self.env, RobotEnv)
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
                raise UnusableNumberError(self._explain(name, value))
        self.episodes.add(sums)
        self.totals["env_steps"] += self.steps_per_iteration
        values["speed/steps_per_second"] = self.steps_per_iteration / seconds
        return values | {n if "/" in n else f"episode/{n}": mean for n, mean in self.episodes.means().items()}

    def _explain(self, name: str, value: float) -> str:
        """Say why a metric is not finite: because of the task, or else of the settings."""
        found, number = self.learner.first_non_finite(), self.learner.iteration
        if found:
            return f"{found} of iteration {number}: check how the task {self.config.task} computes it"
        rate = flag(self.settings, "learning_rate")
        return (
            f"{name} became {value} in iteration {number}: try a smaller {rate}, or resume from an earlier checkpoint"
        )

    def save(self, run: RunDir) -> None:
        """A checkpoint of the present iteration, unless there is one. The worlds of all ranks come together in it, so
        that any number of ranks can go on from there."""
        if self._saved_iteration == self.learner.iteration:
            return
        self._saved_iteration = self.learner.iteration
        state = self.learner.state()
        parts = self.group.to_main(on_cpu(state["envs"]))
        if parts is None:
            return
        if self._board:
            # What is logged up to here must outlive this process, because a restart begins after it.
            self._board.flush()
        mean_return = self.episodes.means().get("return", -math.inf)
        best = mean_return > self.totals["best_return"]
        self.totals["best_return"] = max(mean_return, self.totals["best_return"])
        totals = self.totals | {"seconds": self.totals["seconds"] + self._session_seconds}
        whole = {
            "num_envs": self.total_envs,
            "learner": state | {"envs": joined(parts)},
            "episodes": self.episodes.state(),
            "totals": totals,
            "settings": asdict(self.settings),
        }
        checkpoint.save(run.checkpoints, self.learner.iteration, whole, self.config.keep_checkpoints, best)

    def steps_per_second(self) -> float:
        """Over this session's iterations, checkpoints and logging included."""
        done = (self.learner.iteration - self._first_iteration) * self.steps_per_iteration
        return done / self._session_seconds if self._session_seconds else 0.0

    def write_result(self, run: RunDir, status: str) -> dict[str, Any]:
        result = self.result(status, None)
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
            "max_length": self.env.max_episode_steps,
            "measures": {n.removeprefix(_MEASURE): mean for n, mean in means.items() if n.startswith(_MEASURE)},
            "failures": self.totals["failures"],
            "overflows": self.totals["overflows"],
            "train_seconds": self.totals["seconds"] + self._session_seconds,
            "wall_seconds": time.monotonic() - self._began,
            "restarts": self._restarts,
            **self._launch.fields(),
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
    """Return a checkpoint's `Session.totals`. Raise ValueError if a value is impossible."""
    counts, numbers = ("env_steps", "failures", "overflows"), {"seconds": 0.0, "best_return": -math.inf}
    for name in counts:
        whole_number(name, totals[name])
    for name, least in numbers.items():
        if type(totals[name]) is not float or not least <= totals[name] < math.inf:
            raise ValueError(f"{name} is {shown(totals[name])}, not a number")
    return {name: totals[name] for name in (*counts, *numbers)}


def _print_header(
    console: Console,
    config: TrainConfig,
    settings: Settings,
    group: Group,
    plan: Plan,
    start: Start,
    members: list[dict[str, str]],
    run: RunDir,
) -> None:
    device, steps = group.rank.device, start.total_envs * settings.horizon
    where = _describe(device) if group.alone else f"{len(members)} rank{'s' if len(members) > 1 else ''}"
    since = f", from iteration {start.iteration}" if start.iteration else ""
    again = f", restart {plan.restarts}" if plan.restarts else ""
    lines = [
        f"[bold]{config.task}[/]: {start.total_envs} envs on {where}, engine {engine_of(config, device)}, "
        f"{config.learner}, seed {config.seed}",
        f"{config.max_iterations} iterations of {steps:,} env steps{since}{again} -> [bold]{escape(str(run.path))}[/]",
    ]
    if not group.alone:
        lines += _describe_ranks(members)
        batch = steps // settings.minibatches
        lines.append(f"  {batch:,} samples of all ranks in each update, over {group.backend}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _describe_ranks(members: list[dict[str, str]]) -> list[str]:
    """Return one line for each sequence of ranks that are alike."""
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
        lines.append(f"  {ranks} on {member['host']}: {member['device']}, {member['envs']} envs{each}{shared}")
        first = index
    return lines


@contextmanager
def _compiling(config: TrainConfig, device: torch.device, consoles: list[Console]) -> Iterator[None]:
    """Print what is compiled while the envs and the learner are built, and how long it took. The C engine compiles
    nothing."""
    if engine_of(config, device) != "warp":
        yield
        return
    started = time.monotonic()
    for console in consoles:
        console.print("Compiling MuJoCo Warp's kernels for this model: up to two minutes, once for each cache.")
    yield
    for console in consoles:
        console.print(
            f"Envs and networks built in {time.monotonic() - started:.0f} s. The first iteration compiles the policy "
            "and the update, the second records their CUDA graphs.",
            soft_wrap=True,
        )


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
