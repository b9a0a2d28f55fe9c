"""Compare groups of runs that differ only in their seed: means, confidence intervals, scaling."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isnan, sqrt
from statistics import fmean

import numpy as np

from paceline.experiments.run_data import Array, RunData
from paceline.training.evaluation import student_quantile

RETURN = "episode/return"
SUCCESS_METRICS = ("measure/success", "measure/successes")
"""Metrics of success that tasks have: the fraction of successful episodes, or the number of successes per episode."""
_LIMITS = {"measure/success": (0.0, 1.0), "measure/successes": (0.0, inf)}
STEPS, SECONDS = "progress/env_steps", "progress/train_seconds"
_TARGET_FRACTION = 0.9
_CURVE_POINTS = 400


@dataclass(frozen=True)
class Interval:
    """Mean and its 95 % confidence interval, which is None where there is only one value."""

    mean: float
    low: float | None = None
    high: float | None = None

    def overlaps(self, other: "Interval") -> bool | None:
        """Return whether two intervals overlap; None if one of them is unknown."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return None
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Spread:
    """Minimum, mean and maximum over ranks."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True)
class TargetTime:
    """Effort until the mean return first reached the target, over the runs that reached it."""

    reached: int
    """Number of runs that reached the target."""
    iterations: Interval | None
    env_steps: Interval | None
    seconds: Interval | None


@dataclass(frozen=True)
class Baseline:
    """Comparison of a group with the group of the same settings that has the fewest ranks."""

    label: str
    kind: str
    """horizontal (equal number of envs per rank), vertical (equal number of envs over all ranks) or other."""
    speedup: float
    """Ratio of the env steps per second."""
    efficiency: float
    """Ratio of the env steps per second and rank."""
    time_ratio: float
    """Ratio of the training times until the common number of env steps, baseline / group."""


@dataclass(frozen=True)
class GroupResult:
    """Results of runs that differ only in their seed."""

    label: str
    task: str
    learner: str
    engine: str
    device_name: str
    backend: str
    sync: str
    """Value of `--sync`."""
    world_size: int
    total_envs: int
    seeds: list[int]
    iterations: int
    """Number of iterations that all runs have done."""
    env_steps: int
    has_cameras: bool
    first_return: float
    final_return: Interval
    final_success: Interval | None
    steps_per_second: Interval
    target: TargetTime | None
    seconds_to_common_steps: Interval
    """Training time until the number of env steps that all groups have done."""
    iteration_seconds: float
    collect_seconds: Spread
    update_seconds: Spread
    """Includes the synchronization."""
    sync_seconds: Spread | None
    """None if it was not measured, because it is part of a CUDA graph."""
    render_seconds: float | None
    """Part of the collection in which the main rank renders; None if it was not measured."""
    sync_share: float | None
    """Fraction of the iteration that a rank spends in synchronization, including the wait for slower ranks."""
    losses: dict[str, dict[str, Interval]]
    """Mean and standard deviation ("mean", "std") of each loss over the last third of the iterations."""
    memory_mib: float
    """Maximum over iterations, ranks and runs."""
    baseline: Baseline | None = None

    def seconds_by_part(self) -> dict[str, float]:
        """Return the parts of an iteration, which add up to `iteration_seconds`."""
        sync = self.sync_seconds.mean if self.sync_seconds else 0.0
        collect, update = self.collect_seconds.mean, max(self.update_seconds.mean - sync, 0.0)
        other = max(self.iteration_seconds - collect - update - sync, 0.0)
        render = min(self.render_seconds or 0.0, collect)
        rendering = {} if self.render_seconds is None else {"rendering": render}
        return {"collect": collect - render} | rendering | {"update": update, "synchronization": sync, "other": other}


@dataclass(frozen=True)
class Target:
    """A return whose time is compared."""

    value: float
    source: str
    """Sentence that states how it was chosen."""


@dataclass(frozen=True)
class FinalValues:
    """Origin of final returns and their intervals."""

    evaluated: bool
    """True if they are those of `paceline eval`, otherwise those of the training."""
    intervals: str
    """Values over which the intervals are computed: seeds, evaluation episodes or none."""


@dataclass(frozen=True)
class Comparison:
    """Results of all groups."""

    groups: list[GroupResult]
    target: Target | None
    common_env_steps: int
    """Number of env steps that all runs have done."""
    success_name: str | None
    final_values: FinalValues
    is_emulated: bool
    """True if one rank with more envs stands for several ranks."""

    def group(self, label: str) -> GroupResult:
        return next(group for group in self.groups if group.label == label)


def interval(values: Sequence[float], minimum: float = -inf, maximum: float = inf) -> Interval:
    """Return the mean of one value per run and its 95 % confidence interval by Student's t-distribution, cut at the
    minimum and the maximum that the quantity can have."""
    mean, half = map(float, _mean_and_half(np.array(values, dtype=np.float64)))
    if isnan(half):
        return Interval(mean)
    return Interval(mean, max(mean - half, minimum), min(mean + half, maximum))


def _mean_and_half(values: Array) -> tuple[Array, Array]:
    """Return the mean over the first dimension and half the width of its interval, NaN with one value."""
    mean, count = values.mean(0), len(values)
    if count < 2:
        return mean, np.full_like(mean, np.nan)
    return mean, student_quantile(count - 1) * values.std(0, ddof=1) / sqrt(count)


@dataclass(frozen=True)
class Curve:
    """A metric of a group against iterations, env steps or time."""

    lines: list[tuple[Array, Array]]
    """x and y of each run."""
    x: Array
    mean: Array
    low: Array
    high: Array


def curve(runs: list[RunData], x_name: str, y_name: str, smooth: bool = False) -> Curve | None:
    """Return a metric over its x range that all runs have in common; None if a run has no values.

    The band is the 95 % interval, or the range of two runs, whose interval is too wide to be of use. With `smooth`,
    the mean and the band are those of moving averages over a twentieth of the iterations.
    """
    lines = [_line(run, x_name, y_name) for run in runs]
    if any(len(x) == 0 for x, _ in lines):
        return None
    first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    x = np.linspace(first, max(first, last), _CURVE_POINTS)
    rows = np.stack([np.interp(x, line[0], _moving_average(line[1]) if smooth else line[1]) for line in lines])
    mean, half = _mean_and_half(rows)
    if len(runs) == 2:
        return Curve(lines, x, mean, rows.min(0), rows.max(0))
    return Curve(lines, x, mean, mean - half, mean + half)


def _moving_average(values: Array) -> Array:
    """Return averages over a centered window of a twentieth of the values, which is shorter at both ends."""
    window = np.ones(max(len(values) // 20, 1))
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def _line(run: RunData, x_name: str, y_name: str) -> tuple[Array, Array]:
    """Return the iterations in which both metrics have a value."""
    missing = np.array([], dtype=np.float64)
    if x_name not in run.metrics or y_name not in run.metrics:
        return missing, missing
    x, y = run.metrics[x_name], run.metrics[y_name]
    both = ~np.isnan(x) & ~np.isnan(y)
    return x[both], y[both]


def compare(groups: dict[str, list[RunData]], target_return: float | None, is_emulated: bool) -> Comparison:
    """Compute the results of all groups. `target_return` is the return whose time is compared; None chooses it."""
    runs = [run for group in groups.values() for run in group]
    success = next((name for name in SUCCESS_METRICS if all(name in run.metrics for run in runs)), None)
    names = [_estimate_name(name) for name in (RETURN, success) if name]
    evaluated = all(run.evaluation and all(name in run.evaluation.estimates for name in names) for run in runs)
    has_seeds = any(len(group) > 1 for group in groups.values())
    final = FinalValues(evaluated, "seeds" if has_seeds else "evaluation episodes" if evaluated else "none")
    common_steps = int(min(run.metrics[STEPS][-1] for run in runs))
    results = [_group_result(label, group, common_steps, success, final) for label, group in groups.items()]
    target = _target(groups, target_return)
    results = [_with_target(result, groups[result.label], target) for result in results]
    if not is_emulated:
        families = {label: _family(group[0]) for label, group in groups.items()}
        results = [_with_baseline(result, results, families) for result in results]
    return Comparison(
        groups=results,
        target=target,
        common_env_steps=common_steps,
        success_name=success.removeprefix("measure/") if success else None,
        final_values=final,
        is_emulated=is_emulated,
    )


def _group_result(
    label: str, runs: list[RunData], common_steps: int, success: str | None, final: FinalValues
) -> GroupResult:
    facts, config = runs[0].facts, runs[0].config
    collect, update, sync = (_spread(runs, f"seconds/{name}") for name in ("collect", "update", "sync"))
    seconds = [_iteration_seconds(run) for run in runs]
    iteration_seconds = max(fmean(seconds), collect.mean + update.mean)
    rendering = [of_run for run in runs if (of_run := run.render_seconds()) is not None]
    is_measured = facts.backend != "nccl"
    losses = {name for name in runs[0].metrics if name.startswith("loss/") and all(name in run.metrics for run in runs)}
    return GroupResult(
        label=label,
        task=config.task,
        learner=config.learner,
        engine=facts.engine,
        device_name=facts.device_name,
        backend=facts.backend,
        sync=config.sync,
        world_size=facts.world_size,
        total_envs=facts.total_envs,
        seeds=[run.config.seed for run in runs],
        iterations=min(run.iterations for run in runs),
        env_steps=int(min(run.metrics[STEPS][-1] for run in runs)),
        has_cameras=runs[0].has_cameras(),
        first_return=fmean([_first(run.metrics[RETURN]) for run in runs]),
        final_return=_final(runs, RETURN, final),
        final_success=_final(runs, success, final) if success else None,
        steps_per_second=interval(
            [run.facts.steps_per_iteration / of_run for run, of_run in zip(runs, seconds, strict=True)], minimum=0.0
        ),
        target=None,
        seconds_to_common_steps=interval([_at(run, common_steps) for run in runs], minimum=0.0),
        iteration_seconds=iteration_seconds,
        collect_seconds=collect,
        update_seconds=update,
        sync_seconds=sync if is_measured else None,
        render_seconds=fmean(rendering) if rendering else None,
        sync_share=sync.mean / iteration_seconds if is_measured else None,
        losses={name: _loss(runs, name) for name in sorted(losses)},
        memory_mib=max(float(np.nanmax(run.over_ranks("memory/used_mib")["max"])) for run in runs),
    )


def _iteration_seconds(run: RunData) -> float:
    return float((run.facts.steps_per_iteration / run.steady(run.metrics["speed/steps_per_second"])).mean())


def _spread(runs: list[RunData], name: str) -> Spread:
    kinds = [{kind: float(run.steady(values).mean()) for kind, values in run.over_ranks(name).items()} for run in runs]
    return Spread(**{kind: fmean([of_run[kind] for of_run in kinds]) for kind in ("min", "mean", "max")})


def _first(values: Array) -> float:
    return float(values[~np.isnan(values)][0])


def _final(runs: list[RunData], metric: str, final: FinalValues) -> Interval:
    """Return the final value: that of the evaluation, or the mean over the last tenth of the iterations."""
    limits = _LIMITS.get(metric, (-inf, inf))
    if not final.evaluated:
        return interval([_last_tenth(run, metric) for run in runs], *limits)
    estimates = [run.evaluation.estimates[_estimate_name(metric)] for run in runs if run.evaluation]
    if final.intervals == "evaluation episodes":
        return Interval(estimates[0].mean, estimates[0].low, estimates[0].high)
    return interval([each.mean for each in estimates], *limits)


def _estimate_name(metric: str) -> str:
    """Return the name of a metric in evaluations."""
    return metric.removeprefix("episode/")


def _last_tenth(run: RunData, metric: str) -> float:
    """Return the mean of a metric over the last tenth of the iterations."""
    return float(_last(run.metrics[metric], 10).mean())


def _last(values: Array, divisor: int) -> Array:
    """Return the last values, 1 / `divisor` of all, rounded up."""
    known = values[~np.isnan(values)]
    return known[-ceil(len(known) / divisor) :]


def _loss(runs: list[RunData], name: str) -> dict[str, Interval]:
    last = [_last(run.metrics[name], 3) for run in runs]
    return {
        "mean": interval([float(values.mean()) for values in last]),
        "std": interval([float(values.std()) for values in last], minimum=0.0),
    }


def _at(run: RunData, steps: float) -> float:
    """Return the training time until a number of env steps, which is at most that of the run."""
    return float(np.interp(steps, *_line(run, STEPS, SECONDS)))


def _target(groups: dict[str, list[RunData]], value: float | None) -> Target | None:
    """Return the target: the given one, or 90 % of the way from the first return to the lowest last one. Both are
    returns of the training, with which the target is compared, also if there are evaluations."""
    if value is not None:
        return Target(value, "The target was given.")
    first = fmean(fmean(_first(run.metrics[RETURN]) for run in runs) for runs in groups.values())
    lowest = min(fmean(_last_tenth(run, RETURN) for run in runs) for runs in groups.values())
    if lowest <= first:
        return None
    return Target(
        first + _TARGET_FRACTION * (lowest - first),
        "The target is 90 % of the way from the mean first return to the lowest mean return of a group in the last "
        "tenth of its iterations.",
    )


def _with_target(result: GroupResult, runs: list[RunData], target: Target | None) -> GroupResult:
    if target is None:
        return result
    first = [(run, np.flatnonzero(run.metrics[RETURN] >= target.value)) for run in runs]
    reached = [(run, places[0]) for run, places in first if len(places)]

    def until(name: str) -> Interval | None:
        return interval([float(run.metrics[name][place]) for run, place in reached], minimum=0.0) if reached else None

    return replace(result, target=TargetTime(len(reached), until("iteration"), until(STEPS), until(SECONDS)))


def _family(run: RunData) -> tuple[str, str]:
    """Return what runs have in common whose numbers of ranks are compared."""
    options = {name: value for name, value in run.options().items() if name != "max_iterations"}
    return repr(options), run.facts.device_name


def _with_baseline(
    result: GroupResult, results: list[GroupResult], families: dict[str, tuple[str, str]]
) -> GroupResult:
    relatives = [other for other in results if families[other.label] == families[result.label]]
    base = min(relatives, key=lambda other: (other.world_size, other.total_envs != result.total_envs))
    if base.world_size == result.world_size:
        return result
    ranks = result.world_size / base.world_size
    speedup = result.steps_per_second.mean / base.steps_per_second.mean
    kinds = {1.0: "vertical", ranks: "horizontal"}
    return replace(
        result,
        baseline=Baseline(
            label=base.label,
            kind=kinds.get(result.total_envs / base.total_envs, "other"),
            speedup=speedup,
            efficiency=speedup / ranks,
            time_ratio=base.seconds_to_common_steps.mean / result.seconds_to_common_steps.mean,
        ),
    )
