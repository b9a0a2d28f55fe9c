"""State in words what a comparison shows: whether more ranks helped, what limits them, and what to try."""

from dataclasses import dataclass

from paceline.errors import counted
from paceline.experiments.formatting import duration, listed, number, percent
from paceline.experiments.statistics import LEAST_SHARE, Comparison, GroupResult, Interval, TargetTime

_GOOD_EFFICIENCY = 0.9
# A slowest rank that needs more than this ratio of the fastest rank's time delays the others.
_UNEVEN = 1.25
_LOSSES = ("loss/value", "loss/surrogate")


@dataclass(frozen=True)
class Finding:
    """Statements about one topic."""

    topic: str
    statements: list[str]


def findings(comparison: Comparison) -> list[Finding]:
    """Return all statements that the data support."""
    groups = comparison.groups
    # The limits of the groups with the most ranks matter most.
    largest = max(groups, key=lambda group: (group.world_size, group.total_envs))
    scaled = sorted((group for group in groups if group.baseline), key=lambda group: -group.world_size)
    found = [
        Finding("Did more ranks help?", [_speedup(comparison, group) for group in scaled]),
        Finding("Emulated ranks", _emulation(comparison)),
        Finding("Time to the same return", _target(comparison)),
        Finding("What limits the speed", [] if comparison.is_emulated else _limits(comparison, largest)),
        Finding("What to try", [] if comparison.is_emulated else _advice(comparison, largest)),
        Finding("Final return", _final(comparison, "return", {g.label: g.final_return for g in groups})),
        Finding("Final success", _final(comparison, "success", {g.label: g.final_success for g in groups})),
        Finding("Variance of the loss", [text for name in _LOSSES for text in _loss(comparison, name)]),
    ]
    return [finding for finding in found if finding.statements]


def _speedup(comparison: Comparison, group: GroupResult) -> str:
    """Compare a group with its baseline, for example "Yes: 2 ranks run 900 env steps/s, ..."."""
    baseline = group.baseline
    assert baseline
    base = comparison.group(baseline.label)
    if baseline.kind == "vertical":
        ratio, own, other = baseline.time_ratio, group.seconds_to_common_steps, base.seconds_to_common_steps
        text = (
            f"With {group.label}, {comparison.common_env_steps:,} env steps take {duration(own.mean)}, with "
            f"{base.label} {duration(other.mean)}: {ratio:.2f} times as fast, with the same number of envs in total"
        )
    else:
        ratio, own, other = baseline.speedup, group.steps_per_second, base.steps_per_second
        envs = counted(f"{group.total_envs:,}", "env")
        envs = "the same number of envs per rank" if baseline.kind == "horizontal" else envs
        text = (
            f"With {group.label}, training runs {number(own.mean)} env steps per second, with {base.label} "
            f"{number(other.mean)}: {ratio:.2f} times as fast, with {envs}"
        )
    overlap = own.overlaps(other)
    verdict = {
        None: "Measured with one run per group",
        True: "No difference beyond the variation between runs",
        False: "Yes",
    }[overlap]
    verdict = "No" if overlap is False and ratio < 1 else verdict
    return f"{verdict}. {text} (efficiency of the throughput {baseline.efficiency:.2f})."


def _emulation(comparison: Comparison) -> list[str]:
    if not comparison.is_emulated:
        return []
    return [
        "The learning curve of k ranks was measured with one rank and k times the envs, which computes the same "
        "updates.",
        "The throughput is that of one rank, so neither efficiency nor training times are compared. "
        "The command paceline scale forecast predicts them.",
    ]


def _target(comparison: Comparison) -> list[str]:
    target = comparison.target
    if target is None:
        return ["The last returns are not above the first ones, so no time to a return is compared."]
    reached = [
        f"{_effort(group.target, comparison.is_emulated)} ({group.label}{_some(group)})"
        for group in comparison.groups
        if group.target and group.target.reached
    ]
    missed = [group.label for group in comparison.groups if group.target and not group.target.reached]
    texts = [f"A mean return of {number(target.value)} was first reached after {listed(reached)}."] if reached else []
    if missed:
        texts.append(f"A mean return of {number(target.value)} was not reached with {listed(missed)}.")
    return [*texts, target.source]


