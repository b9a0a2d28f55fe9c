"""Write the checkpoints of a run while training continues."""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.distributed.group import Group
from paceline.distributed.sharding import concatenate, copy_to_host, num_bytes, shard_ranges
from paceline.process.background import Background
from paceline.run import checkpoint

SHARD_BYTES = 16 * 2**20
"""Size of the states of all envs from which on each rank writes its own shard. Smaller states are gathered on the main
rank, which takes less than an iteration (bench/checkpoints.py)."""
# Time between two checks whether all ranks have written their shards, s.
_POLL_SECONDS = 0.1
# Time for the last checkpoint to be written after a failure, s.
_FAILURE_SECONDS = 5.0


class CheckpointWriter:
    """Writes checkpoints in a thread. Training waits only until the state is copied to the host and, if it is small,
    gathered on the main rank. A large state of the envs is written by all ranks, each its shard, if they share the
    directory."""

    def __init__(self, directory: Path, keep: int, group: Group, warn: Callable[[str], object]):
        self._directory, self._keep, self._group, self._warn = directory, keep, group, warn
        self._pending: Background[None] | None = None
        self._in_shards: bool | None = None
        """True if ranks write shards; None before the first checkpoint."""

    def save(self, iteration: int, state: dict[str, Any], best: bool) -> None:
        """Begin to write a checkpoint, see `checkpoint.save`. All ranks must call this, each with the state of its
        envs. Wait for the previous checkpoint, and raise its error."""
        self.wait()
        learner = copy_to_host(state["learner"])
        envs = learner.pop("envs")
        if self._in_shards is None:
            self._in_shards = self._choose_shards(num_bytes(envs))
        if self._in_shards:
            state = state | {"learner": learner}
            self._pending = Background(lambda: self._write_shard(iteration, state, envs, best))
        elif shards := self._group.gather(envs):
            self._pending = Background(
                lambda: self._write(iteration, state | {"learner": learner | {"envs": concatenate(shards)}}, best)
            )

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raise the error if that failed."""
        if self._pending:
            pending, self._pending = self._pending, None
            pending.result()

    def wait_after_failure(self) -> None:
        """Wait for the last checkpoint, but only for seconds. If it is not written, the one before it stays."""
        if self._pending:
            with suppress(Exception):
                self._pending.result(_FAILURE_SECONDS)

    def _write(self, iteration: int, state: dict[str, Any], best: bool, shards: tuple[int, ...] = ()) -> None:
        checkpoint.save(self._directory, iteration, state, self._keep, best, shards)

    def _write_shard(self, iteration: int, state: dict[str, Any], envs: dict[str, Any], best: bool) -> None:
        """Write the shard of this rank. The main rank then waits for all shards and completes the checkpoint."""
        rank, watch, written = self._group.rank, self._group.watch, f"shards/{iteration}"
        assert watch
        checkpoint.save_shard(self._directory, iteration, rank.index, envs)
        watch.count(written)
        if rank.is_main:
            while watch.count(written, 0) < self._group.size:
                time.sleep(_POLL_SECONDS)
            envs_of_ranks = shard_ranges(state["num_envs"], self._group.size)
            self._write(iteration, state, best, tuple(map(len, envs_of_ranks)))

    def _choose_shards(self, own_bytes: int) -> bool:
        """Return on all ranks whether each writes its own shard."""
        total_bytes = sum(self._group.all_gather(own_bytes))
        if self._group.size == 1 or total_bytes < SHARD_BYTES:
            return False
        is_shared = self._is_directory_shared()
        if not is_shared:
            self._warn(
                f"The ranks do not share the directory {self._directory}: each checkpoint sends "
                f"{total_bytes / 2**20:.0f} MiB of env states to the main rank. Use a --run-dir on shared storage."
            )
        return is_shared

    def _is_directory_shared(self) -> bool:
        """Return on all ranks whether the main rank sees files that the others write."""
        name = self._group.broadcast(secrets.token_hex(8))
        probes = [self._directory / f".{name}.{index}.part" for index in range(self._group.size)]
        own = probes[self._group.rank.index]
        with suppress(OSError):
            own.touch()
        self._group.all_gather(None)  # all ranks have written
        is_shared = self._group.broadcast(all(probe.exists() for probe in probes))
        with suppress(OSError):
            own.unlink(missing_ok=True)
        return is_shared
