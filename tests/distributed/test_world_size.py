"""A checkpoint of any number of ranks continues with any other number."""

import dataclasses
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.distributed.sharding import shard_ranges
from paceline.errors import UserError
from paceline.run import checkpoint, checkpoint_writer
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import train
from tests.cameras.small import SMALL_ENCODER, SMALL_RUN
from tests.distributed.ranks import on_ranks

CONFIG = TrainConfig(
    task="cartpole",
    env={"episode_seconds": 0.4},
    total_envs=10,
    seed=3,
    max_iterations=2,
    logger=("none",),
    settings={"horizon": 8, "epochs": 2, "minibatches": 2, "hidden": (16,)},
)


IMAGES = SMALL_RUN | {"settings": CONFIG.settings | SMALL_ENCODER}


def go_on(path: Path, iterations: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Train a run, or two more iterations of it, on the ranks of this process's launcher."""
    run = RunDir(path)
    resume_from = checkpoint.newest(run.checkpoints) if iterations > 2 else None
    config = dataclasses.replace(CONFIG, max_iterations=iterations, **changes)
    return train(config, run, Console(quiet=True), resume_from)


def go_on_with_shards(*arguments: Any) -> dict[str, Any]:
    checkpoint_writer.SHARD_BYTES = 0
    return go_on(*arguments)


def newest(path: Path) -> dict[str, Any]:
    return checkpoint.load(checkpoint.newest(RunDir(path).checkpoints))


@pytest.mark.parametrize(
    ("changes", "changing_ranks", "work"),
    [({}, (4, 1, 3, 2, 4), go_on_with_shards), (IMAGES, (2, 1, 2), go_on)],
    ids=["vectors", "images"],
)
def test_a_run_with_a_changing_number_of_ranks_is_as_one_of_a_single_rank(
    changes: dict[str, Any], changing_ranks: tuple[int, ...], work: Callable[..., Any], tmp_path: Path
):
    single_rank, changing = tmp_path / "single_rank", tmp_path / "changing"
    for iterations, ranks in zip(count(2, 2), changing_ranks, strict=False):
        arguments = changing, iterations, changes
        results = on_ranks(ranks, work, *arguments) if ranks > 1 else [go_on(*arguments)]
        assert [result["total_envs"] for result in results] == [10] * ranks
        assert [result["num_envs"] for result in results] == [len(part) for part in shard_ranges(10, ranks)]
        go_on(single_rank, iterations, changes)
        found, expected = newest(changing), newest(single_rank)
        has_shards = any((changing / "checkpoints").glob(f"iteration_{iterations:08d}.envs/rank_0000.safetensors"))
        assert has_shards == (work is go_on_with_shards and ranks > 1)
        for name, weights in expected["learner"]["networks"].items():
            torch.testing.assert_close(found["learner"]["networks"][name], weights, rtol=2e-3, atol=2e-5)
        for name, tensor in expected["learner"]["envs"].items():
            torch.testing.assert_close(found["learner"]["envs"][name], tensor, rtol=1e-3, atol=1e-4)
        for counter in ("iteration", "steps", "epochs"):
            assert found["learner"][counter] == expected["learner"][counter]
        assert found["totals"]["env_steps"] == expected["totals"]["env_steps"] == iterations * 8 * 10


def test_another_number_of_envs_is_refused_with_the_remedy(tmp_path: Path):
    go_on(tmp_path / "run", 2, {})
    with pytest.raises(UserError, match="has 10 envs, this run 12: use --num-envs 10"):
        go_on(tmp_path / "run", 4, {"total_envs": 12})


def test_ranks_without_an_env_are_refused(tmp_path: Path):
    for refusal in on_ranks(2, refused, tmp_path / "run"):
        assert refusal == "1 env for 2 ranks: each rank needs at least one"
    assert not (tmp_path / "run").exists()


def refused(path: Path) -> str:
    try:
        go_on(path, 2, {"total_envs": 1})
    except UserError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(("total", "ranks"), [(10, 1), (10, 3), (10, 4), (7, 7)])
def test_shares_are_consecutive_complete_and_even(total: int, ranks: int):
    found = shard_ranges(total, ranks)
    assert [env for part in found for env in part] == list(range(total))
    assert max(map(len, found)) - min(map(len, found)) <= 1
