"""Compare the synchronization time per iteration of Paceline's and RSL-RL's collectives.

    .venv/bin/python bench/sync.py

Trains cartpole on this CPU in separate processes over gloo, with one thread each. Both sides are Paceline's PPO and
differ only in their collectives. Paceline: one all-reduce at the start of an update and one per minibatch. RSL-RL
5.5.1: per minibatch one for the KL divergence and one for the learning rate before the backward pass, and one for the
gradient; and three per normalizer. Other synchronization points of RSL-RL, such as `.item()` of each loss, are not
included. With one rank there are no collectives: both sides are equal, and their ratio is the measurement noise.

Sync time is measured from a rank's local values to the first use of the global ones: packing, blocking collectives
and unpacking, on the rank with the largest value. It includes waiting for slower ranks. With more ranks than cores,
most of it is the work of other ranks: compare only the schemes there, not the share.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from copy import copy
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, cast

import rates
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import ProcessContext, start_processes

from paceline.distributed.group import Group
from paceline.distributed.rank import this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.samples import PackedSamples, Rollout
from paceline.learners.ppo.settings import PpoSettings
from paceline.learners.settings import LEARNING_RATES
from paceline.tasks.cartpole import Cartpole

SEED = 0
WARMUP_ITERATIONS = 2
LONGEST_SECONDS = 1200.0
"""Time limit for all ranks of a comparison."""


class Paceline(Ppo):
    """Native PPO with timers around the collectives."""

    sync_seconds = 0.0

    def _update_threads(self) -> int:
        return 1  # independent of the number of cores

    def _start(self) -> None:
        self._began = time.perf_counter()

    def _stop(self) -> None:
        self.sync_seconds += time.perf_counter() - self._began

    def _sums_of_this_rank(self, rollout: Rollout, packed: PackedSamples) -> list[Tensor]:
        own = super()._sums_of_this_rank(rollout, packed)
        self._start()
        return own

    def _standardize_advantages(self, packed: PackedSamples, sums: Tensor) -> None:
        self._stop()
        super()._standardize_advantages(packed, sums)

    def _begin_average(self, losses: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        self._start()
        finish = super()._begin_average(losses)
        self._stop()

        def timed() -> tuple[Tensor, ...]:
            self._start()
            summed = finish()
            self._stop()
            return summed

        return timed


class RslRl(Paceline):
    """Native PPO with RSL-RL's collectives."""

    def __init__(self, env: RobotEnv, config: PpoSettings, seed: int, group: Group):
        super().__init__(env, config, seed, group)
        self._ranks, self._group = group, copy(group)
        self._group.sum_ = self._sum_moments
        self._rate = config.learning_rate
        parameters = (self.distribution.log_std, *self.actor.parameters(), *self.critic.parameters())
        self._gradients = [self.flat_parameters.views(parameter)[1] for parameter in parameters]

    def _sum_moments(self, tensor: Tensor) -> Tensor:
        """Replace the first all-reduce: each normalizer reduces its count, means and variances separately. Other values
        stay local, scaled as if all ranks had the same."""
        sums = tensor * self._ranks.size
        width = 3 * self.env.observation_spec["policy"].shape[0]
        own, summed = tensor[-width:].view(3, -1), sums[-width:].view(3, -1)
        for _ in range(2):  # RSL-RL's critic has its own normalizer, even where it sees what the actor sees
            self._ranks.sum_(own[0, 0].clone())
            for part, total in zip(own[1:], summed[1:], strict=True):
                total.copy_(self._ranks.sum_(part.clone()))
        return sums

    def _gradient_by_hand(self, minibatch: PackedSamples, old_log_std: Tensor) -> tuple[Tensor, ...]:
        """Compute Paceline's gradient, with the ranks agreeing on a learning rate before the backward pass."""
        samples = self._packing.unpack(minibatch)
        mean, value = self._batched.forward((samples.obs["policy"], samples.obs["policy"]))
        kl = self._agree_on_rate(self.distribution.kl_divergence(samples.output, old_log_std, mean))
        parts, (to_mean, (to_log_std,), to_value) = self.distribution.gradient(
            mean, value.squeeze(1), samples, self.config
        )
        self._batched.backward((to_mean, to_value.unsqueeze(1)))
        self._distribution_gradients[0].copy_(to_log_std)
        return *parts, kl

    def _agree_on_rate(self, kl: Tensor) -> Tensor:
        """The main rank computes the learning rate from the KL divergence and broadcasts it."""
        self._start()
        kl = self._ranks.sum_(kl) / self._ranks.size
        if self._ranks.rank.is_main:
            if kl > self.config.desired_kl * 2.0:
                self._rate = max(LEARNING_RATES[0], self._rate / 1.5)
            elif kl < self.config.desired_kl / 2.0 and kl > 0.0:
                self._rate = min(LEARNING_RATES[1], self._rate * 1.5)
        rate = torch.tensor(self._rate)
        dist.broadcast(rate, src=0)
        self._ranks.collectives += 1
        self._rate = rate.item()
        self.adam.learning_rate.fill_(self._rate)
        self._stop()
        return kl

    def _begin_average(self, losses: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        self._start()
        gradients = [gradient.view(-1) for gradient in self._gradients]
        packed = self._ranks.sum_(torch.cat(gradients))
        packed /= self._ranks.size
        offset = 0
        for gradient in gradients:
            gradient.copy_(packed[offset : offset + gradient.numel()])
            offset += gradient.numel()
        self._stop()
        return lambda: losses

    def _clip_and_adapt_lr(self, kl: Tensor) -> tuple[Tensor, ...]:
        return self.flat_parameters.clip(self.config.max_gradient_norm)


SCHEMES = {"Paceline": Paceline, "RSL-RL": RslRl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--num-envs", type=int, default=256, help="total of all ranks")
    parser.add_argument("--iterations", type=int, default=3, help="number of iterations per scheme and round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 128, 64])
    parser.add_argument("--output", default="sync", help="name of the file in bench/results")
    args = parser.parse_args()
    if uneven := [ranks for ranks in args.ranks if args.num_envs % ranks]:
        parser.error(f"--num-envs {args.num_envs} is not a multiple of --ranks {uneven[0]}; RSL-RL needs equal ranks")
    ppo, console, rows = PpoSettings(hidden=tuple(args.hidden)), Console(), []
    sizes = {"num_envs": args.num_envs, "iterations": args.iterations, "rounds": args.rounds}
    facts = {"backend": "gloo", "rsl_rl": version("rsl-rl-lib"), "load_before": os.getloadavg()[0]}
    for ranks in args.ranks:
        console.print(f"ranks: {ranks}, {args.rounds} rounds of {args.iterations} iterations of each scheme")
        rows += compare(ranks, ppo=ppo, **sizes)
    rates.write(args.output, task="cartpole", **facts, **sizes, settings=asdict(ppo), rows=rows)
    console.print(table(rows, args.num_envs))


def compare(ranks: int, num_envs: int, ppo: PpoSettings, iterations: int, rounds: int) -> list[dict[str, Any]]:
    """Return one row per scheme: medians over rounds of the slowest rank."""
    found = on_ranks(ranks, num_envs, ppo, iterations, rounds)
    rows: list[dict[str, Any]] = []
    for scheme in SCHEMES:
        taken_ms = 1e3 / iterations * torch.tensor([rank[scheme]["seconds"] for rank in found], dtype=torch.float64)
        iteration, sync = (median(column.tolist()) for column in taken_ms.amax(0).unbind(-1))
        row = {"ranks": ranks, "scheme": scheme, "collectives": found[0][scheme]["collectives"] / iterations}
        row |= {"iteration_ms": iteration, "sync_ms": sync, "share": sync / iteration}
        paceline = rows[0] if rows else row
        row["iteration_ratio"] = iteration / paceline["iteration_ms"]
        row["sync_ratio"] = sync / paceline["sync_ms"] if row["collectives"] else None
        rows.append(row)
    return rows


def on_ranks(ranks: int, *sizes: Any) -> list[dict[str, Any]]:
    """Run `measure` on all ranks and return their results. Raises the exception of a failed rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        deadline = time.monotonic() + LONGEST_SECONDS
        started = cast("ProcessContext", start_processes(measure, (ranks, port, output, *sizes), ranks, join=False))
        try:
            while not started.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    sys.exit(f"{ranks} ranks did not finish within {LONGEST_SECONDS:.0f} s: reduce --rounds")
        finally:
            for process in started.processes:
                process.kill()
        return json.loads(output.read_text())


def measure(
    index: int, ranks: int, port: int, output: Path, num_envs: int, ppo: PpoSettings, iterations: int, rounds: int
) -> None:
    """Measure both schemes alternately on one rank. The main rank writes the results of all ranks."""
    if ranks > 1:
        launched = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in launched.items()})
    torch.set_num_threads(1)
    group, envs = Group(this_rank(())), shard_ranges(num_envs, ranks)[index]
    learners: dict[str, Paceline] = {}
    for scheme, kind in SCHEMES.items():
        env = RobotEnv(Cartpole(), len(envs), "mujoco", seed=SEED, first_env=envs.start, threads=1)
        learners[scheme] = (kind if group.is_distributed else Paceline)(env, ppo, SEED, group)
        for _ in range(WARMUP_ITERATIONS):
            learners[scheme].learn()
    found: dict[str, dict[str, Any]] = {scheme: {"seconds": []} for scheme in SCHEMES}
    for _ in range(rounds):
        for scheme, learner in learners.items():
            group.all_gather(None)  # barrier before timing
            collectives, sync, began = group.collectives, learner.sync_seconds, time.perf_counter()
            for _ in range(iterations):
                learner.learn()
            found[scheme]["seconds"].append((time.perf_counter() - began, learner.sync_seconds - sync))
            found[scheme]["collectives"] = group.collectives - collectives
    gathered = group.gather(found)
    group.close()
    if gathered:
        output.write_text(json.dumps(gathered))


def table(rows: list[dict[str, Any]], num_envs: int) -> Table:
    columns = ("ranks", "scheme", "collectives", "iteration", "ratio", "sync", "ratio", "share")
    result = Table(*columns, title=f"cartpole, {num_envs} envs on this CPU, per iteration, ms")
    for row in rows:
        sync_ratio = f"{row['sync_ratio']:.2f}" if row["sync_ratio"] else ""
        figures = (f"{row['iteration_ms']:.1f}", f"{row['iteration_ratio']:.2f}", f"{row['sync_ms']:.1f}", sync_ratio)
        result.add_row(str(row["ranks"]), row["scheme"], f"{row['collectives']:g}", *figures, f"{row['share']:.1%}")
    return result


if __name__ == "__main__":
    main()
