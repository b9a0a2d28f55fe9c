"""Find tasks by name: built-in ones and those of other packages."""

import dataclasses
import sys
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.learners.learner import LEARNERS
from paceline.tasks import registry
from paceline.tasks.aliases import ALIASES
from paceline.tasks.cartpole import ENTRY


def installed(site: Path, monkeypatch: pytest.MonkeyPatch, **tasks: str) -> None:
    """Put a package on the path that registers these tasks."""
    info = site / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in tasks.items()]
    (info / "entry_points.txt").write_text("\n".join(["[paceline.tasks]", *lines]))
    monkeypatch.syspath_prepend(site)


@pytest.mark.parametrize("name", registry.names())
def test_every_task_has_options_with_defaults_and_valid_settings_for_all_learners(name: str):
    entry = registry.find(name)
    assert dataclasses.is_dataclass(entry.task)
    task = entry.task()
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.episode_seconds = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    assert entry.summary
    assert "\n" not in entry.summary
    for learner in LEARNERS.values():
        learner.settings.from_training(entry.training).check()


def test_the_error_for_an_unknown_task_has_the_nearest_name():
    with pytest.raises(UserError, match="unknown task 'cartpol': did you mean 'cartpole'"):
        registry.find("cartpol")


def test_tasks_of_other_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed(tmp_path, monkeypatch, other="paceline.tasks.cartpole:ENTRY")
    assert {"cartpole", "other"} <= set(registry.names())
    assert registry.find("other") is ENTRY


def test_the_error_for_an_entry_point_that_is_no_task_entry_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed(tmp_path, monkeypatch, other="paceline.tasks.cartpole:Cartpole")
    with pytest.raises(UserError, match=r"'other' \(paceline.tasks.cartpole:Cartpole\) is not a TaskEntry but type"):
        registry.find("other")


HEAD = """
from dataclasses import dataclass
from paceline.env.training_settings import TrainingSettings
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.registry import TaskEntry
"""
ENTRIES = {
    "an instance": ("ENTRY = TaskEntry(Cartpole(), '')", r"its task is Cartpole\(.*, but must be a class"),
    "no dataclass": (
        "class T: ...\nENTRY = TaskEntry(T, '')",
        r"class T is not a frozen dataclass: use @dataclass\(frozen=True\)",
    ),
    "not frozen": ("@dataclass\nclass T: ...\nENTRY = TaskEntry(T, '')", "class T is not a frozen dataclass"),
    "a field that is no option": (
        "class T(Cartpole):\n    wind: float = 1.0\nENTRY = TaskEntry(T, '')",
        "class T is not a frozen dataclass",
    ),
    "no default": (
        "@dataclass(frozen=True)\nclass T:\n    wind: float\nENTRY = TaskEntry(T, '')",
        "class T has no default for wind: give it one",
    ),
    "settings": ("ENTRY = TaskEntry(Cartpole, '', training={})", r"training is \{\}, but must be a TrainingSettings"),
}


@pytest.mark.parametrize("fault", ENTRIES)
def test_an_invalid_entry_is_rejected(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code, message = ENTRIES[fault]
    (tmp_path / "wrong_entry.py").write_text(HEAD + code)
    monkeypatch.delitem(sys.modules, "wrong_entry", raising=False)
    installed(tmp_path, monkeypatch, other="wrong_entry:ENTRY")
    with pytest.raises(UserError, match=rf"task 'other' \(wrong_entry:ENTRY\): {message}"):
        registry.find("other")


def test_a_subclass_without_new_options_needs_no_decorator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "wrong_entry.py").write_text(HEAD + "class T(Cartpole): ...\nENTRY = TaskEntry(T, '')")
    monkeypatch.delitem(sys.modules, "wrong_entry", raising=False)
    installed(tmp_path, monkeypatch, other="wrong_entry:ENTRY")
    assert registry.find("other").task().num_actions == 1


def test_another_package_cannot_replace_a_built_in_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed(tmp_path, monkeypatch, cartpole="json:JSONDecoder")
    message = r"a package has a task 'cartpole' \(json:JSONDecoder\), which is the name of a task of Paceline: rename"
    with pytest.raises(UserError, match=message):
        registry.is_name("cartpole")
    with pytest.raises(UserError, match=message):
        registry.names()


@pytest.mark.parametrize("name", ALIASES)
def test_every_name_of_another_library_is_a_task_that_states_its_difference(name: str):
    alias = registry.alias(name)
    assert alias
    assert alias.task in registry.names()
    assert alias.difference.endswith(".")
    assert ("has the prefix mjlab:" in alias.difference) == name.startswith("Mjlab-")
    assert registry.is_name(name)


def test_only_train_accepts_the_names_of_other_libraries():
    with pytest.raises(UserError, match="the task 'Isaac-Cartpole-v0' is called 'cartpole' here: use that name"):
        registry.find("Isaac-Cartpole-v0")


def test_the_error_for_an_unknown_task_suggests_names_of_other_libraries_but_does_not_list_them():
    with pytest.raises(UserError, match="did you mean 'Isaac-Cartpole-v0'") as error:
        registry.find("Isaac-Cartpole-v1")
    assert "Isaac-Ant-v0" not in str(error.value)


def test_a_task_of_another_package_takes_precedence_over_the_name_of_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    installed(tmp_path, monkeypatch, **{"Isaac-Ant-v0": "paceline.tasks.cartpole:ENTRY"})
    assert registry.alias("Isaac-Ant-v0") is None
    assert registry.find("Isaac-Ant-v0") is ENTRY
