"""Forecasts: the model with known answers, and the command on a real run."""

import io
import json
from dataclasses import astuple
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.scale import scale
from paceline.distributed.network_check import AllReduceTiming
from paceline.errors import UserError
from paceline.experiments.forecast import IterationModel
from paceline.experiments.iteration_parts import Measurements, Parts, Sums, parts_of, sums_of
from paceline.experiments.network import Link, Network, known_networks, measured_network
from paceline.experiments.run_data import read_run
from tests.distributed.ranks import paceline_on_ranks
from tests.experiments.synthetic import write_run
from tests.forked import paceline

QUIET = Console(quiet=True)
MEGABYTE = 1e6
# 8 Gb/s are 1e9 bytes/s.
FLAT = Network(name="flat", description="", source="", backend="gloo", between_nodes=Link(100.0, 8.0))
NODES = Network(
    name="nodes",
    description="",
    source="",
    backend="nccl",
    between_nodes=Link(10.0, 8.0),
    within_node=Link(1.0, 800.0),
    ranks_per_node=4,
    overhead_us=5.0,
)
SMALL = ("cartpole", "--num-envs", 8, "--ppo.horizon", 4, "--ppo.epochs", 3, "--ppo.minibatches", 2)
SMALL += ("--ppo.hidden", 8, "--logger", "none", "--gpu-ids", "none", "--max-iterations", 6)


def test_a_ring_of_gloo_has_two_latencies_per_step() -> None:
    # Two ranks: 2 steps. Four ranks: 6 steps with a quarter of the message each.
    assert FLAT.all_reduce_seconds(1, MEGABYTE) == 0.0
    assert FLAT.all_reduce_seconds(2, MEGABYTE) == pytest.approx(2 * (200e-6 + 0.5e-3))
    assert FLAT.all_reduce_seconds(4, MEGABYTE) == pytest.approx(6 * (200e-6 + 0.25e-3))


def test_nccl_uses_the_faster_of_ring_and_tree() -> None:
    # Within a node: 6 steps of a ring or 2 * 3 of a tree, at 1e11 bytes/s.
    assert NODES.all_reduce_seconds(4, 4.0) == pytest.approx(5e-6 + 6e-6, rel=1e-3)
    # 16 nodes: the tree has 2 * (3 * 1 + 4 * 10) us; the ring 30 steps between nodes and 96 within them.
    assert NODES.all_reduce_seconds(64, 4.0) == pytest.approx(5e-6 + 86e-6, rel=1e-3)
    # A large message: both send it about twice over the 4e9 bytes/s of a node's adapters, the ring a little less.
    large = 1e9
    assert NODES.all_reduce_seconds(64, large) == pytest.approx(5e-6 + 396e-6 + 126 / 64 * large / 4e9)
    assert NODES.flat().all_reduce_seconds(64, 4.0) == pytest.approx(5e-6 + 2 * 6 * 10e-6, rel=1e-3)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_measured_network_reproduces_its_measurement(backend: str) -> None:
    timing = AllReduceTiming(backend, 0.002, 1_000_000, 0.003, True)
    network = measured_network(timing, 2)
    assert network.all_reduce_seconds(2, 0.0) == pytest.approx(0.002)
    assert network.all_reduce_seconds(2, 1_000_000) == pytest.approx(0.003, rel=0.35 if backend == "nccl" else 1e-9)


def test_every_known_network_states_its_source() -> None:
    assert len(known_networks()) >= 5
    for network in known_networks().values():
        assert len(network.source) > 20
        assert network.all_reduce_seconds(16, MEGABYTE) > network.all_reduce_seconds(2, MEGABYTE) > 0


def model(variation: float = 0.0) -> IterationModel:
    parts = [Parts(16, 0.2, 0.1, 0.0, variation), Parts(64, 0.8, 0.1, 0.0, variation)]
    return IterationModel(parts, Sums(10, MEGABYTE), 4)


def test_weak_scaling_loses_the_time_of_the_sums() -> None:
    scaling = model().scaling("weak", FLAT, 8, 64, 0.25)
    assert [each.ranks for each in scaling.predictions] == [1, 2, 4, 8]
    two = scaling.predictions[1]
    assert two.seconds == pytest.approx(0.9 + 10 * FLAT.all_reduce_seconds(2, MEGABYTE))
    assert two.steps_per_second == pytest.approx(2 * 64 * 4 / two.seconds)
    assert scaling.efficiency(two) == pytest.approx(0.9 / two.seconds)
    assert scaling.worthwhile_ranks == 8


