"""docs/bring_your_env.md, taken at its word: its files become a package, pip installs it, and its commands are run."""

import json
import re
import shlex
import shutil
import sys
import textwrap
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch
from rich.console import Console

from paceline.cli.train import train as train_command
from paceline.env.gymnasium_env import GymnasiumEnv
from paceline.env.vec_env import RenderableEnv, Step, VecEnv
from paceline.errors import UserError
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.train import train
from paceline.training.build import playable
from paceline.view.training_videos import check_renderable
from tests.tasks.test_add_a_task import paceline, run

PAGE = Path(__file__).parents[2] / "docs" / "bring_your_env.md"
BLOCKS = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL))


def commands(title: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in BLOCKS[title].splitlines()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which the package of the page is installed, outside of the test environment."""
    source, site = tmp_path_factory.mktemp("my_envs"), tmp_path_factory.mktemp("site")
    for title in ("my_envs/point.py", "pyproject.toml"):
        (source / title).parent.mkdir(exist_ok=True)
        (source / title).write_text(BLOCKS[title])
    # Without isolation pip uses the setuptools that is here, so that the test needs no network.
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(source), cwd=source)
    return site


@pytest.mark.parametrize("argv", [*commands("gymnasium"), *commands("try it")], ids=" ".join)
def test_the_pages_commands_run(argv: list[str], site: Path, tmp_path: Path):
    few = ["--num-envs", "2", "--max-iterations", "1", "--gpu-ids", "none", "--run-dir", "run"]
    said = paceline(argv + few * (argv[0] == "train"), tmp_path, site)
    if argv[0] == "tasks":
        assert re.search(r"^ *point +push a point", said, re.MULTILINE)
        return
    if argv[0] == "check":
        assert said.endswith("point: nothing was found\n")
        return
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["task"]) == ("completed", argv[1])
    assert result["engine"] == argv[1].split(":")[0]
    assert ("paceline play" in said) == (argv[1] != "point"), "only commands that work are suggested"


def test_the_page_lists_every_member_of_an_env_and_of_a_step():
    page = PAGE.read_text()
    methods = [name for name, value in vars(RenderableEnv).items() if callable(value) and not name.startswith("_")]
    methods += [name for name, value in vars(VecEnv).items() if callable(value) and not name.startswith("_")]
    assert [name for name in methods if f"`{name}(self" not in page] == []
    fields = [*VecEnv.__annotations__, *(field.name for field in fields_of(Step))]
    assert [name for name in fields if f"`{name}: " not in page] == []


def test_the_pages_env_learns_and_resumes_bit_by_bit(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(site)
    console = Console(quiet=True)
    config = TrainConfig(task="point", env={}, num_envs=32, max_iterations=20, logger=("none",))
    whole = train(config, RunDir(tmp_path / "whole"), console)
    run = RunDir(tmp_path / "parts")
    early = train(replace(config, max_iterations=5), run, console)
    parts = train(config, run, console, checkpoint.listing(run.checkpoints)[-1])
    assert early["mean_return"] < 40.0 < whole["mean_return"] == parts["mean_return"]


def test_the_pages_env_hands_out_fresh_tensors(site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(site)
    entry = registry.find("point")
    assert isinstance(entry, registry.EnvEntry)
    env = entry.make(entry.task(edge=0.5), num_envs=3, device=torch.device("cpu"), seed=0, first_env=0)
    env.reset()
    step = env.step(torch.ones(3, 2))
    seen = (step.obs["policy"], step.final_obs["policy"], step.reward, step.log)
    before = [tensor.clone() for tensor in seen]
    assert step.terminated.any(), "no episode ended"
    for _ in range(3):
        env.step(torch.ones(3, 2))
    assert all(map(torch.equal, seen, before))


def snippet(heading: str) -> str:
    """Return the first block of code below a heading of the page."""
    return PAGE.read_text().partition(f"### {heading}\n")[2].partition("```python\n")[2].partition("```")[0]


def test_the_pages_env_with_its_render_method_makes_a_video(site: Path, tmp_path: Path):
    shutil.copytree(site, tmp_path / "site")
    file = tmp_path / "site" / "my_envs" / "point.py"
    code = file.read_text().replace("import torch\n", "import numpy as np\nimport torch\n", 1)
    code = code.replace(
        "    def prefetch_random", f"{textwrap.indent(snippet('Videos'), '    ')}\n    def prefetch_random"
    )
    file.write_text(code.replace("make=PointEnv,", "make=PointEnv, make_renderable=PointEnv,"))
    few = ["--num-envs", "2", "--max-iterations", "1", "--gpu-ids", "none", "--run-dir", "run"]
    assert "paceline play" in paceline(["train", "point", *few], tmp_path, tmp_path / "site")
    paceline(["play", "run", "--video", "point.mp4", "--seconds", "0.2"], tmp_path, tmp_path / "site")
    assert (tmp_path / "point.mp4").stat().st_size > 0


def test_a_vector_env_of_gymnasium_is_made_as_on_the_page():
    content: dict[str, Any] = {"gymnasium": gymnasium, "GymnasiumEnv": GymnasiumEnv, "torch": torch, "Pushed": object}
    exec(snippet("A Gymnasium vector environment that you make yourself"), content)
    env = content["make"](SimpleNamespace(gravity=1.0), num_envs=2, device=torch.device("cpu"), seed=0, first_env=0)
    env.reset()
    assert env.step(torch.zeros(2, 1)).reward.shape == (2,)


def test_an_env_without_images_is_an_error(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.syspath_prepend(site)
    config = TrainConfig(task="point", env={}, num_envs=2, max_iterations=1, logger=("none",))
    train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    playable(str(tmp_path / "run"))
    with pytest.raises(UserError, match="task 'point' cannot be rendered: its EnvEntry has no `make_renderable`"):
        playable(str(tmp_path / "run"), renderable=True)
    with pytest.raises(UserError, match="--video-every 5: the task 'point' cannot be rendered"):
        check_renderable(replace(config, video_every=5))
    argv = ["point", "--viewer", "--gpu-ids", "none", "--run-dir", str(tmp_path / "shown")]
    assert train_command(argv, Console(quiet=True)) == 2
    assert "--viewer: the task 'point' cannot be rendered" in capsys.readouterr().err
    assert not (tmp_path / "shown").exists()
