"""Compare the time to average gradients over two ranks in skrl on JAX: skrl's implementation and Paceline's.

    python bench/skrl_jax_sync.py

Two processes on this CPU are connected by jax.distributed, as in skrl, and by Paceline's process group over gloo.
They alternately average the same gradients of a policy and its critic: skrl with two all-reduces, Paceline with one.
A time is the median over all repeats of the slower rank's time.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

import rates
import torch
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import ProcessContext, start_processes

from paceline.distributed.group import Group
from paceline.distributed.rank import this_rank
from paceline.env.vec_env import ActionSpec

RANKS = 2
NETWORKS = ((32, 32), (256, 128, 64))
"""Hidden layer widths: cartpole's and the default."""
OBSERVATIONS, ACTIONS = 4, 1
LONGEST_SECONDS = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=5, help="number of averages per scheme and round")
    parser.add_argument("--output", default="skrl_jax_sync", help="name of the file in bench/results")
    args = parser.parse_args()
    sizes, load = {"rounds": args.rounds, "repeats": args.repeats}, os.getloadavg()[0]
    rows = on_ranks(args.rounds, args.repeats)
    rates.write(args.output, ranks=RANKS, backend="gloo", load_before=load, **sizes, rows=rows)
    table = Table("hidden layers", "parameters", "skrl, ms", "compiled", "Paceline, ms", "compiled", "ratio")
    table.title = f"one exchange of a minibatch's gradients, {RANKS} ranks on this CPU"
    for row in rows:
        figures = (f"{row['stock_ms']:.2f}", f"{row['stock_compiles']:g}")
        averaged = (f"{row['paceline_ms']:.3f}", f"{row['paceline_compiles']:g}", f"{row['ratio']:.1f}")
        table.add_row("x".join(map(str, row["hidden"])), f"{row['parameters']:,}", *figures, *averaged)
    Console().print(table)


def on_ranks(*sizes: int) -> list[dict[str, Any]]:
    """Run `measure` on all ranks and return its rows. Raises the exception of a failed rank."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        arguments = (_free_port(), _free_port(), output, *sizes)
        deadline = time.monotonic() + LONGEST_SECONDS
        started = cast("ProcessContext", start_processes(measure, arguments, RANKS, join=False, start_method="spawn"))
        try:
            while not started.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    sys.exit(f"the ranks did not finish within {LONGEST_SECONDS:.0f} s: reduce --rounds")
        finally:
            for process in started.processes:
                process.kill()
        return json.loads(output.read_text())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(index: int, port: int, jax_port: int, output: Path, rounds: int, repeats: int) -> None:
    """Measure on one rank. The main rank writes the result."""
    where = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in where.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    group = Group(this_rank(()))
    join_by_jax(index, jax_port)
    rows = [compare(hidden, group, rounds, repeats) for hidden in NETWORKS]
    group.close()
    if index == 0:
        output.write_text(json.dumps(rows))


def join_by_jax(index: int, port: int) -> None:
    """Initialize jax.distributed by importing skrl. With torchrun's variables set, skrl would start nccl too."""
    where = {"JAX_RANK": index, "JAX_LOCAL_RANK": 0, "JAX_WORLD_SIZE": RANKS, "JAX_COORDINATOR_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    hidden = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    # skrl uses this module without importing it.
    import jax.experimental.multihost_utils
    import skrl

    assert jax.process_count() == skrl.config.jax.world_size == RANKS
    os.environ.update(hidden)


def compare(hidden: tuple[int, ...], group: Group, rounds: int, repeats: int) -> dict[str, Any]:
    import jax

    from paceline.learners.skrl.jax_learner import GradientMean
    from paceline.learners.skrl.jax_networks import make_networks
    from paceline.learners.skrl.learner import spaces
    from paceline.learners.skrl.settings import SkrlSettings

    device = jax.local_devices()[0]
    networks = make_networks(SkrlSettings(layers=hidden), spaces({"policy": OBSERVATIONS}, ActionSpec(ACTIONS), device))
    # The values are arbitrary but differ between ranks.
    gradients = {
        name: jax.tree.map(lambda leaf: (leaf + 0.1) * (group.rank.index + 1.0), network.state_dict.params)
        for name, network in networks.items()
    }
    mean = GradientMean(gradients, group, 1.0 / RANKS)
    schemes: dict[str, Callable[[], Any]] = {
        "stock": lambda: {name: networks[name].reduce_parameters(gradient) for name, gradient in gradients.items()},
        "paceline": lambda: mean(gradients),
    }
    compiles = 0

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        nonlocal compiles
        compiles += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    found = {name: [jax.device_get(scheme()) for _ in range(3)][-1] for name, scheme in schemes.items()}
    for stock, averaged in zip(*(jax.tree.leaves(found[name]) for name in schemes), strict=True):
        torch.testing.assert_close(torch.tensor(averaged), torch.tensor(stock))
    row: dict[str, Any] = {"hidden": hidden, "parameters": sum(leaf.size for leaf in jax.tree.leaves(gradients))}
    seconds: dict[str, list[float]] = {name: [] for name in schemes}
    for _ in range(rounds):
        for name, scheme in schemes.items():
            group.all_gather(None)  # barrier before timing
            compiles = 0
            for _ in range(repeats):
                began = time.perf_counter()
                jax.block_until_ready(scheme())
                seconds[name].append(time.perf_counter() - began)
            row[f"{name}_compiles"] = compiles / repeats
    jax.monitoring.unregister_event_duration_listener(listen)
    for name, own in seconds.items():
        row[f"{name}_ms"] = 1e3 * median(max(each) for each in zip(*group.all_gather(own), strict=True))
    return row | {"ratio": row["stock_ms"] / row["paceline_ms"]}


if __name__ == "__main__":
    main()
