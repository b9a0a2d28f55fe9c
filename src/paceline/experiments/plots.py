"""Plots of a comparison, as PNG images."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import ceil

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter, ScalarFormatter

from paceline.experiments.curves import curve
from paceline.experiments.forecast import Scaling
from paceline.experiments.formatting import duration, number, percent, scaled_duration
from paceline.experiments.run_data import RunData
from paceline.experiments.statistics import (
    LEAST_SHARE,
    RETURN,
    SECONDS,
    STEPS,
    SUCCESS_METRICS,
    Comparison,
    GroupResult,
    Interval,
)

# The colors of Okabe and Ito, which color-blind readers can tell apart; yellow is too light for lines.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_PARTS = {
    "collect": ("#0072B2", ""),
    "physics": ("#0072B2", ""),
    "rendering": ("#009E73", "\\\\"),
    "policy": ("#56B4E9", "--"),
    "update": ("#E69F00", "//"),
    "synchronization": ("#D55E00", "xx"),
    "other": ("#BBBBBB", ".."),
}
_INK, _GRID = "#333333", "#DDDDDD"
_WIDTH, _DPI = 4.8, 220
_MOST_MARKERS = 10
_LEARNING, _SPEED, _LOSSES = "Learning", "Speed and scaling", "Losses"
_BANDS = {
    1: "One run per line.",
    2: "Thick lines are means over runs, thin lines the runs, bands their range (95 % intervals need three runs).",
    3: "Thick lines are means over runs, thin lines the runs, bands the 95 % intervals over runs.",
}
_CUT = "Whiskers are 95 % intervals over runs, cut at the end of the axis."
_X_AXES = {"iteration": "iterations", STEPS: "env steps", SECONDS: "training time"}


@dataclass(frozen=True)
class Plot:
    """A plot as a PNG image."""

    name: str
    """Name of the file, without extension."""
    section: str
    title: str
    caption: str
    png: bytes


def draw(groups: dict[str, list[RunData]], comparison: Comparison) -> list[Plot]:
    """Return all plots that the data allow."""
    target = comparison.target.value if comparison.target else None
    # One rank that stands for several ranks needs another time than they do.
    x_axes = [name for name in _X_AXES if name != SECONDS or not comparison.is_emulated]
    plots = [_curves(groups, RETURN, x, _LEARNING, "Return", "mean episode return", target) for x in x_axes]
    for name, label in zip(SUCCESS_METRICS, ("successful episodes", "successes per episode"), strict=True):
        plots += [_curves(groups, name, x, _LEARNING, "Success", label) for x in x_axes]
    # The result of a single evaluation is in the table.
    if any(np.sum(~np.isnan(run.metrics.get("eval/return", np.nan))) > 1 for runs in groups.values() for run in runs):
        title = "Return without exploration noise"
        plots.append(_curves(groups, "eval/return", STEPS, _LEARNING, title, "mean episode return"))
    plots += [
        _throughput(comparison),
        _efficiency(comparison),
        _time_to_target(comparison),
        *([] if comparison.is_emulated else [_iteration_parts(comparison), _rank_spread(comparison)]),
    ]
    losses = sorted({name for group in comparison.groups for name in group.losses}, reverse=True)
    plots += [_curves(groups, name, "iteration", _LOSSES, name, name, is_loss=True) for name in losses]
    plots += [_loss_std(comparison, name) for name in losses]
    return [plot for plot in [*plots, _memory(comparison)] if plot]


def _curves(
    groups: dict[str, list[RunData]],
    metric: str,
    x_metric: str,
    section: str,
    title: str,
    y_label: str,
    target: float | None = None,
    is_loss: bool = False,
) -> Plot | None:
    """Plot a metric of all groups against iterations, env steps or time. None if no group has it."""
    curves = {label: found for label, runs in groups.items() if (found := curve(runs, x_metric, metric, is_loss))}
    if not curves:
        return None
    labels = [textwrap.fill(label, 50) for label in curves]
    labels += [] if target is None else [f"target {number(target)}"]
    longest_label = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, min(len(labels), 64 // (longest_label + 6)))
    # The legend is below the axes, which keep their height.
    lines = sum(label.count("\n") + 1 for label in labels)
    figure, axes = _figure(3.3 + 0.2 * ceil(lines / columns))
    x_label, x_scale = _X_AXES[x_metric], 1.0
    if x_metric == SECONDS:
        longest = max(float(x[-1]) for found in curves.values() for x, _ in found.lines)
        value, unit = scaled_duration(longest)
        x_label, x_scale = f"training time, {unit}", value / longest
    for index, found in enumerate(curves.values()):
        color, style = _COLORS[index % len(_COLORS)], _STYLES[index % len(_STYLES)]
        if len(found.lines) > 1:
            axes.fill_between(found.x * x_scale, found.low, found.high, color=color, alpha=0.15, linewidth=0)
        for x, y in found.lines:
            # A single evaluation is a point, which a line does not show.
            marker = "o" if len(x) <= _MOST_MARKERS else None
            axes.plot(x * x_scale, y, color=color, linewidth=0.6, alpha=0.45, marker=marker, markersize=4)
        axes.plot(found.x * x_scale, found.mean, color=color, linestyle=style, linewidth=1.9, label=labels[index])
    if target is not None:
        axes.axhline(target, color=_INK, linewidth=0.9, linestyle=(0, (1, 2)), label=labels[-1])
    # Intervals of few seeds are wide: the lines decide the range.
    values = np.concatenate([y for found in curves.values() for _, y in found.lines])
    values = values if target is None else np.append(values, target)
    low, high = np.percentile(values, (1, 99)) if is_loss else (values.min(), values.max())
    margin = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if x_metric != SECONDS:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if metric == "measure/success":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend(figure, columns)
    caption = _BANDS[min(max(len(found.lines) for found in curves.values()), 3)]
    if is_loss:
        caption += " Means are smoothed over a twentieth of the iterations. The axis covers 98 % of the values."
    x_name = _X_AXES[x_metric]
    name = f"{title} {x_name}".lower().replace("/", "_").replace(" ", "_")
    return _plot(figure, name, section, f"{title} against {x_name}", caption)


def _throughput(comparison: Comparison) -> Plot:
    figure, axes = _bars(comparison, comparison.groups, lambda group: group.steps_per_second, _short)
    axes.set_xlabel("env steps per second, all ranks")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    caption = "Mean over iterations without the first two of a session, which compile."
    if comparison.is_emulated:
        caption += " All groups are one rank with more envs: this is not the throughput of several ranks."
    return _plot(figure, "throughput", _SPEED, "Throughput", f"{caption} {_CUT}")


def _efficiency(comparison: Comparison) -> Plot | None:
    bases = {group.baseline.label for group in comparison.groups if group.baseline}
    groups = [group for group in comparison.groups if group.baseline or group.label in bases]
    if not groups:
        return None
    figure, axes = _bars(
        comparison, groups, lambda group: Interval(group.baseline.efficiency if group.baseline else 1.0), _ratio
    )
    axes.axvline(1.0, color=_INK, linewidth=1.0, linestyle="--")
    axes.set_xlabel("efficiency, 1 is ideal")
    caption = (
        "Env steps per second and rank, relative to the smallest number of ranks. The dashed line is ideal scaling."
    )
    return _plot(figure, "efficiency", _SPEED, "Scaling efficiency", caption)


def _time_to_target(comparison: Comparison) -> Plot | None:
    target = comparison.target
    if target is None:
        return None
    if comparison.is_emulated:
        figure, axes = _bars(
            comparison, comparison.groups, lambda group: group.target and group.target.iterations, number
        )
        axes.set_xlabel("iterations")
        title = f"Iterations to a return of {number(target.value)}"
    else:
        figure, axes = _bars(
            comparison, comparison.groups, lambda group: group.target and group.target.seconds, duration
        )
        axes.set_xlabel("training time, s")
        title = f"Time to a return of {number(target.value)}"
    caption = f"Until the mean return of a run first reached the target. {target.source} {_CUT}"
    return _plot(figure, "time_to_return", _SPEED, title, caption)


def _iteration_parts(comparison: Comparison) -> Plot:
    groups = comparison.groups
    figure, axes = _figure(_bar_height(groups) + 0.3)
    left = np.zeros(len(groups))
    for part, (color, hatch) in _PARTS.items():
        shares = np.array([group.seconds_by_part().get(part, 0.0) / group.iteration_seconds for group in groups])
        if shares.max() < LEAST_SHARE:
            continue
        axes.barh(range(len(groups)), shares, 0.6, left, color=color, hatch=hatch, edgecolor="white", label=part)
        left += shares
    for row, group in enumerate(groups):
        sync = "not measured" if group.sync_share is None else percent(group.sync_share)
        sync = f"\n sync. {sync}" if group.world_size > 1 else ""
        axes.annotate(f" {duration(group.iteration_seconds)}{sync}", (left[row], row), va="center", fontsize=8)
    axes.set_xlim(0, 1.3)
    axes.set_xticks(np.linspace(0, 1, 6))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the time of an iteration")
    _label_rows(axes, groups)
    _legend(figure, 3)
    caption = "Mean over ranks. Synchronization includes the wait for slower ranks."
    if any(group.physics_seconds is not None for group in groups):
        caption += " Physics and rendering are those of the main rank."
    if any(group.sync_share is None for group in groups):
        caption += " Not measured: part of a CUDA graph, in the update."
    return _plot(figure, "iteration_parts", _SPEED, "Share of synchronization and other parts", caption)


def _rank_spread(comparison: Comparison) -> Plot:
    groups = comparison.groups
    figure, axes = _figure(_bar_height(groups) + 0.3)
    for offset, part, marker in ((-0.15, "collect", "o"), (0.15, "update", "s")):
        spreads = [group.collect_seconds if part == "collect" else group.update_seconds for group in groups]
        means = np.array([spread.mean for spread in spreads])
        extent = np.abs(np.array([(spread.mean - spread.min, spread.max - spread.mean) for spread in spreads]).T)
        rows, color = np.arange(len(groups)) + offset, _PARTS[part][0]
        axes.errorbar(means, rows, xerr=extent, fmt=marker, color=color, capsize=4, label=f"{part}: min, mean, max")
    axes.set_xlim(left=0)
    axes.set_xlabel("time per iteration, s")
    _label_rows(axes, groups)
    _legend(figure, 2)
    caption = "Minimum, mean and maximum over ranks; the update includes synchronization."
    return _plot(figure, "rank_spread", _SPEED, "Timing spread over ranks", caption)


def _loss_std(comparison: Comparison, name: str) -> Plot:
    groups = [group for group in comparison.groups if name in group.losses]
    figure, axes = _bars(comparison, groups, lambda group: group.losses[name]["std"], number)
    axes.set_xlabel(f"standard deviation of {name}")
    caption = f"Over the last third of the iterations, mean over seeds. {_CUT}"
    return _plot(figure, f"{name.replace('/', '_')}_std", _LOSSES, f"Variation of {name}", caption)


def _memory(comparison: Comparison) -> Plot:
    figure, axes = _bars(
        comparison, comparison.groups, lambda group: Interval(group.memory_mib / 1024), lambda gib: f"{gib:.3g} GiB"
    )
    axes.set_xlabel("memory of the largest rank, GiB")
    caption = "On GPUs the used memory of the GPU, by all processes; on CPUs the resident memory of the process."
    return _plot(figure, "memory", "Memory", "Memory per rank", caption)


def draw_forecast(scalings: Sequence[Scaling]) -> list[Plot]:
    """Return the plots of forecast throughput and efficiency against the number of ranks."""
    plots = []
    for name, y_label in (("throughput", "env steps per second, all ranks"), ("efficiency", "efficiency, 1 is ideal")):
        figure, axes = _figure(3.8)
        for index, scaling in enumerate(scalings):
            ranks = [each.ranks for each in scaling.predictions]
            color, style = _COLORS[index % len(_COLORS)], _STYLES[index % len(_STYLES)]
            by_name = {
                "throughput": [each.steps_per_second for each in scaling.predictions],
                "efficiency": [scaling.efficiency(each) for each in scaling.predictions],
            }
            topology = "hierarchical" if scaling.network.within_node else "flat"
            label = f"{scaling.kind} scaling, {topology} network"
            axes.plot(ranks, by_name[name], color=color, linestyle=style, marker="o", markersize=3, label=label)
        first, most = scalings[0].predictions[0], max(each.predictions[-1].ranks for each in scalings)
        ideal = [first.steps_per_second, most * first.steps_per_second] if name == "throughput" else [1.0, 1.0]
        axes.plot([1, most], ideal, color=_INK, linewidth=1.0, linestyle="--", label="ideal")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("ranks")
        axes.set_ylabel(y_label)
        if name == "throughput":
            axes.set_yscale("log", base=10)
        else:
            axes.set_ylim(0, 1.08)
        _legend(figure, 2)
        title = f"Forecast {name}"
        caption = "Forecast, not measured, from the parts of an iteration on one rank and the figures of the network."
        plots.append(_plot(figure, f"forecast_{name}", "Forecast", title, caption))
    return plots


def _bars(
    comparison: Comparison,
    groups: list[GroupResult],
    value: Callable[[GroupResult], Interval | None],
    show: Callable[[float], str],
) -> tuple[Figure, Axes]:
    """Plot one bar per group, with its value and the whiskers of its interval."""
    figure, axes = _figure(_bar_height(groups))
    values = [value(group) for group in groups]
    longest = max((found.mean for found in values if found), default=1.0) or 1.0
    for row, found in enumerate(values):
        if found is None:
            axes.annotate(" not reached", (0, row), va="center")
            continue
        color = _COLORS[comparison.groups.index(groups[row]) % len(_COLORS)]
        axes.barh(row, found.mean, 0.6, color=color, alpha=0.65)
        if found.low is not None and found.high is not None:
            axes.errorbar(
                found.mean, row, xerr=[[found.mean - found.low], [found.high - found.mean]], color=_INK, capsize=4
            )
        axes.annotate(f" {show(found.mean)}", (1, row), xycoords=("axes fraction", "data"), va="center")
    axes.set_xlim(0, 1.15 * longest)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    _label_rows(axes, groups)
    return figure, axes


def _row_label(group: GroupResult) -> str:
    return textwrap.fill(group.label, 24)


def _bar_height(groups: list[GroupResult]) -> float:
    """Return the height of a figure with one row per group, inches. Labels of several lines do not overlap."""
    lines = max(_row_label(group).count("\n") + 1 for group in groups)
    return 1.4 + max(0.45, 0.18 * lines + 0.08) * max(len(groups), 2)


def _label_rows(axes: Axes, groups: list[GroupResult]) -> None:
    axes.set_yticks(range(len(groups)), [_row_label(group) for group in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def _short(value: float) -> str:
    return EngFormatter(places=1, sep="")(value)


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure, columns: int) -> None:
    figure.legend(
        loc="outside lower center", ncols=columns, frameon=False, fontsize=9, handlelength=1.8, columnspacing=1.2
    )


def _plot(figure: Figure, name: str, section: str, title: str, caption: str) -> Plot:
    # At the left edge of the figure, because long labels of rows leave little room above the axes.
    figure.suptitle(textwrap.fill(title, 48), x=0.02, horizontalalignment="left", fontsize=11, fontweight="bold")
    png = BytesIO()
    figure.savefig(png, format="png")
    return Plot(name, section, title, caption, png.getvalue())
