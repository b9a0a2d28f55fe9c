"""The command `paceline scale forecast`."""

import sys
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Le
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional

from paceline.cli.options import parse_options
from paceline.distributed.group import Group
from paceline.distributed.launcher import under_launcher
from paceline.distributed.network_check import time_all_reduce
from paceline.distributed.rank import this_rank
from paceline.errors import UserError
from paceline.experiments.forecast import PAGE, Forecast, make_forecast
from paceline.experiments.iteration_parts import Measurements
from paceline.experiments.network import Link, Network, find_network, known_networks, measured_network
from paceline.experiments.report import check_installed
from paceline.experiments.run_data import RunData, read_run
from paceline.launch import local
from paceline.process import interrupts
from paceline.run.config import EnvCount, option
from paceline.run.directory import RunDir
from paceline.validation import Count, NonNegative, Positive, UnitInterval, check


@dataclass(frozen=True)
class ForecastArguments:
    """Forecast the throughput of a run with more ranks.

    The parts of an iteration are those of the run. With fewer envs per rank they are measured by short trainings.
    The time of sums over ranks follows from a network: --network, --latency-us and --bandwidth-gbps, or a measurement.
    Under a launcher it is measured between its ranks, otherwise between two ranks on this machine.
    The page forecast.html, forecast.md, forecast.json and plots are written to RUN/forecast/.
    """

    run: Annotated[Positional[str], option("RUN")]
    """Directory of the run, or auto for the newest one under runs/."""
    to: Annotated[Count, Le(2**20), option("N")] = 1024
    """Largest number of ranks, from 1 to 2^20."""
    network: Annotated[str | None, option("NAME")] = None
    """Network of a common cluster: dgx-h100, dgx-a100, aws-p5, pcie-100g or ethernet-1g.
    The forecast is made for its nodes and for a flat network of its connections between nodes."""
    latency_us: Annotated[NonNegative | None, option("US")] = None
    """Latency of a message between nodes, one way, us; at least 0. Replaces that of --network."""
    bandwidth_gbps: Annotated[Positive | None, option("GBPS")] = None
    """Bandwidth of a rank between nodes in one direction, Gb/s; above 0. Replaces that of --network."""
    ranks_per_node: Annotated[Count | None, option("K")] = None
    """Number of ranks per node, at least 1. Replaces that of --network."""
    total_envs: Annotated[EnvCount | None, option("N")] = None
    """Number of envs over all ranks for strong scaling, from 1 to 2^24. The default is that of the run."""
    min_gain: Annotated[UnitInterval, option("G")] = 0.25
    """Smallest relative increase of the throughput by twice the ranks that counts as worthwhile, from 0 to 1."""
    iterations: Annotated[Count, option("N")] = 8
    """Number of iterations of each short training, at least 1, after two that are not counted."""
    no_measure: Annotated[bool, FlagCreatePairsOff] = False
    """Start no training. Strong scaling is then not forecast, because it needs iterations with fewer envs."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print the content of forecast.json instead of tables."""


def forecast(argv: list[str], console: Console) -> int:
    arguments = parse_options(ForecastArguments, argv, "scale forecast")
    check(arguments, "--")
    check_installed()
    run = read_run(RunDir.open(arguments.run).path, needs_returns=False)
    given = _given_network(arguments, run)
    if given is None and not under_launcher():
        # Each rank runs this command.
        try:
            local.launch(["scale", "forecast", *argv], _local_ranks(run), max_restarts=0)
        except local.RankFailedError as error:
            if error.exit_code < 0:  # it could not print the cause
                print(f"paceline: {error}", file=sys.stderr)
            return max(error.exit_code, 1)
        return 0
    interrupts.raise_keyboard_interrupt()
    # Progress goes to stderr, so that --json prints only JSON to stdout.
    measurements = Measurements(run, arguments.iterations, Console(stderr=True, highlight=False, soft_wrap=True))
    networks = given or _measure_network(run, measurements)
    if networks is None:
        return 0  # the main rank continues alone
    total_envs = None if arguments.no_measure else arguments.total_envs or run.facts.total_envs
    found = make_forecast(run, measurements, networks, arguments.to, total_envs, arguments.min_gain)
    found.write(run.path / "forecast")
    if arguments.json:
        print(found.to_json(), end="")
        return 0
    _print(found, console)
    console.print(escape(f"Wrote {run.path / 'forecast' / PAGE}"))
    return 0


def _print(found: Forecast, console: Console) -> None:
    console.print(escape(found.subtitle))
    for name, (header, rows) in found.tables().items():
        shown = Table(*header, box=box.SIMPLE, pad_edge=False, title=escape(name), title_justify="left")
        for column in shown.columns:
            column.justify = "right"
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    for statement in found.statements():
        console.print(escape(statement))


def _given_network(arguments: ForecastArguments, run: RunData) -> list[Network] | None:
    """Return the networks that the options describe, the hierarchical one first; None if they must be measured."""
    latency, bandwidth, name = arguments.latency_us, arguments.bandwidth_gbps, arguments.network
    if name is None:
        if (latency is None) != (bandwidth is None):
            missing = "--bandwidth-gbps" if bandwidth is None else "--latency-us"
            raise UserError(f"{missing} is missing: give both, or --network NAME for the other value")
        if arguments.ranks_per_node:
            raise UserError("--ranks-per-node needs --network NAME, which has the connections within a node")
        if latency is None or bandwidth is None:
            return None
        backend = "nccl" if run.config.gpu_ids else "gloo"
        link = Link(latency, bandwidth)
        description = f"all connections have {latency:g} us and {bandwidth:g} Gb/s"
        return [
            Network(
                name=f"given, {backend}", description=description, source="options", backend=backend, between_nodes=link
            )
        ]
    network = find_network(name)
    if arguments.ranks_per_node and not network.within_node:
        raise UserError(f"--ranks-per-node {arguments.ranks_per_node}: {name} has one rank per node; leave it out")
    if not (latency is None and bandwidth is None and arguments.ranks_per_node is None):
        between = network.between_nodes
        network = replace(
            network,
            name=f"{name}, changed",
            description=f"{network.description}; changed by options",
            between_nodes=Link(
                between.latency_us if latency is None else latency,
                between.bandwidth_gbps if bandwidth is None else bandwidth,
            ),
            ranks_per_node=arguments.ranks_per_node or network.ranks_per_node,
        )
    return [network, network.flat()] if network.within_node else [network]


def _local_ranks(run: RunData) -> int:
    if len(run.config.gpu_ids) == 1:
        names = ", ".join(known_networks())
        raise UserError(
            f"the run has one GPU, between which and others nothing can be measured: give --network NAME ({names}) or "
            "--latency-us and --bandwidth-gbps, or start this command on several GPUs with torch.distributed.run"
        )
    return len(run.config.gpu_ids) or 2


def _measure_network(run: RunData, measurements: Measurements) -> list[Network] | None:
    """Measure the network between the ranks of the launcher. Return None on all but the main rank."""
    rank = this_rank(run.config.gpu_ids)
    if rank.world_size == 1:
        raise UserError("one rank cannot measure a network: start two or more, or give --network NAME")
    group = Group(rank)
    try:
        sums = group.broadcast(measurements.sums() if rank.is_main else None)
        timing = time_all_reduce(group, int(sums.num_bytes))
    finally:
        group.close()
    return [measured_network(timing, rank.world_size)] if rank.is_main else None