def test_strong_scaling_pays_until_the_fixed_costs_dominate() -> None:
    scaling = model().scaling("strong", FLAT, 100, 64, 0.25)
    assert [each.ranks for each in scaling.predictions] == [1, 2, 4, 8, 16, 32, 64]
    # Between the measured numbers of envs the parts are linear; below the smallest one they are constant.
    assert scaling.predictions[1].collect == pytest.approx(0.4)
    assert scaling.predictions[6].collect == pytest.approx(0.2)
    assert scaling.worthwhile_ranks == 4


def test_ranks_wait_for_the_slowest_one() -> None:
    waits = [model(0.01).predict(FLAT, ranks, 64 * ranks).waiting for ranks in (1, 2, 1024)]
    # The expected maximum of 2 and of 1,024 normally distributed numbers is 0.56 and 3.2 standard deviations.
    assert waits == pytest.approx([0.0, 0.0056, 0.032], abs=1e-3)


def test_parts_are_those_of_the_run_without_synchronization(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [1.0] * 20, ranks=2, envs=64, seconds=1.1, parts=(0.6, 0.3, 0.1)))
    assert astuple(parts_of(run)) == pytest.approx((32, 0.6, 0.3, 0.1, 0.0))
    assert sums_of(run) is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    done = paceline("train", *SMALL, "--run-dir", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_a_measurement_that_other_processes_disturb_is_stated(tmp_path: Path) -> None:
    # A short training takes longer than the iterations of the first run, and less time than those of the second.
    for name, seconds, is_disturbed in (("fast", 1e-5, True), ("slow", 100.0, False)):
        run = read_run(write_run(tmp_path / name, [1.0] * 9, envs=64, seconds=seconds, parts=(seconds, 0.0, 0.0)))
        output = io.StringIO()
        parts = Measurements(run, 1, Console(file=output)).parts(fewest_envs=16)
        assert [each.num_envs for each in parts] == [16, 64]
        assert ("Other processes disturb the measurement" in output.getvalue()) is is_disturbed


def test_the_command_measures_network_parts_and_sums(run: Path) -> None:
    argv = ("scale", "forecast", run, "--to", 4, "--iterations", 3, "--json")
    # As under a launcher: both ranks measure the network, and the main rank prints the forecast.
    ranks = [done.stdout for done in paceline_on_ranks(run.parent, *[([str(word) for word in argv], {})] * 2)]
    assert ranks[1] == ""
    found = json.loads(ranks[0])
    assert found == json.loads((run / "forecast" / "forecast.json").read_text())
    # One sum of statistics, and one per minibatch.
    assert found["sums"]["per_iteration"] == 1 + 3 * 2
    assert [part["num_envs"] for part in found["parts"]] == [2, 8]
    weak, strong = found["scalings"]
    assert [each["ranks"] for each in weak["predictions"]] == [1, 2, 4]
    assert [each["total_envs"] for each in strong["predictions"]] == [8, 8, 8]
    assert weak["network"]["name"] == "measured, gloo"
    for name in ("forecast.html", "forecast.md", "forecast_throughput.png", "forecast_efficiency.png"):
        assert (run / "forecast" / name).stat().st_size > 100


def test_measured_parts_are_used_again_with_another_network(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale(["forecast", str(run), "--to", "4", "--network", "dgx-h100", "--json"], QUIET) == 0
    found, shown = capsys.readouterr(), (run / "forecast" / "forecast.md").read_text()
    assert "Measuring" not in found.err
    assert [each["network"]["name"] for each in json.loads(found.out)["scalings"]] == [
        *("dgx-h100", "dgx-h100"),
        *("dgx-h100, flat", "dgx-h100, flat"),
    ]
    assert "NVIDIA DGX H100 User Guide" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network", "dgx-h10"], "unknown network 'dgx-h10'"),
        (["--latency-us", "5"], "--bandwidth-gbps is missing"),
        (["--latency-us", "-1", "--bandwidth-gbps", "1"], "--latency-us -1 must be at least 0"),
        (["--ranks-per-node", "4"], "--ranks-per-node needs --network NAME"),
        (["--ranks-per-node", "4", "--network", "ethernet-1g"], "ethernet-1g has one rank per node; leave it out"),
        (["--to", "0"], "--to 0 must be at least 1"),
    ],
)
def test_refused_options_are_named(run: Path, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        scale(["forecast", str(run), *options], QUIET)
