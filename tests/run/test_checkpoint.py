"""Checkpoints are complete or absent, execute nothing, and give useful errors."""

import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

from paceline.errors import UserError
from paceline.run import checkpoint

STATE = {
    "learner": {"weights": torch.arange(6.0).view(2, 3), "adam": {"step": torch.tensor(3.0)}},
    "flags": torch.tensor([True, False]),
    "exact": torch.tensor([0.1, float("nan"), float("inf")], dtype=torch.float64),
    "iteration": 7,
    "sums": [{"return": 1.5}],
}


def save(directory: Path, iteration: int, keep: int = 10, best: bool = False) -> Path:
    return checkpoint.save(directory, iteration, STATE, keep, best)


def test_a_loaded_state_equals_the_saved_one(tmp_path: Path):
    state = checkpoint.load(save(tmp_path, 7))
    assert state["iteration"] == 7
    assert state["sums"] == [{"return": 1.5}]
    assert torch.equal(state["learner"]["weights"], STATE["learner"]["weights"])
    assert torch.equal(state["learner"]["adam"]["step"], torch.tensor(3.0))
    assert torch.equal(state["flags"], STATE["flags"])
    assert torch.equal(state["exact"].view(torch.int64), STATE["exact"].view(torch.int64))


def test_the_newest_and_the_best_are_kept(tmp_path: Path):
    for iteration in (1, 2, 3, 4, 5):
        save(tmp_path, iteration, keep=2, best=iteration == 2)
    assert [file.name for file in checkpoint.listing(tmp_path)] == [
        "iteration_00000004.safetensors",
        "iteration_00000005.safetensors",
    ]
    assert checkpoint.load(tmp_path / checkpoint.BEST)["iteration"] == 7
    assert len(list(tmp_path.iterdir())) == 3


def test_a_truncated_checkpoint_is_named_and_the_one_before_it_offered(tmp_path: Path):
    earlier, later = save(tmp_path, 1), save(tmp_path, 2)
    content = later.read_bytes()
    for length in (0, 5, len(content) // 2, len(content) - 1):
        later.write_bytes(content[:length])
        with pytest.raises(UserError, match=f"{later.name} is truncated or damaged.*{earlier.name}"):
            checkpoint.load(later)


def test_a_pickle_is_not_loaded_and_not_executed(tmp_path: Path):
    struck = tmp_path / "struck"

    class Bomb:
        def __reduce__(self):
            return Path.touch, (struck,)

    file = tmp_path / "iteration_00000001.safetensors"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="truncated or damaged"):
        checkpoint.load(file)
    torch.save({"bomb": Bomb()}, file)
    with pytest.raises(UserError, match="truncated or damaged"):
        checkpoint.load(file)
    assert not struck.exists()


def test_another_programs_safetensors_file_is_refused(tmp_path: Path):
    file = tmp_path / "iteration_00000001.safetensors"
    safetensors.torch.save_file({"weights": torch.zeros(2)}, file)
    with pytest.raises(UserError, match=r"is not a Paceline checkpoint.*no earlier one"):
        checkpoint.load(file)


def test_a_damaged_best_points_to_the_newest(tmp_path: Path):
    newest = save(tmp_path, 1, best=True)
    (tmp_path / checkpoint.BEST).write_bytes(b"")
    with pytest.raises(UserError, match=f"truncated or damaged.*use the newest, .*{newest.name}"):
        checkpoint.load(tmp_path / checkpoint.BEST)


def test_a_missing_checkpoint_is_not_called_damaged(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.load(tmp_path / "iteration_00000001.safetensors")


HEADER = {"format": "paceline-checkpoint", "version": "2", "values": "{}"}


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"version": None}, (), "has format version 'no number', this Paceline reads 2"),
        ({"version": "1"}, (), "has format version '1'"),
        ({"values": None}, (), "is truncated or damaged"),
        ({"values": "5"}, (), "is truncated or damaged .it holds 5"),
        ({"values": "[1]"}, (), "is truncated or damaged .it holds .1"),
        ({"values": "[" * 100_000}, (), "is truncated or damaged .it is nested too deep"),
        ({"values": '{"a": ' + "9" * 1000 + "}"}, (), "a number of 3322 bits"),
        ({"values": '{"a": 1, "a|b": 2}'}, (), "'a|b' is part of a value"),
        ({"values": '{"a|b": 1, "a": 2}'}, (), "'a' is there twice"),
        ({"values": '{"a|b": 1}'}, ("a",), "'a|b' is part of a value"),
        ({"values": '{"a": 1}'}, ("a",), "'a' is there twice"),
        ({}, ("a", "a|b"), "'a|b' is part of a value"),
        ({}, ("|" * 1000,), "is nested too deep"),
    ],
)
def test_a_crafted_checkpoint_is_refused_in_one_line(
    changes: dict[str, str | None], tensors: tuple[str, ...], message: str, tmp_path: Path
):
    file = tmp_path / "iteration_00000001.safetensors"
    header = {key: value for key, value in (HEADER | changes).items() if value is not None}
    safetensors.torch.save_file({name: torch.zeros(2) for name in tensors}, file, header)
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load(file)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000


def test_files_that_are_no_checkpoints_are_not_listed(tmp_path: Path):
    (tmp_path / "iteration_abc.safetensors").write_text("")
    (tmp_path / "iteration_00000007.safetensors").mkdir()
    os.mkfifo(tmp_path / "iteration_00000008.safetensors")
    save(tmp_path, 99999999)
    newest = save(tmp_path, 100000000)
    assert len(checkpoint.listing(tmp_path)) == 2
    assert checkpoint.newest(tmp_path) == newest
    checkpoint.set_aside_later(tmp_path, 99999999)
    assert [file.name for file in checkpoint.listing(tmp_path)] == ["iteration_99999999.safetensors"]


def test_a_best_without_an_iteration_is_set_aside(tmp_path: Path):
    save(tmp_path, 1, best=True)
    checkpoint.set_aside_later(tmp_path, 1)
    assert not (tmp_path / checkpoint.BEST).exists()
