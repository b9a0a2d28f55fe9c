"""Time of an all-reduce as a function of the number of ranks, for `paceline scale forecast`.

The model is that with which NCCL chooses its algorithm. A ring has 2 (n - 1) steps with n ranks, and in each step a
rank sends 1/n of the message. A tree sends the message up and down; its steps grow with the logarithm of the number of
nodes. NCCL uses the faster one, gloo a ring.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import ceil, inf, log2
from typing import Annotated, Literal

import yaml
from annotated_types import Ge, Gt

from paceline.distributed.network_check import AllReduceTiming
from paceline.errors import unknown
from paceline.validation import Count, from_dict

_GLOO_LATENCIES = 2
"""Latencies per step of gloo's ring over TCP: a rank sends when the receiver has announced that it is ready. Measured
with bench/slow_link.py: a sum over two ranks, which has two steps, takes four latencies."""
_BITS_PER_GBPS, _MICROSECONDS = 1e9, 1e6


@dataclass(frozen=True)
class Link:
    """A connection between two ranks."""

    latency_us: Annotated[float, Ge(0)]
    """Time until a small message arrives, one way, us."""
    bandwidth_gbps: Annotated[float, Gt(0)]
    """Bandwidth of a rank in one direction, Gb/s."""

    @property
    def latency(self) -> float:
        """Latency, s."""
        return self.latency_us / _MICROSECONDS

    @property
    def bandwidth(self) -> float:
        """Bandwidth, bytes/s."""
        return self.bandwidth_gbps * _BITS_PER_GBPS / 8


@dataclass(frozen=True, kw_only=True)
class Network:
    """The connections between all ranks. Without `within_node` it is flat: all connections are alike."""

    name: str
    description: str
    source: str
    """Origin of the figures."""
    backend: Literal["gloo", "nccl"]
    between_nodes: Link
    within_node: Link | None = None
    ranks_per_node: Count = 1
    overhead_us: Annotated[float, Ge(0)] = 0.0
    """Time of an all-reduce besides its steps, us."""

    def flat(self) -> "Network":
        """Return the network with one rank per node."""
        description = f"one rank per node, connected as the nodes of {self.name}"
        return replace(self, name=f"{self.name}, flat", description=description, within_node=None, ranks_per_node=1)

    def all_reduce_seconds(self, ranks: int, num_bytes: float) -> float:
        """Return the time to sum a message over `ranks` ranks."""
        if ranks == 1:
            return 0.0
        ring = self._ring_seconds(ranks, num_bytes)
        return ring if self.backend == "gloo" else min(ring, self._tree_seconds(ranks, num_bytes))

    def _ring_seconds(self, ranks: int, num_bytes: float) -> float:
        nodes = self._nodes(ranks)
        steps, steps_between = 2 * (ranks - 1), 2 * (nodes - 1)
        within, between = self._latencies()
        latency = (steps - steps_between) * within + steps_between * between
        return self.overhead_us / _MICROSECONDS + latency + steps / ranks * num_bytes / self._bandwidth(ranks)

    def _tree_seconds(self, ranks: int, num_bytes: float) -> float:
        nodes = self._nodes(ranks)
        within, between = self._latencies()
        latency = 2 * ((ceil(ranks / nodes) - 1) * within + ceil(log2(nodes)) * between)
        return self.overhead_us / _MICROSECONDS + latency + 2 * num_bytes / self._bandwidth(ranks)

    def _nodes(self, ranks: int) -> int:
        return ceil(ranks / self._per_node())

    def _per_node(self) -> int:
        return self.ranks_per_node if self.within_node else 1

    def _latencies(self) -> tuple[float, float]:
        """Return the latency of a step within a node and between nodes, s."""
        per_step = _GLOO_LATENCIES if self.backend == "gloo" else 1
        within = self.within_node.latency if self.within_node else 0.0
        return per_step * within, per_step * self.between_nodes.latency

    def _bandwidth(self, ranks: int) -> float:
        """Return the bandwidth of the slowest connection that a message takes, bytes/s. The ranks of a node use its
        adapters together."""
        per_node = min(ranks, self._per_node())
        within = self.within_node.bandwidth if self.within_node and per_node > 1 else inf
        between = per_node * self.between_nodes.bandwidth if self._nodes(ranks) > 1 else inf
        return min(within, between)


def measured_network(timing: AllReduceTiming, ranks: int) -> Network:
    """Return the flat network whose all-reduce takes the measured times with the measured number of ranks."""
    ring_steps = 2 * (ranks - 1)
    if timing.backend == "gloo":
        latencies, shares = _GLOO_LATENCIES * ring_steps, ring_steps / ranks
    else:
        latencies, shares = min(ring_steps, 2 * ceil(log2(ranks))), 2.0
    # The large message may take less time than the small one if both are within the noise.
    transfer = max(timing.large_seconds - timing.latency, 0.01 * timing.large_seconds)
    return Network(
        name=f"measured, {timing.backend}",
        description=f"measured between {ranks} ranks",
        source="this measurement",
        backend="gloo" if timing.backend == "gloo" else "nccl",
        between_nodes=Link(
            timing.latency / latencies * _MICROSECONDS,
            shares * timing.large_bytes / transfer * 8 / _BITS_PER_GBPS,
        ),
    )


@cache
def known_networks() -> dict[str, Network]:
    """Return the networks of networks.yaml by name."""
    content = yaml.safe_load((files("paceline.experiments") / "networks.yaml").read_text())
    return {name: from_dict(Network, {"name": name} | values, f"network {name}") for name, values in content.items()}


def find_network(name: str) -> Network:
    if name not in known_networks():
        raise unknown("network", name, known_networks())
    return known_networks()[name]