def _effort(target: TargetTime, is_emulated: bool) -> str:
    """Return the time to the target. That of emulated ranks is unknown, so their iterations are returned."""
    assert target.seconds
    assert target.iterations
    return counted(number(target.iterations.mean), "iteration") if is_emulated else duration(target.seconds.mean)


def _some(group: GroupResult) -> str:
    runs, reached = len(group.seeds), group.target.reached if group.target else 0
    return "" if reached == runs else f", {reached} of {runs} runs"


def _limits(comparison: Comparison, group: GroupResult) -> list[str]:
    parts, total = group.seconds_by_part(), group.iteration_seconds
    names = sorted(parts, key=lambda name: parts[name], reverse=True)
    shares = [
        f"{percent(parts[name] / total)} {_part(name, group)}" for name in names if parts[name] >= LEAST_SHARE * total
    ]
    texts = [
        f"With {group.label}, an iteration takes {duration(total)}: {listed(shares)}.",
        f"The largest part is the {_part(names[0], group)}.",
    ]
    if group.sync_share is None:
        texts.append("Synchronization was not measured: it is part of a CUDA graph, in the update.")
    if group.has_cameras and group.rendering_seconds is None:
        texts.append("Rendering was not measured: it is part of the collection.")
    lost = _lost(comparison, group)
    if lost and group.baseline:
        worst = max(lost, key=lambda name: lost[name])
        texts.append(
            f"Compared with ideal scaling of {group.baseline.label}, {duration(lost[worst])} per iteration are lost in "
            f"the {_part(worst, group)}."
        )
    return texts


def _part(name: str, group: GroupResult) -> str:
    """Return the name of a part of an iteration in a sentence."""
    rendering = ", rendering" if group.has_cameras else ""
    return {
        "collect": f"collection (physics, policy{rendering})",
        "physics": "physics",
        "rendering": "rendering",
        "policy": "policy (actions, rewards, observations)",
        "update": "update" if group.sync_share is not None else "update with synchronization",
        "synchronization": "synchronization (with the wait for slower ranks)",
        "other": "other work (metrics, logging)",
    }[name]


def _lost(comparison: Comparison, group: GroupResult) -> dict[str, float]:
    """Return the seconds per iteration that each part takes beyond ideal scaling; empty if the efficiency is good."""
    if not group.baseline or group.baseline.efficiency >= _GOOD_EFFICIENCY:
        return {}
    base = comparison.group(group.baseline.label)
    # The samples per rank determine the ideal time.
    ideal = (group.total_envs / group.world_size) / (base.total_envs / base.world_size)
    lost = {name: seconds - ideal * base.seconds_by_part()[name] for name, seconds in group.seconds_by_part().items()}
    return {name: seconds for name, seconds in lost.items() if seconds > 0}


def _advice(comparison: Comparison, group: GroupResult) -> list[str]:
    collect = group.collect_seconds
    texts = list[str]()
    if collect.max > _UNEVEN * collect.min:
        texts.append(
            f"With {group.label}, the slowest rank collects {collect.max / collect.min:.2f} times as long as the "
            "fastest. Check its host for other processes."
        )
    lost = _lost(comparison, group)
    parts = lost or group.seconds_by_part()
    part = max(parts, key=lambda name: parts[name])
    if part == "synchronization":
        texts.append(_sync_advice(group))
    elif part == "collect" and group.has_cameras and not lost:
        texts.append(f"Collection includes rendering. {_ADVICE['rendering']}")
    else:
        texts.append((_SCALING_ADVICE if lost else _ADVICE)[part])
    return texts


