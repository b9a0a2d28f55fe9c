"""Reports: statistics with known answers, and the page of real runs in a browser."""

import io
import json
import sys
from contextlib import redirect_stdout
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from paceline.cli.report import report as report_command
from paceline.errors import UserError
from paceline.experiments.curves import curve
from paceline.experiments.findings import findings
from paceline.experiments.report import group_runs, print_findings, write_report
from paceline.experiments.run_data import log_file, read_run
from paceline.experiments.statistics import Comparison, Interval, compare, interval
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import train
from tests.distributed.ranks import paceline_on_ranks
from tests.experiments.synthetic import write_evaluation, write_run

QUIET = Console(quiet=True)
LINEAR = [float(value) for value in range(100)]


def compared(groups: dict[str, list[Path]], target: float | None = None, is_emulated: bool = False) -> Comparison:
    return compare({label: [read_run(path) for path in paths] for label, paths in groups.items()}, target, is_emulated)


def statements(comparison: Comparison) -> dict[str, str]:
    return {finding.topic: " ".join(finding.statements) for finding in findings(comparison)}


def test_intervals_follow_students_distribution() -> None:
    # Quantiles of 1 and 2 degrees of freedom, from published tables.
    two, three = interval([1.0, 3.0]), interval([1.0, 2.0, 3.0])
    assert (two.mean, two.low, two.high) == pytest.approx((2.0, 2.0 - 12.706, 2.0 + 12.706), abs=1e-3)
    assert three.high == pytest.approx(2.0 + 4.303 / 3**0.5, abs=1e-3)
    assert interval([5.0]) == Interval(5.0)
    assert interval([1.0, 3.0], minimum=0.0).low == 0.0
    assert interval([5.0]).overlaps(two) is None
    assert Interval(1.0, 0.5, 1.5).overlaps(Interval(2.0, 1.4, 2.6)) is True
    assert Interval(1.0, 0.5, 1.5).overlaps(Interval(2.0, 1.6, 2.4)) is False


