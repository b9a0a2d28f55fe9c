"""Follow docs/add_a_task.md: make a package of its files, install it with pip, and run its commands."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.check import check
from paceline.env.guarded_task import run_guarded
from paceline.env.randomization import Randomization
from paceline.env.robot_env import RobotEnv
from paceline.env.task import CommandDisplay, EnvState, Task
from paceline.tasks import registry
from paceline.tasks.registry import TaskEntry
from tests import forked

PAGE = Path(__file__).parents[2] / "docs" / "add_a_task.md"


def blocks() -> dict[str, str]:
    """Return the code blocks of the page by title."""
    found = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(dict(found)) == len(found), "two blocks with one title"
    return dict(found)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package of the page into a directory outside of the environment of the tests."""
    source, site = tmp_path_factory.mktemp("my_tasks"), tmp_path_factory.mktemp("site")
    files = {title: text for title, text in blocks().items() if title.endswith((".py", ".toml"))}
    for title, text in files.items():
        file = source / title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    # Without isolation pip uses the setuptools that is here, so that the test needs no network.
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(source), cwd=source)
    return site


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def paceline(argv: list[str], cwd: Path, site: Path | None = None) -> str:
    done = forked.paceline(*argv, cwd=cwd, **({"PYTHONPATH": str(site)} if site else {}))
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def commands() -> list[list[str]]:
    lines = [line.split() for line in blocks()["try it"].splitlines()]
    assert all(program == "paceline" for program, *_ in lines)
    return [argv for _, *argv in lines]


def test_the_page_shows_listing_and_training():
    assert [argv[0] for argv in commands()] == ["tasks", "train", "train", "train", "check"]


def test_the_installed_task_is_listed_with_the_built_in_tasks(site: Path, tmp_path: Path):
    assert "pendulum" not in paceline(["tasks"], tmp_path)
    listed = paceline(["tasks"], tmp_path, site)
    assert "cartpole" in listed
    assert re.search(r"^ *pendulum +swing a pendulum up", listed, re.MULTILINE)


@pytest.mark.parametrize("argv", [argv for argv in commands() if argv[0] == "train"], ids=" ".join)
def test_the_training_commands_of_the_page_run(argv: list[str], site: Path, tmp_path: Path):
    few = ["--num-envs", "4", "--max-iterations", "1", "--gpu-ids", "none", "--run-dir", "run"]
    paceline([*argv, *few], tmp_path, site)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["task"], result["iterations"]) == ("completed", argv[1], 1)


def test_the_check_of_the_page_finds_nothing(site: Path, tmp_path: Path):
    (argv,) = (argv for argv in commands() if argv[0] == "check")
    assert paceline([*argv, "--steps", "30"], tmp_path, site).endswith("pendulum: nothing was found\n")


@pytest.mark.parametrize("name", ["pendulum", "commanded-pendulum"])
def test_the_tasks_of_the_page_can_be_captured(name: str, site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(site)
    assert name in registry.names()
    run = run_guarded(registry.find(name).task())
    assert (run.guard.syncs, run.guard.contract) == ([], [])
    assert run.truncated >= 1
    assert run.terminated >= 1


def test_the_hooks_of_the_page_work(site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(site)
    checks = check("commanded-pendulum", {"command_steps": 3, "push_steps": 2}, num_envs=4, steps=40)
    assert [text for each in checks for text in each.findings] == []
    task = registry.find("commanded-pendulum").task(push_steps=1, push_speed=2.0)
    env = RobotEnv(task.for_evaluation(), 64, seed=1)
    env.reset()
    env.step(torch.zeros(64, 1))
    state = env.env_state.task_state
    assert state["level"].unique().tolist() == [2.0]
    assert 0.9 < float(state["command"].abs().max()) <= 1.2
    assert 1.5 < float(state["push"].abs().max()) <= 2.0
    commanded, actual = task.command_display(env.env_state).numbers["angle rad"]
    assert torch.equal(commanded, state["command"][:, 0])
    assert torch.equal(actual, env.env_state.qpos[:, 0])


@pytest.mark.parametrize("kind", [Task, EnvState, Randomization, CommandDisplay, TaskEntry])
def test_the_page_lists_every_member_of_the_types_of_a_task(kind: type):
    page = PAGE.read_text()
    members = [name for name in (*vars(kind), *kind.__annotations__) if not name.startswith("_")]
    if kind is Randomization:
        members.remove("fields")
    assert [name for name in members if f"`{name}(" not in page and f"`{name}: " not in page] == []


def test_discrete_actions_and_randomizations_work_as_on_the_page(site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(site)
    pendulum = registry.find("pendulum").task
    discrete: dict[str, Any] = {}
    randomized: dict[str, Any] = {"Randomization": Randomization}
    for title, names in (("Discrete actions", discrete), ("Randomization", randomized)):
        code = PAGE.read_text().partition(f"### {title}\n")[2].partition("```python\n")[2].partition("```")[0]
        exec(code, vars(sys.modules[pendulum.__module__]) | names, names)
    members = {name: discrete[name] for name in ("num_actions", "action_choices", "control")}
    task: Any = type("Discrete", (pendulum,), members)()
    env = RobotEnv(task, 3)
    env.step(torch.tensor([[0], [1], [2]]))
    assert env.sim.ctrl[:, 0].tolist() == [-1.0, 0.0, 1.0]
    (friction, strength, pull) = randomized["randomized_fields"](None)
    assert (friction.names, strength.fields[1], pull.every_seconds) == ("(left|right)_foot", "actuator_biasprm", 2.0)
