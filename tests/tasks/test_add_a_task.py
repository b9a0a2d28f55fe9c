"""Follow docs/add_a_task.md: make a package of its files, install it with pip, and run its commands."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.tasks import registry
from tests import forked
from tests.env.refuse_syncs import run_refusing_syncs

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
    assert [argv[0] for argv in commands()] == ["tasks", "train", "train"]


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
    assert (result["status"], result["task"], result["iterations"]) == ("completed", "pendulum", 1)


def test_the_task_of_the_page_can_be_captured(site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(site)
    assert "pendulum" in registry.names()
    counts = run_refusing_syncs(registry.find("pendulum").task())
    assert counts.truncated >= 1
    assert counts.terminated >= 1
