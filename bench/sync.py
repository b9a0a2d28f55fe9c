"""What ranks that train together spend on synchronising: Paceline's scheme beside RSL-RL's, in turns, as ratios.

    .venv/bin/python bench/sync.py

Cartpole on this CPU, in real processes over gloo, with one thread each. Rollout and update are Paceline's on both
sides; only the exchange differs. Paceline takes one sum at the head of an update and one per minibatch. RSL-RL 5.5.1
takes three collectives per minibatch (divergence, learning rate, gradient) and three for each network's normaliser.
Here those of a minibatch follow one another; RSL-RL takes the first two before it differentiates, where ranks wait for
each other once more.

Synchronising is all that lies between a rank's own numbers and the first use of everyone's: packing, the collectives,
which on a CPU block, and unpacking. It includes waiting for slower ranks. So where there are more ranks than cores,
they take turns, and most of that time is others' work: compare the schemes there, and not the share.
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
from typing import Any, ParamSpec, TypeVar

import rates
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.config import LEARNING_RATES, PpoConfig
from paceline.distributed.group import Group
from paceline.distributed.rank import this_rank
from paceline.distributed.worlds import shares
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.tasks.cartpole import Cartpole

SEED = 0
WARMUP_ITERATIONS = 2
LONGEST_SECONDS = 1200.0
"""By when all ranks of a measurement must be done."""

P = ParamSpec("P")
T = TypeVar("T")


class RslRlExchange(Ppo):
    """Paceline's PPO, except that its ranks exchange what RSL-RL's do, in as many collectives."""

    def __init__(self, env: RobotEnv, config: PpoConfig, seed: int, group: Group):
        super().__init__(env, config, seed, group)
        self._ranks, self._group = group, copy(group)
        self._group.sum_ = self._sum_moments
        self._rate = config.learning_rate
        parameters = (self.log_std, *self.actor.parameters(), *self.critic.parameters())
        self._gradients = [self._flat.together(parameter)[1] for parameter in parameters]

    def _sum_moments(self, tensor: Tensor) -> Tensor:
        """In place of the head's sum: each network's normaliser sums its count, means and variances, one by one. The
        rest stays the rank's own, scaled as if the others had the same."""
        head = tensor * self._ranks.size
        if self._ranks.alone:
            return head
        (count, _, own, _), (_, _, summed, _) = self._take_head_apart(tensor), self._take_head_apart(head)
        for network in (0, -1):  # the critic has a normaliser of its own even where it sees what the actor sees
            self._ranks.sum_(count.clone())
            for part, total in zip(own[network], summed[network], strict=True):
                total.copy_(self._ranks.sum_(part.clone()))
        return head

    def _over_all_ranks(self, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        *own_losses, kl = losses
        kl = self._ranks.sum_(kl) / self._ranks.size
        self._learning_rate.fill_(self._agreed_rate(kl))

        gradients = [gradient.view(-1) for gradient in self._gradients]
        packed = self._ranks.sum_(torch.cat(gradients))
        packed /= self._ranks.size
        offset = 0
        for gradient in gradients:
            gradient.copy_(packed[offset : offset + gradient.numel()])
            offset += gradient.numel()
        return *own_losses, kl

    def _agreed_rate(self, kl: Tensor) -> float:
        """The main rank reads the divergence and decides; the others are told, and each reads the answer."""
        if self._ranks.rank.is_main:
            if kl > self.config.desired_kl * 2.0:
                self._rate = max(LEARNING_RATES[0], self._rate / 1.5)
            elif kl < self.config.desired_kl / 2.0 and kl > 0.0:
                self._rate = min(LEARNING_RATES[1], self._rate * 1.5)
        message = torch.tensor(self._rate)
        self._ranks.collectives += 1
        dist.broadcast(message, src=0)
        self._rate = message.item()
        return self._rate

    def _clip_and_adapt(self, kl: Tensor) -> tuple[Tensor, ...]:
        if self._ranks.alone:
            return super()._clip_and_adapt(kl)
        return self._flat.clip(self.config.max_gradient_norm)


SCHEMES: dict[str, Callable[[RobotEnv, PpoConfig, int, Group], Ppo]] = {"Paceline": Ppo, "RSL-RL": RslRlExchange}


class Stopwatch:
    """Seconds a learner spends between its own numbers and everyone's: twice an exchange's ends meet its work."""

    def __init__(self, learner: Ppo):
        self.seconds, self._began = 0.0, 0.0
        learner._head, learner._finish = self._start_after(learner._head), self._stop_before(learner._finish)
        learner._differentiate = self._start_after(learner._differentiate)
        learner._tame = self._stop_before(learner._tame)

    def _start_after(self, work: Callable[P, T]) -> Callable[P, T]:
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            result = work(*args, **kwargs)
            self._began = time.perf_counter()
            return result

        return wrapped

    def _stop_before(self, work: Callable[P, T]) -> Callable[P, T]:
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            self.seconds += time.perf_counter() - self._began
            return work(*args, **kwargs)

        return wrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--num-envs", type=int, default=256, help="of all ranks together")
    parser.add_argument("--iterations", type=int, default=10, help="of each scheme in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 128, 64])
    parser.add_argument("--output", default="sync", help="name of the file in bench/results")
    args = parser.parse_args()
    if args.num_envs < max(args.ranks):
        parser.error(f"--num-envs {args.num_envs} is less than one for each of {max(args.ranks)} ranks")
    ppo, console, rows = PpoConfig(hidden=tuple(args.hidden)), Console(), []
    for ranks in args.ranks:
        console.print(f"{ranks} ranks: {args.rounds} rounds of {args.iterations} iterations of each scheme")
        rows += compare(ranks, args.num_envs, ppo, args.iterations, args.rounds)
    sizes = {"num_envs": args.num_envs, "iterations": args.iterations, "rounds": args.rounds}
    peer = {"rsl-rl-lib": version("rsl-rl-lib")}
    rates.write(args.output, task="cartpole", backend="gloo", **sizes, peer=peer, settings=asdict(ppo), rows=rows)
    console.print(table(rows, args.num_envs))


def compare(ranks: int, num_envs: int, ppo: PpoConfig, iterations: int, rounds: int) -> list[dict[str, Any]]:
    """One row for each scheme: medians over rounds, of the slowest rank in each."""
    found = on_ranks(ranks, num_envs, ppo, iterations, rounds)
    rows: list[dict[str, Any]] = []
    for scheme in SCHEMES:
        taken = torch.tensor([rank[scheme]["seconds"] for rank in found], dtype=torch.float64) * 1e3 / iterations
        iteration, sync = (median(column.tolist()) for column in taken.amax(0).unbind(-1))
        row = {"ranks": ranks, "scheme": scheme, "collectives": found[0][scheme]["collectives"] // iterations}
        row |= {"iteration_ms": iteration, "sync_ms": sync, "share": sync / iteration}
        first = rows[0] if rows else row
        row["iteration_ratio"] = iteration / first["iteration_ms"]
        row["sync_ratio"] = sync / first["sync_ms"] if row["collectives"] else None
        rows.append(row)
    return rows


def on_ranks(ranks: int, *sizes: Any) -> list[dict[str, Any]]:
    """What `measure` found, by rank; an exception in one of them is raised here."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port, output = probe.getsockname()[1], Path(folder) / "found.json"
        probe.close()
        started = processes.start_processes(measure, (ranks, port, output, *sizes), ranks, join=False)
        deadline = time.monotonic() + LONGEST_SECONDS
        try:
            while not started.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    sys.exit(f"{ranks} ranks were not done in {LONGEST_SECONDS:.0f} s: give fewer --iterations")
        finally:
            for process in started.processes:
                process.kill()
        return json.loads(output.read_text())


def measure(
    index: int, ranks: int, port: int, output: Path, num_envs: int, ppo: PpoConfig, iterations: int, rounds: int
) -> None:
    """Both schemes in turns, as one of the ranks. One rank alone has no launcher, and exchanges nothing."""
    if ranks > 1:
        launched = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in launched.items()})
    torch.set_num_threads(1)
    group, worlds = Group(this_rank(())), shares(num_envs, ranks)[index]
    learners, watches, found = {}, {}, {}
    for scheme, make in SCHEMES.items():
        env = RobotEnv(Cartpole(), len(worlds), "mujoco", seed=SEED, first_world=worlds.start, threads=1)
        learners[scheme] = make(env, ppo, SEED, group)
        learners[scheme]._update_threads = lambda: 1  # by default one rank alone takes more cores than it does here
        watches[scheme] = Stopwatch(learners[scheme])
        found[scheme] = {"seconds": []}
        for _ in range(WARMUP_ITERATIONS):
            learners[scheme].learn()
    for _ in range(rounds):
        for scheme, learner in learners.items():
            group.everyone(None)  # so that no rank's clock runs while another finishes the scheme before
            before, collectives, began = watches[scheme].seconds, group.collectives, time.perf_counter()
            for _ in range(iterations):
                learner.learn()
            found[scheme]["seconds"].append((time.perf_counter() - began, watches[scheme].seconds - before))
            found[scheme]["collectives"] = group.collectives - collectives
    everyones = group.to_main(found)
    group.close()
    if everyones:
        output.write_text(json.dumps(everyones))


def table(rows: list[dict[str, Any]], num_envs: int) -> Table:
    title = f"cartpole, {num_envs} worlds, ms per iteration (ratios: to Paceline)"
    result = Table("ranks", "scheme", "collectives", "iteration", "ratio", "sync", "ratio", "share", title=title)
    for row in rows:
        sync_ratio = f"{row['sync_ratio']:.2f}" if row["sync_ratio"] else ""
        figures = (f"{row['iteration_ms']:.1f}", f"{row['iteration_ratio']:.2f}", f"{row['sync_ms']:.1f}", sync_ratio)
        counts = (str(row["ranks"]), row["scheme"], str(row["collectives"]))
        result.add_row(*counts, *figures, f"{row['share']:.1%}")
    return result


if __name__ == "__main__":
    main()
