import io

import pytest
import torch
from rich.console import Console

from paceline.training.rank_table import MOST_ROWS, RankTable
from paceline.training.ranks import Member


def lines_of(table: RankTable) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("ranks", [2, 64])
def test_the_slowest_ranks_are_shown_and_a_straggler_is_marked(ranks: int):
    table = RankTable([Member(f"node-{n // 8}.example.org", "NVIDIA H200", "", 4096) for n in range(ranks)], restarts=2)
    assert lines_of(table)[-1] == "waiting for the first iteration"
    seconds = torch.tensor([[0.5, 0.3, 0.1, 2048.0]]).repeat(ranks, 1)
    seconds[1, 0] = 0.9  # the others wait for it
    seconds[2:, 2] = 0.15
    table.update(seconds)
    title, _, *rows = lines_of(table)
    assert title == f"{ranks} ranks, 2 restarts"
    assert " ".join(rows[1].split()) == "1 node-0 H200 4096 0.900 s 0.300 s 0.100 s 2.0 GiB slow"
    assert sum("slow" in row for row in rows) == 1
    if ranks > MOST_ROWS:
        summary = "56 faster ranks: 0.650 to 0.650 s without sync. Slow ranks: 1. Median: 0.650 s."
        assert " ".join(rows[MOST_ROWS:]) == summary
    else:
        assert len(rows) == ranks