def test_efficiency_is_relative_to_the_smallest_number_of_ranks(tmp_path: Path) -> None:
    one = write_run(tmp_path / "1", LINEAR, ranks=1, envs=64, seconds=1.0, parts=(0.6, 0.4, 0.0))
    # Twice the envs in 1.25 times the time, and the same envs in 0.8 times the time.
    weak = write_run(tmp_path / "2", LINEAR, ranks=2, envs=128, seconds=1.25, parts=(0.6, 0.4, 0.25))
    strong = write_run(tmp_path / "3", LINEAR, ranks=2, envs=64, seconds=0.8, parts=(0.3, 0.2, 0.3))
    result = compared({"one": [one], "weak": [weak]})
    assert result.groups[0].baseline is None
    baseline = result.groups[1].baseline
    assert baseline
    assert (baseline.kind, baseline.speedup, baseline.efficiency) == ("horizontal", 1.6, 0.8)
    assert result.groups[1].sync_share == pytest.approx(0.2)
    text = statements(result)
    assert (
        "1.60 times as fast, with the same number of envs per rank (efficiency of the throughput 0.80)"
        in text["Did more ranks help?"]
    )
    assert "Measured with one run per group" in text["Did more ranks help?"]
    assert "0.25 s per iteration are lost in the synchronization" in text["What limits the speed"]
    assert "--sync every-iteration" in text["What to try"]
    result = compared({"one": [one], "strong": [strong]})
    baseline = result.groups[1].baseline
    assert baseline
    assert (baseline.kind, baseline.time_ratio) == ("vertical", pytest.approx(1.25))
    assert result.groups[1].seconds_to_common_steps.mean == pytest.approx(80.0)
    assert "64,000 env steps take 80 s, with one 100 s: 1.25 times" in statements(result)["Did more ranks help?"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, "fewer minibatches, a faster network, or --sync every-iteration."),
        ({"sync": "every-iteration"}, "or --sync periodic."),
        ({"sync": "periodic", "sync_every": 4}, "use a larger --sync-every"),
        ({"learner": "rsl_rl"}, "fewer minibatches, or a faster network."),
    ],
)
def test_advice_about_synchronization_names_modes_that_the_run_can_use(
    options: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    one = write_run(tmp_path / "1", LINEAR, **options)
    two = write_run(tmp_path / "2", LINEAR, ranks=2, seconds=2.0, parts=(0.3, 0.2, 1.5), **options)
    assert advice in statements(compared({"one": [one], "two": [two]}))["What to try"]


@pytest.mark.parametrize(
    ("collection", "largest", "advice"),
    [
        ({"physics": 0.4, "rendering": 0.1}, "physics", "more ranks, more cores per rank or a GPU"),
        ({"physics": 0.1, "rendering": 0.45}, "rendering", "Lower the resolution of the cameras"),
        ({"physics": 0.1}, "policy (actions, rewards, observations)", "a smaller network"),
        (None, "collection (physics, policy)", "more ranks, or more cores per rank"),
    ],
)
def test_the_largest_part_of_an_iteration_is_named(
    collection: dict[str, float] | None, largest: str, advice: str, tmp_path: Path
) -> None:
    result = compared({"run": [write_run(tmp_path / "run", LINEAR, collection=collection)]})
    parts = result.groups[0].seconds_by_part()
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts | (collection or {}) == pytest.approx(parts)
    text = statements(result)
    assert f"The largest part is the {largest}." in text["What limits the speed"]
    assert advice in text["What to try"]


def test_parts_that_some_runs_have_not_measured_are_not_compared(tmp_path: Path) -> None:
    old, new = (
        write_run(tmp_path / "1", LINEAR),
        write_run(tmp_path / "2", LINEAR, ranks=2, collection={"physics": 0.4}),
    )
    result = compared({"old": [old], "new": [new]})
    assert all("collect" in group.seconds_by_part() for group in result.groups)


def test_emulated_ranks_have_no_efficiency(tmp_path: Path) -> None:
    groups = {f"{k} ranks": [write_run(tmp_path / str(k), LINEAR, envs=64 * k)] for k in (1, 2)}
    write_report(tmp_path, groups, "Emulated", [], is_emulated=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(group["baseline"] is None for group in results["groups"])
    topics = [finding["topic"] for finding in results["findings"]]
    assert "Emulated ranks" in topics
    assert "Did more ranks help?" not in topics
    assert not (tmp_path / "plots" / "efficiency.png").exists()
    assert "efficiency |" not in (tmp_path / "results.md").read_text()


def test_a_report_removes_the_plots_of_an_earlier_one_and_no_other_file(tmp_path: Path) -> None:
    success = [value / 100 for value in LINEAR]
    several = [write_run(tmp_path / str(k), LINEAR, ranks=k, success=success) for k in (1, 2)]
    folder, plots = tmp_path / "report", tmp_path / "report" / "plots"

    def written(runs: list[Path]) -> set[str]:
        assert report_command([*map(str, runs), "--output", str(folder)], QUIET) == 0
        return {file.name for file in plots.iterdir()}

    first = written(several)
    own = {"sketch.png", "efficiency.pdf"}
    for name in own:
        (plots / name).write_bytes(b"written by the user")
    expected = written([write_run(tmp_path / "alone", LINEAR)]) - own
    assert expected < first
    assert own <= {file.name for file in plots.iterdir()}
    assert set(json.loads((folder / "results.json").read_text())["plots"]) == expected

    # A file that has been edited names no file outside of plots/, and a damaged one names none.
    results, notes = folder / "results.json", folder / "notes.png"
    notes.write_bytes(b"written by the user")
    for text in (json.dumps({"plots": ["../notes.png", str(notes), "sketch.txt", 3, None]}), '{"plots": 3}', "{"):
        results.write_text(text)
        assert written(several[:1]) >= own
        assert notes.exists()


def test_synchronization_in_a_cuda_graph_is_not_measured(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", LINEAR, ranks=2, parts=(0.6, 0.4, 0.0), backend="nccl")
    result = compared({"run": [run]})
    assert result.groups[0].sync_share is None
    assert "not measured: it is part of a CUDA graph" in statements(result)["What limits the speed"]


def test_rendering_on_a_gpu_is_not_measured(tmp_path: Path) -> None:
    text = statements(compared({"run": [write_run(tmp_path / "run", LINEAR, env={"camera": {}})]}))
    assert "The largest part is the collection (physics, policy, rendering)." in text["What limits the speed"]
    assert "Rendering was not measured: it is part of the collection." in text["What limits the speed"]
    assert "Collection includes rendering." in text["What to try"]


def test_plots_are_as_high_as_their_labels_need_and_show_several_evaluations(tmp_path: Path) -> None:
    def heights(name: str, labels: list[str], evaluations: list[float | None]) -> dict[str, int]:
        """Return the height of each plot of a report, in pixels, of which an inch has 220."""
        metrics: Any = {"eval/return": [*evaluations, *[None] * (100 - len(evaluations))], "loss/value": LINEAR}
        run = write_run(tmp_path / f"run_{name}", LINEAR, losses=metrics)
        write_report(tmp_path / name, {label: [run] for label in labels}, "Plots", [])
        images = {file.stem: Image.open(BytesIO(file.read_bytes())) for file in (tmp_path / name / "plots").iterdir()}
        return {name: image.height for name, image in images.items()}

    short = heights("short", ["a", "b"], [1.0])
    long = heights("long", [f"{letter} {'with a long name ' * 5}" for letter in "abcd"], [1.0, None, 2.0])
    assert long.keys() - short.keys() == {"return_without_exploration_noise_env_steps"}
    # The legend of curves has one row for all short labels, and two rows for each long one.
    assert long["return_iterations"] - short["return_iterations"] >= 7 * 0.15 * 220
    # The label of a bar has one line, or four lines.
    assert long["throughput"] - short["throughput"] >= (4 * 4 * 0.15 - 2 * 0.45) * 220


def test_findings_are_wrapped_between_words_on_a_terminal(tmp_path: Path) -> None:
    text = statements(compared({"one": [write_run(tmp_path / "run", LINEAR)]}))["Time to the same return"]
    results = {"findings": [{"topic": "Topic", "statements": [text]}]}
    printed = []
    for is_terminal in (True, False):
        console = Console(force_terminal=is_terminal, width=40, soft_wrap=True, highlight=False)
        with console.capture() as captured:
            print_findings(results, console)
        printed.append(captured.get().splitlines()[1:])
    assert max(map(len, printed[0])) <= 40
    assert " ".join(line.removeprefix("  ") for line in printed[0]) == text
    assert printed[1] == [f"  {text}"]


def test_time_to_a_return(tmp_path: Path) -> None:
    slow = [write_run(tmp_path / f"slow{seed}", LINEAR, seed=seed, seconds=2.0) for seed in (0, 1)]
    halves = [value / 2 for value in LINEAR]
    mixed = [write_run(tmp_path / "mixed0", LINEAR), write_run(tmp_path / "mixed1", halves, seed=1)]
    first, second = compared({"slow": slow, "mixed": mixed}, target=60.0).groups
    # The return 60 is that of iteration 61.
    assert first.target
    assert (first.target.reached, first.target.seconds) == (2, Interval(122.0, 122.0, 122.0))
    assert second.target
    assert (second.target.reached, second.target.iterations) == (1, Interval(61.0))
    # Mean first return 0; mean final returns, over the last ten iterations, 94.5 and 70.875.
    chosen = compared({"slow": slow, "mixed": mixed}).target
    assert chosen
    assert chosen.value == pytest.approx(0.9 * 70.875)
    text = statements(compared({"slow": slow, "mixed": mixed}, target=99.5))["Time to the same return"]
    assert "99.5 was not reached with slow and mixed" in text
    assert compared({"falling": [write_run(tmp_path / "falling", LINEAR[::-1])]}).target is None


def test_returns_differ_only_beyond_their_intervals(tmp_path: Path) -> None:
    def group(name: str, finals: list[float]) -> list[Path]:
        return [write_run(tmp_path / f"{name}{i}", [0.0] * 9 + [value], seed=i) for i, value in enumerate(finals)]

    low, near, high = (group(str(first), [first, first + 1, first + 2]) for first in (10.0, 11.0, 30.0))
    text = statements(compared({"low": low, "near": near, "high": high}))["Final return"]
    assert "Beyond the 95 % intervals, the final return is higher with high than with low." in text
    assert "With near it does not differ from low beyond the 95 % intervals." in text
    text = statements(compared({"low": low[:1], "high": high[:1]}))["Final return"]
    assert "No difference from low is claimed for high: there is no interval." in text
    for run, (mean, half) in zip((low[0], high[0]), ((10.0, 2.0), (30.0, 3.0)), strict=True):
        write_evaluation(run, mean, half)
    text = statements(compared({"low": low[:1], "high": high[:1]}))["Final return"]
    assert "higher with high than with low" in text
    assert "over evaluation episodes and do not include the variation between seeds" in text
    # The target is a return of the training, which is lower than that of the evaluation.
    target = compared({"high": [write_run(tmp_path / "evaluated", LINEAR)]}).target
    evaluated = write_evaluation(tmp_path / "evaluated", 1000.0, 1.0)
    assert compared({"high": [evaluated]}).target == target


def test_the_variation_of_the_loss_is_that_of_the_last_third(tmp_path: Path) -> None:
    losses = {"loss/value": [100.0, 0.0, 50.0, 7.0, 9.0, 3.0, 1.0, 3.0, 5.0]}
    run = write_run(tmp_path / "run", LINEAR[:9], losses=losses)
    found = compared({"run": [run]}).groups[0].losses["loss/value"]
    assert (found["mean"].mean, found["std"].mean) == pytest.approx((3.0, (8 / 3) ** 0.5))


def test_a_band_covers_the_range_that_all_runs_have(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(n), LINEAR[:n], seed=n)) for n in (20, 30, 40)]
    found = curve(runs, "iteration", "episode/return")
    assert found
    assert (found.x[0], found.x[-1]) == (1.0, 20.0)
    assert found.mean[-1] == found.low[-1] == found.high[-1] == pytest.approx(19.0)
    assert [len(x) for x, _ in found.lines] == [20, 30, 40]
    assert curve(runs, "iteration", "measure/success") is None


def test_runs_are_grouped_by_what_differs(tmp_path: Path) -> None:
    def groups(*runs: Path) -> dict[str, list[int]]:
        found = group_runs([read_run(run) for run in runs])
        return {label: [run.config.seed for run in of_group] for label, of_group in found.items()}

    one = write_run(tmp_path / "a", LINEAR, seed=3)
    again = write_run(tmp_path / "b", LINEAR, seed=4, checkpoint_every=7, video_every=5)
    double = write_run(tmp_path / "c", LINEAR, ranks=2, envs=128)
    clip = write_run(tmp_path / "d", LINEAR, settings={"clip": 0.1})
    other = write_run(tmp_path / "e", LINEAR, settings={"clip": 0.3})
    assert groups(one, again) == {"cartpole": [3, 4]}
    assert groups(double, one, again) == {"1 rank": [3, 4], "2 ranks": [0]}
    assert groups(clip, other) == {"ppo.clip 0.1": [0], "ppo.clip 0.3": [0]}


def test_runs_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            read_run(path)

    with pytest.raises(UserError, match="no run: give the directories"):
        report_command([], QUIET)
    refused(tmp_path / "none", "no run at .*none")
    run = write_run(tmp_path / "run", LINEAR)
    metrics, result = run / "metrics.jsonl", run / "result.json"
    lines = metrics.read_text().splitlines()
    (run / "eval").mkdir()
    evaluation = run / "eval" / "iteration_00000100_mujoco_seed_1.json"
    evaluation.write_text('{"nominal": 3}')
    refused(run, "cannot read .*iteration_00000100_mujoco_seed_1.json")
    evaluation.unlink()
    metrics.write_text("\n".join([lines[0], lines[1].replace('return": 0.0', 'return": "much"')]))
    refused(run, "metrics.jsonl is damaged: episode/return is 'much', not a number")
    metrics.write_text("\n".join([lines[0].replace('envs": 64', 'envs": null'), lines[1]]))
    refused(run, "metrics.jsonl: total_envs None must be")
    metrics.write_text("\n".join([lines[0], '{"iteration": 1, "loss/value": 2.0}']))
    refused(run, "metrics.jsonl has no return: no episode has ended")
    metrics.write_text("\n".join([lines[0], '{"iteration": 1, "episode/return": 2.0}']))
    refused(run, "metrics.jsonl is damaged: it has no values of speed/steps_per_second, .*seconds/collect")
    metrics.write_bytes(b"\xff\x00 garbage")
    refused(run, "metrics.jsonl has no complete iteration")
    metrics.unlink()
    refused(run, "run has no metrics.jsonl: an older version of Paceline")
    result.write_text("{")
    refused(run, "cannot read .*result.json")


def test_logs_beside_the_runs_of_an_experiment_are_skipped(tmp_path: Path) -> None:
    grid, output = tmp_path / "grid", ["--output", str(tmp_path / "report")]
    runs = [write_run(grid / f"ranks_{k}_seed_0", LINEAR, ranks=k) for k in (1, 2)]
    for run in runs:
        log_file(run).write_text("$ paceline train cartpole\n")
    matched = sorted(map(str, grid.glob("ranks_*")))
    assert len(matched) == 4
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert report_command([*matched, *output, "--json"], QUIET) == 0
    assert json.loads(printed.getvalue())["runs"] == {"1 rank": [str(runs[0])], "2 ranks": [str(runs[1])]}
    # The log of a run that is not given, and a file that is no log, are errors.
    with pytest.raises(UserError, match=r"ranks_2_seed_0\.log is not a run"):
        report_command([*matched[:2], matched[3], *output], QUIET)
    (grid / "grid.json").write_text("{}")
    with pytest.raises(UserError, match=r"grid\.json is not a run"):
        report_command([*matched, str(grid / "grid.json"), *output], QUIET)


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "paceline.experiments.plots", raising=False)
    with pytest.raises(UserError, match=r"a report needs matplotlib.*: pip install 'paceline\[report\]'"):
        report_command([str(write_run(tmp_path / "run", LINEAR)), "--output", str(tmp_path)], QUIET)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of cartpole with 1 and 2 ranks and two seeds each."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {"horizon": 16, "epochs": 2, "minibatches": 2, "hidden": (16,)}
    options = ["--total-envs", "16", "--max-iterations", "6", "--gpu-ids", "none", "--logger", "none"]
    options += ["--ppo.horizon", "16", "--ppo.epochs", "2", "--ppo.minibatches", "2", "--ppo.hidden", "16"]
    for seed in (0, 1):
        config = TrainConfig(
            task="cartpole", env={}, total_envs=16, max_iterations=6, seed=seed, settings=settings, logger=("none",)
        )
        train(config, RunDir(folder / f"1_{seed}"), QUIET)
        argv = ["train", "cartpole", *options, "--seed", str(seed), "--run-dir", str(folder / f"2_{seed}")]
        for ended in paceline_on_ranks(folder, (argv, {}), (argv, {})):
            assert ended.returncode == 0, ended.stderr
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def reported(trained: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The report of `trained` and the results that the command printed."""
    folder, printed = tmp_path_factory.mktemp("report"), io.StringIO()
    with redirect_stdout(printed):
        assert report_command([*map(str, trained), "--output", str(folder), "--json"], QUIET) == 0
    return folder, json.loads(printed.getvalue())


def test_the_command_compares_real_runs(trained: list[Path], reported: tuple[Path, dict[str, Any]]) -> None:
    folder, results = reported
    assert json.loads((folder / "results.json").read_text()) == results
    one, two = results["groups"]
    assert (one["label"], two["label"]) == ("1 rank", "2 ranks")
    assert (one["seeds"], two["seeds"], one["total_envs"], two["total_envs"]) == ([0, 1], [0, 1], 16, 16)
    assert two["baseline"]["kind"] == "vertical"
    # Two ranks compute the updates of one rank, so the runs learn the same.
    assert one["final_return"]["mean"] == pytest.approx(two["final_return"]["mean"], rel=0.01)
    last = read_run(trained[0]).metrics["episode/return"][-1]
    assert one["final_return"]["low"] < last < one["final_return"]["high"]
    assert two["sync_share"] > 0
    collect = two["collect_seconds"]
    assert collect["min"] <= collect["mean"] <= collect["max"]
    assert all(0 < group["physics_seconds"] < group["collect_seconds"]["max"] for group in (one, two))
    assert one["rendering_seconds"] == 0
    text = (folder / "results.md").read_text()
    assert all(" ".join(finding["statements"]) in text for finding in results["findings"])


@pytest.mark.root
def test_the_page_works_offline_in_a_browser(reported: tuple[Path, dict[str, Any]]) -> None:
    from playwright.sync_api import sync_playwright

    folder, results = reported
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for width in (1280, 390):
            context = browser.new_context(viewport={"width": width, "height": 800}, offline=True)
            page = context.new_page()
            requests, problems = list[str](), list[str]()
            page.on("request", lambda request, urls=requests: urls.append(request.url.partition(":")[0]))
            page.on("console", lambda message, texts=problems: texts.append(message.text))
            page.on("pageerror", lambda error, texts=problems: texts.append(str(error)))
            page.goto((folder / "report.html").as_uri())
            assert not problems
            assert set(requests) <= {"file", "data"}
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            images = page.locator("figure img")
            assert images.count() == len(list((folder / "plots").glob("*.png")))
            for image in images.all():
                box = image.bounding_box()
                assert image.is_visible()
                assert box
                assert box["width"] > 200
                assert box["height"] > 100
                assert image.evaluate("image => image.complete && image.naturalWidth > 500")
                assert image.get_attribute("alt")
            # The page, results.md and results.json agree.
            rows = page.locator("#results-table tr").all()
            cells = [[cell.text_content() or "" for cell in row.locator("th, td").all()] for row in rows]
            markdown = (folder / "results.md").read_text()
            assert all(f"| {' | '.join(row)} |" in markdown for row in cells)
            shown = dict(zip(cells[0], next(row for row in cells if row[0] == "final return"), strict=True))
            for group in results["groups"]:
                assert float(shown[group["label"]].split()[0]) == pytest.approx(group["final_return"]["mean"], rel=0.01)
            for finding in results["findings"]:
                assert all(page.get_by_text(text, exact=True).count() >= 1 for text in finding["statements"])
            context.close()
        browser.close()
