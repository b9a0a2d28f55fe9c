"""Measure how long training waits for a checkpoint, and how long its write takes.

    python bench/checkpoints.py [--device cpu|cuda] [--num-envs 1024 4096 16384 65536] [--ranks 1 2] [--directory DIR]

Each row is a number of Go1 envs of all ranks, a number of ranks and a scheme: `gather` sends the states of all envs to
the main rank, `shards` lets each rank write its own. The states are those of `--real-envs` envs per rank, repeated. The
schemes alternate in one run of this script; each number is the median of `--rounds` checkpoints on the slowest rank:

    stall_seconds    time in `CheckpointWriter.save`: training waits (copy to the host, gather)
    write_seconds    from then on until the checkpoint is complete: training continues
    load_seconds     time until each rank has the states of its envs again

`iteration_seconds` is the time of one iteration of PPO with `--real-envs` envs per rank, without and with a write in
the background. With --device cuda all ranks share one GPU.
"""

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, cast

import rates
import torch
from torch.multiprocessing.spawn import ProcessContext, start_processes

from paceline.device.cpu import tune_torch
from paceline.distributed.group import Group
from paceline.distributed.rank import this_rank
from paceline.distributed.sharding import num_bytes, shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.run import checkpoint, checkpoint_writer
from paceline.run.checkpoint_writer import CheckpointWriter
from paceline.tasks.velocity.go1_velocity import Go1Velocity

SCHEMES = {"gather": 2**62, "shards": 0}
"""Values of `SHARD_BYTES`."""
ITERATIONS = count(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="Device of the envs.")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1024, 4096, 16384, 65536], help="Total envs.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="Numbers of ranks.")
    parser.add_argument("--real-envs", type=int, default=32, help="Simulated envs per rank.")
    parser.add_argument("--horizon", type=int, default=4, help="Steps of a rollout.")
    parser.add_argument("--rounds", type=int, default=5, help="Checkpoints of each row.")
    parser.add_argument(
        "--directory", default=None, help="Folder for the checkpoints; default: the folder of tempfile."
    )
    parser.add_argument("--output", default="checkpoints", help="Name of the file in bench/results.")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            found = Path(folder) / "rows.pt"
            port = _free_port()
            started = start_processes(measure, (ranks, port, folder, found, arguments), ranks, join=False)
            while not cast("ProcessContext", started).join():
                pass
            rows += torch.load(found)
    rates.write(arguments.output, load_average=os.getloadavg()[0], **vars(arguments), rows=rows)


def measure(index: int, ranks: int, port: int, folder: str, found: Path, arguments: argparse.Namespace) -> None:
    """Measure all rows of a number of ranks. The main rank prints and stores them."""
    if ranks > 1:
        launched = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in launched.items()})
    rank = this_rank(() if arguments.device == "cpu" else (0,) * ranks)
    tune_torch(rank.device)
    group, total = Group(rank), ranks * arguments.real_envs
    first = shard_ranges(total, ranks)[index].start
    env = RobotEnv(Go1Velocity(), arguments.real_envs, "auto", rank.device, first_env=first)
    learner = Ppo(env, PpoSettings(horizon=arguments.horizon, minibatches=4), 0, group)
    for _ in range(4):
        learner.learn()  # compiles and captures graphs
    rows = []
    for num_envs in arguments.num_envs:
        for scheme in SCHEMES if ranks > 1 else ("gather",):
            directory = Path(folder) / f"{num_envs}_{scheme}"
            directory.mkdir(exist_ok=True)
            rows.append(measure_row(group, learner, num_envs, scheme, directory, arguments.rounds))
    if rank.is_main:
        torch.save(rows, found)
    group.all_gather(None)
    group.close()


def measure_row(group: Group, learner: Ppo, num_envs: int, scheme: str, directory: Path, rounds: int) -> dict[str, Any]:
    """Return the medians of `rounds` rounds on the slowest rank. A round writes two checkpoints."""
    checkpoint_writer.SHARD_BYTES = SCHEMES[scheme]
    writer, parts = CheckpointWriter(directory, 2, group, print), shard_ranges(num_envs, group.size)
    state = {"learner": repeated(learner.state(), len(parts[0]) // learner.env.num_envs), "num_envs": num_envs}
    timings: dict[str, list[float]] = {}

    def load(iteration: int) -> None:
        file = directory / f"iteration_{iteration:08d}.safetensors"
        checkpoint.load_envs_of_rank(file, parts, group)

    for _ in range(rounds):
        iteration = next(ITERATIONS)
        group.all_gather(None)  # barrier before timing
        _time(timings, "stall_seconds", partial(writer.save, iteration, state, best=False))
        _time(timings, "write_seconds", writer.wait)
        group.all_gather(None)  # the main rank has written the file
        _time(timings, "load_seconds", partial(load, iteration))
        _time(timings, "iteration_seconds", learner.learn)
        writer.save(next(ITERATIONS), state, best=False)
        _time(timings, "iteration_seconds_during_write", learner.learn)
        writer.wait()
    own = {name: median(values) for name, values in timings.items()}
    found = group.all_gather(own | {"bytes": num_bytes(state["learner"]["envs"])})
    row = {"envs": num_envs, "ranks": group.size, "scheme": scheme, "bytes": sum(each["bytes"] for each in found)}
    row |= {name: round(max(each[name] for each in found), 5) for name in own}
    if group.rank.is_main:
        print(row, flush=True)
    return row


def repeated(state: dict[str, Any], times: int) -> dict[str, Any]:
    """Return a state of a learner with `times` as many envs."""
    envs = {
        name: tensor.repeat(times, *[1] * (tensor.dim() - 1)) if tensor.dim() else tensor
        for name, tensor in state["envs"].items()
    }
    return state | {"envs": envs}


def _time(timings: dict[str, list[float]], name: str, work: Callable[[], object]) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    timings.setdefault(name, []).append(time.perf_counter() - began)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