def _sync_advice(group: GroupResult) -> str:
    """Return what reduces the synchronization, which depends on `--sync`. Only native PPO has its other modes."""
    if group.sync == "periodic":
        return "Ranks synchronize rarely: use a larger --sync-every, or a faster network."
    if group.sync == "every-iteration":
        return "Each iteration needs one exchange: use more envs per rank, a faster network, or --sync periodic."
    other = ", a faster network, or --sync every-iteration" if group.learner == "ppo" else ", or a faster network"
    return f"Each minibatch needs one all-reduce: use more envs per rank, fewer minibatches{other}."


_SHARED_MACHINE = (
    "Ranks on one machine share its cores and memory bandwidth: give each rank its own cores or GPU, or use fewer "
    "ranks with more envs each. A GPU needs thousands of envs to be busy."
)
_SCALING_ADVICE = {
    **dict.fromkeys(("collect", "physics", "rendering", "policy"), _SHARED_MACHINE),
    "update": "The update has a fixed cost per minibatch: use more envs per rank, or fewer and larger minibatches.",
    "other": "Metrics and logging do not scale: use more envs per rank, so that iterations are longer.",
}
_ADVICE = {
    "collect": "Collection needs no exchange between ranks: more ranks, or more cores per rank, shorten it.",
    "physics": "Physics needs no exchange between ranks: more ranks, more cores per rank or a GPU shorten it.",
    "rendering": "Lower the resolution of the cameras, or render less often. More ranks divide it.",
    "policy": "The policy acts in each control step: a smaller network, or a larger decimation, shortens it.",
    "update": "More ranks divide the update; fewer epochs or smaller networks shorten it on every rank.",
    "other": _SCALING_ADVICE["other"],
}


def _final(comparison: Comparison, name: str, values: dict[str, Interval | None]) -> list[str]:
    known = {label: value for label, value in values.items() if value}
    if not known:
        return []
    texts = [f"The final {name} is {_listed_means(known)}."]
    if len({group.task for group in comparison.groups}) > 1:
        return [*texts, "The runs have different tasks, so their values are not compared."]
    final = comparison.final_values
    origin = (
        "These are means of evaluations (paceline eval) after the last iteration, without exploration noise"
        if final.evaluated
        else "These are means over the last tenth of the iterations, with exploration noise"
    )
    intervals = {
        "seeds": "intervals are over seeds",
        "evaluation episodes": "intervals are over evaluation episodes and do not include the variation between seeds",
        "none": "there are no intervals, because there is one run per group, and not every run has an evaluation",
    }
    return [*texts, *_differences(f"the final {name}", known), f"{origin}; {intervals[final.intervals]}."]


def _loss(comparison: Comparison, name: str) -> list[str]:
    values = {group.label: group.losses[name]["std"] for group in comparison.groups if name in group.losses}
    if not values:
        return []
    what = f"the standard deviation of {name}"
    text = f"The standard deviation of {name} over the last third of the iterations is {_listed_means(values)}."
    return [text, *_differences(what, values)]


def _listed_means(values: dict[str, Interval]) -> str:
    if len(values) == 1:
        return number(next(iter(values.values())).mean)
    return listed([f"{number(value.mean)} ({label})" for label, value in values.items()])


def _differences(what: str, values: dict[str, Interval]) -> list[str]:
    """State which values differ from the first one beyond the intervals."""
    (first, reference), *others = values.items()
    found: dict[str, list[str]] = {"higher": [], "lower": [], "same": [], "unknown": []}
    for label, value in others:
        overlap = value.overlaps(reference)
        direction = "higher" if value.mean > reference.mean else "lower"
        found["unknown" if overlap is None else "same" if overlap else direction].append(label)
    texts = [
        f"Beyond the 95 % intervals, {what} is {direction} with {listed(found[direction])} than with {first}."
        for direction in ("higher", "lower")
        if found[direction]
    ]
    if found["same"]:
        texts.append(f"With {listed(found['same'])} it does not differ from {first} beyond the 95 % intervals.")
    if found["unknown"]:
        texts.append(f"No difference from {first} is claimed for {listed(found['unknown'])}: there is no interval.")
    return texts
