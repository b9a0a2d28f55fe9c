"""`paceline new-task` writes a package that pip installs, that trains, and that keeps the contract of a task."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.tasks.new_package import write_package
from tests.tasks.test_add_a_task import paceline, run


def test_the_written_package_is_installed_trained_and_checked(tmp_path: Path):
    source, site = tmp_path / "my-arm", tmp_path / "site"
    printed = paceline(["new-task", "my-arm"], tmp_path)
    assert "paceline train my-arm" in printed
    files = sorted(str(file.relative_to(source)) for file in source.rglob("*.*"))
    assert files == ["README.md", "my_arm/__init__.py", "my_arm/model.xml", "my_arm/task.py", *files[4:]]
    assert files[4:] == ["pyproject.toml", "tests/test_task.py"]
    # Without isolation pip uses the setuptools that is here, so that the test needs no network.
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(source), cwd=tmp_path)
    few = ["--num-envs", "8", "--max-iterations", "3", "--gpu-ids", "none", "--run-dir", "run", "--logger", "none"]
    paceline(["train", "my-arm", *few, "--env.rewards.reached", "2"], tmp_path, site)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["task"], result["iterations"]) == ("completed", "my-arm", 3)
    checked = paceline(["check", "my-arm", "--steps", "40"], tmp_path, site)
    assert checked.splitlines()[-1] == "my-arm: nothing was found"


def test_the_written_files_are_formatted_and_without_lint(tmp_path: Path):
    write_package("my-arm", tmp_path / "my-arm")
    for command in (["format", "--check"], ["check", "--select", "E,F,I,B,UP"]):
        command = [Path(sys.executable).with_name("ruff"), *command, "--isolated", "--no-cache", "--line-length", "120"]
        done = subprocess.run(command, cwd=tmp_path / "my-arm", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cartpole", "a task 'cartpole' exists: choose another name"),
        ("torch", "a module 'torch' is installed: choose another name"),
        ("My Robot", "the name 'My Robot' cannot be that of a package: use lower-case letters"),
        ("../robot", "cannot be that of a package"),
        ("class", "cannot be that of a package"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, message: str, tmp_path: Path):
    with pytest.raises(UserError) as refused:
        write_package(name, tmp_path / "new")
    assert message in str(refused.value)
    assert not (tmp_path / "new").exists()


def test_files_are_never_overwritten(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty: choose another one with --output"):
        write_package("my-arm", tmp_path)
    with pytest.raises(UserError, match=r"--output .*notes.txt: Not a directory"):
        write_package("my-arm", tmp_path / "notes.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
