"""Checkpoints are written while training continues, by the main rank or in shards by all ranks."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.errors import UserError
from paceline.run import checkpoint, checkpoint_writer
from paceline.run.checkpoint_writer import CheckpointWriter
from paceline.run.directory import RunDir
from paceline.run.mirror import Mirror, download_run
from paceline.run.storage_process import FolderProcess
from tests.distributed.ranks import on_ranks
from tests.states import flat

ENVS = {"qpos": torch.randn(7, 3), "level": torch.arange(7), "steps": torch.tensor(40)}


def save_in_shards(directory: Path, iteration: int, keep: int = 10, best: bool = False) -> Path:
    """Write a checkpoint of 7 envs in shards of 4 and 3."""
    for rank, envs in enumerate((slice(4), slice(4, 7))):
        shard = {name: tensor[envs] if tensor.dim() else tensor for name, tensor in ENVS.items()}
        checkpoint.save_shard(directory, iteration, rank, shard)
    state = {"learner": {"iteration": iteration, "weights": torch.ones(2)}}
    return checkpoint.save(directory, iteration, state, keep, best, shards=(4, 3))


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def test_any_range_of_envs_is_read_from_shards_and_from_one_file(tmp_path: Path):
    (tmp_path / "one").mkdir()
    in_shards = save_in_shards(tmp_path, 1)
    in_one = checkpoint.save(tmp_path / "one", 1, {"learner": {"iteration": 1, "envs": ENVS}}, 1, best=False)
    for envs in (range(7), range(2), range(3, 6), range(4, 7), range(6, 7)):
        for file in (in_shards, in_one):
            found = checkpoint.load_envs(file, envs)
            assert found["steps"] == 40
            for name in ("qpos", "level"):
                assert torch.equal(found[name], ENVS[name][envs.start : envs.stop])
    assert flat(checkpoint.load(in_shards)).keys() == {f"learner/{name}" for name in ("iteration", "weights")} | {
        f"learner/envs/{name}" for name in ENVS
    }
    assert checkpoint.load(in_shards, with_envs=False)["learner"].keys() == {"iteration", "weights"}


def test_the_shards_of_the_newest_and_the_best_are_kept(tmp_path: Path):
    for iteration in (1, 2, 3, 4, 5):
        save_in_shards(tmp_path, iteration, keep=2, best=iteration == 2)
    assert folders(tmp_path) == [f"iteration_0000000{iteration}.envs" for iteration in (2, 4, 5)]
    best = checkpoint.load(tmp_path / checkpoint.BEST)["learner"]
    assert best["iteration"] == 2
    assert torch.equal(best["envs"]["qpos"], ENVS["qpos"])


def test_shards_without_a_checkpoint_are_removed_at_the_next_start_and_later_ones_set_aside(tmp_path: Path):
    for iteration in (1, 2, 3):
        save_in_shards(tmp_path, iteration, best=iteration == 3)
    checkpoint.save_shard(tmp_path, 4, 0, ENVS)
    assert checkpoint.newest(tmp_path).stem == "iteration_00000003"
    checkpoint.set_aside_later(tmp_path, 1)
    assert folders(tmp_path) == [
        "iteration_00000001.envs",
        "iteration_00000002.envs.superseded",
        "iteration_00000003.envs.superseded",
    ]
    assert not (tmp_path / checkpoint.BEST).exists()
    save_in_shards(tmp_path, 2)
    checkpoint.set_aside_later(tmp_path, 1)
    assert [file.name for file in checkpoint.listing(tmp_path)] == ["iteration_00000001.safetensors"]


def test_a_missing_or_damaged_shard_is_named_and_the_checkpoint_before_offered(tmp_path: Path):
    earlier, later = save_in_shards(tmp_path, 1), save_in_shards(tmp_path, 2)
    shard = tmp_path / "iteration_00000002.envs/rank_0001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"{later} has a shard, {shard}, that is truncated or damaged.*{earlier.name}"):
        checkpoint.load_envs(later, range(5, 6))
    shard.unlink()
    with pytest.raises(UserError, match=f"{later} has a shard, {shard}, that cannot be read.*{earlier.name}"):
        checkpoint.load(later)
    assert checkpoint.load(later, with_envs=False)["learner"]["iteration"] == 2
    with pytest.raises(FileNotFoundError, match=r"iteration_00000003\.envs/rank_0000"):
        checkpoint.save(tmp_path, 3, {}, 10, best=False, shards=(4, 3))
    assert checkpoint.newest(tmp_path) == later


@pytest.mark.parametrize("shards", ['{"a": 1}', "[-1]", '["4"]', "[4.5]", "7"])
def test_a_crafted_list_of_shards_is_refused(shards: str, tmp_path: Path):
    file = save_in_shards(tmp_path, 1)
    file.write_bytes(file.read_bytes().replace(b"[4, 3]", shards[:6].ljust(6).encode()))
    with pytest.raises(UserError, match="is truncated or damaged"):
        checkpoint.load_envs(file)


def test_a_mirror_has_the_shards_of_its_checkpoints(tiny_run: Path, tmp_path: Path):
    shutil.copytree(tiny_run, tmp_path / "run")
    run, mirror = RunDir(tmp_path / "run"), Mirror(f"file://{tmp_path}/mirror", print)
    for iteration in (3, 4):
        save_in_shards(run.checkpoints, iteration, keep=2, best=iteration == 3)
    checkpoint.save_shard(run.checkpoints, 5, 0, ENVS)
    mirror.claim(run)
    mirror.start(run)
    assert mirror.finish(stop_requested=lambda: False) is None
    sums = (tmp_path / "mirror/checkpoints/SHA256SUMS").read_text()
    assert "iteration_00000004.envs/rank_0001.safetensors" in sums
    copy = download_run(mirror.url, tmp_path / "copy")
    expected = flat(checkpoint.load(checkpoint.newest(run.checkpoints)))
    found = flat(checkpoint.load(checkpoint.newest(copy.checkpoints)))
    assert expected.keys() == found.keys()
    assert torch.equal(found["learner/envs/qpos"], ENVS["qpos"])
    assert checkpoint.load(copy.checkpoints / checkpoint.BEST)["learner"]["iteration"] == 3


def test_a_checkpoint_that_is_removed_during_its_upload_does_not_stay_in_the_mirror(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(tiny_run, tmp_path / "run")
    run, upload = RunDir(tmp_path / "run"), FolderProcess.upload
    oldest = checkpoint.listing(run.checkpoints)[0]

    def upload_too_late(folder: FolderProcess, file: Path, name: str) -> str | None:
        checksum = upload(folder, file, name)
        if file == oldest:
            file.unlink()
            return None
        return checksum

    monkeypatch.setattr(FolderProcess, "upload", upload_too_late)
    mirror = Mirror(f"file://{tmp_path}/mirror", print)
    mirror.claim(run)
    mirror.start(run)
    assert mirror.finish(stop_requested=lambda: False) is None
    assert not (tmp_path / "mirror/checkpoints" / oldest.name).exists()
    assert (tmp_path / "mirror/run.yaml").exists()


def state(iteration: int, envs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"num_envs": 7, "learner": {"iteration": iteration, "envs": envs}}


def test_training_continues_during_a_write_and_the_state_is_that_of_the_call(tmp_path: Path):
    # Opening this pipe blocks the writer until it is read here.
    pipe = tmp_path / f".iteration_00000001.safetensors.{os.getpid()}.part"
    os.mkfifo(pipe)
    writer, envs = CheckpointWriter(tmp_path, 3, Group(Rank()), print), {"qpos": torch.zeros(7, 3)}
    writer.save(1, state(1, envs), best=False)
    writer.check()
    envs["qpos"] += 1.0
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    # A pipe cannot be flushed to a disk.
    with pytest.raises(OSError, match=r"Invalid argument: '.*iteration_00000001\.safetensors'"):
        writer.save(2, state(2, envs), best=False)
    reader.join()
    saved = tmp_path / "received.safetensors"
    saved.write_bytes(received[0])
    assert not checkpoint.load_envs(saved)["qpos"].any()
    writer.save(3, state(3, envs), best=False)
    writer.wait()
    assert checkpoint.load(checkpoint.newest(tmp_path))["learner"]["iteration"] == 3


def save_on_rank(directory: Path, is_shared: bool) -> list[str]:
    checkpoint_writer.SHARD_BYTES, printed = 0, list[str]()
    group = Group(this_rank(()))
    own = directory if is_shared else directory / str(group.rank.index)
    own.mkdir(exist_ok=True)
    writer = CheckpointWriter(own, 2, group, printed.append)
    rows = (range(4), range(4, 7))[group.rank.index]
    for iteration in (1, 2, 3):
        envs = {"qpos": ENVS["level"][rows.start : rows.stop] + iteration, "steps": torch.tensor(iteration)}
        writer.save(iteration, state(iteration, envs), best=False)
    writer.wait()
    group.all_gather(None)
    group.close()
    return printed


@pytest.mark.parametrize("is_shared", [True, False])
def test_ranks_write_shards_only_into_a_directory_that_they_share(is_shared: bool, tmp_path: Path):
    printed = on_ranks(2, save_on_rank, tmp_path, is_shared)
    directory = tmp_path if is_shared else tmp_path / "0"
    assert [len(lines) for lines in printed] == ([0, 0] if is_shared else [1, 1])
    assert len(checkpoint.listing(directory)) == 2
    assert [len(list((directory / name).iterdir())) for name in folders(directory)] == ([2, 2] if is_shared else [])
    assert not list(tmp_path.rglob("*.part"))
    found = checkpoint.load_envs(checkpoint.newest(directory))
    assert torch.equal(found["qpos"], torch.arange(7) + 3)
    assert found["steps"] == 3


def load_on_rank(directory: Path, is_shared: bool) -> tuple[list[float], int]:
    """Return the states that a rank loads, and the number of exchanges that this takes."""
    group = Group(this_rank(()))
    file = (directory if is_shared else directory / str(group.rank.index)) / "iteration_00000001.safetensors"
    assert group.watch
    before = group.watch.exchanges
    envs = checkpoint.load_envs_of_rank(file, (range(4), range(4, 7)), group)
    exchanges = group.watch.exchanges - before
    group.close()
    return envs["level"].tolist(), exchanges


@pytest.mark.parametrize("is_shared", [True, False])
def test_ranks_that_share_the_directory_read_their_own_envs(is_shared: bool, tmp_path: Path):
    for index in range(2):
        directory = tmp_path if is_shared else tmp_path / str(index)
        directory.mkdir(exist_ok=True)
        # On another machine, an earlier run may have left a file of the same name.
        envs = ENVS if is_shared or index == 0 else {"level": torch.full((7,), 9.0)}
        checkpoint.save(directory, 1, {"learner": {"envs": envs}}, keep=1, best=False)
    (first, one), (second, other) = on_ranks(2, load_on_rank, tmp_path, is_shared)
    assert (first, second) == (ENVS["level"][:4].tolist(), ENVS["level"][4:].tolist())
    assert (one, other) == ((1, 1) if is_shared else (2, 2))


KILLED = """
import sys, torch
from pathlib import Path
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.run import checkpoint
from paceline.run.checkpoint_writer import CheckpointWriter
directory, envs, iteration = Path(sys.argv[1]), {"qpos": torch.randn(500_000)}, 0
writer = CheckpointWriter(directory, 2, Group(Rank()), print)
while True:
    iteration += 1
    learner = {"iteration": iteration}
    if sys.argv[2] == "shards":
        checkpoint.save_shard(directory, iteration, 0, envs)
        checkpoint.save(directory, iteration, {"learner": learner}, 2, True, shards=(500_000,))
    else:
        writer.save(iteration, {"learner": learner | {"envs": envs}}, True)
"""


@pytest.mark.parametrize("kind", ["file", "shards"])
def test_a_kill_in_the_middle_of_a_write_leaves_the_older_checkpoints(kind: str, tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), kind]) as process:
        deadline = time.monotonic() + 60.0
        part = ".rank_*.part" if kind == "shards" else ".iteration_*.part"
        while len(checkpoint.listing(tmp_path)) < 2 or not list(tmp_path.rglob(part)):
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
    files = [*checkpoint.listing(tmp_path), tmp_path / checkpoint.BEST]
    assert len(files) >= 3
    for file in files:
        assert checkpoint.load(file)["learner"]["envs"]["qpos"].shape == (500_000,)
    checkpoint.set_aside_later(tmp_path, 10**6)
    assert not list(tmp_path.rglob("*.part"))
    assert len(folders(tmp_path)) == (len({file.stem for file in files} - {"best"}) if kind == "shards" else 0)
