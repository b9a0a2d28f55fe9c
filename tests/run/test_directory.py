"""A run is named by its directory or one of its checkpoint files, from any directory."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.run import checkpoint
from paceline.run.directory import RunDir

CHECKPOINT = "iteration_00000002.safetensors"


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_run, tmp_path / "run")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "run" / "checkpoints" / CHECKPOINT)
    (tmp_path / "linked_run").symlink_to(tmp_path / "run")
    (tmp_path / "linked_checkpoints").symlink_to(tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("run/checkpoints", CHECKPOINT),
        ("run/checkpoints", f"./{CHECKPOINT}"),
        ("run/checkpoints", f"../checkpoints/{CHECKPOINT}"),
        ("run/checkpoints", ".."),
        ("linked_checkpoints", CHECKPOINT),
        ("linked_checkpoints", ".."),
        ("run", f"checkpoints/{CHECKPOINT}"),
        ("run", "."),
        (".", "link.safetensors"),
        (".", f"linked_checkpoints/{CHECKPOINT}"),
        (".", f"linked_run/checkpoints/{CHECKPOINT}"),
        (".", "linked_run"),
    ],
)
def test_a_run_is_found_from_any_directory_by_its_own_name_or_a_checkpoints(
    folder: str, name: str, run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(run.parent / folder)
    opened = RunDir.open(name)
    assert opened.path.samefile(run)
    assert checkpoint.chosen(name, opened.checkpoints).samefile(run / "checkpoints" / CHECKPOINT)


def test_checkpoints_kept_on_another_disk_belong_to_the_run_that_links_to_them(run: Path, tmp_path: Path):
    (tmp_path / "disk").mkdir()
    shutil.move(run / "checkpoints", tmp_path / "disk" / "checkpoints_of_run")
    (run / "checkpoints").symlink_to(tmp_path / "disk" / "checkpoints_of_run")
    assert RunDir.open(str(run / "checkpoints" / CHECKPOINT)).path == run


def test_a_file_called_auto_is_not_taken_for_a_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run.parent)
    Path("runs/cartpole").mkdir(parents=True)
    shutil.copytree(run, "runs/cartpole/newest")
    Path("auto").write_text("")
    opened = RunDir.open("auto")
    assert checkpoint.chosen("auto", opened.checkpoints).name == CHECKPOINT


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no run at nowhere"),
        ("a" * 300, "no run at aaa"),
        ("a\0b", "no run at a"),
        ("file", "file is not a run: it has no run.yaml"),
        ("checkpoints/file", "checkpoints/file is not a run: it has no run.yaml"),
        (".", "is not a run: it has no run.yaml"),
    ],
)
def test_a_path_that_is_not_a_run_is_refused(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("checkpoints").mkdir()
    for file in ("file", "checkpoints/file"):
        Path(file).write_text("")
    with pytest.raises(UserError, match=message):
        RunDir.open(name)


@pytest.mark.parametrize("task", ["**", "[", "..", "a" * 300, "/", ""])
def test_auto_takes_a_tasks_name_literally(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs/cartpole")
    with pytest.raises(UserError, match="no run with a checkpoint under runs"):
        RunDir.open("auto", task)


def test_a_directory_is_held_by_one_process_at_a_time(tmp_path: Path):
    run, warnings = RunDir(tmp_path / "run"), []
    with run.held(True, warnings.append):
        assert run.is_held()
        with pytest.raises(UserError, match="is being trained by another process"), run.held(True, warnings.append):
            pass
    assert not run.is_held()
    assert warnings == []


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    run, warnings = RunDir(tmp_path / "run"), []
    with run.held(True, warnings.append):
        assert not run.is_held()
    assert len(warnings) == 1
    assert "has no locks" in warnings[0]
