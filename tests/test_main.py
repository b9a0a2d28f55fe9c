"""Opening a run imports only installed modules, and none from the current directory. Ranks exit cleanly."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import __version__
from paceline.errors import UserError
from paceline.tasks import registry

TRAP = "from pathlib import Path; Path(__file__).with_suffix('.sprung').touch(); raise SystemExit('trapped')\n"
SMALL = ["--max-iterations", "1", "--gpu-ids", "none", "--num-envs", "2", "--logger", "none", "--run-dir", "run"]


def paceline(cwd: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def lay_traps(folder: Path, *modules: str) -> None:
    for module in modules:
        (folder / f"{module}.py").write_text(TRAP)


def sprung(folder: Path) -> list[str]:
    return [file.name for file in folder.glob("*.sprung")]


@pytest.mark.parametrize("command", [["export", "."], ["train", "--resume", "."]])
def test_a_run_does_not_import_a_module_from_its_directory(command: list[str], tiny_run: Path, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    lay_traps(folder, "evil_env")
    (folder / "run.yaml").write_text("task: gymnasium:evil_env:X-v0\nenv: {}\n")
    done = paceline(folder, *command)
    assert sprung(folder) == []
    assert done.returncode == 2
    assert "the module evil_env cannot be imported" in done.stderr
    assert "PYTHONPATH: the current directory is not searched" in done.stderr


def test_a_package_in_the_current_directory_registers_no_task(tmp_path: Path):
    lay_traps(tmp_path, "evil_task")
    info = tmp_path / "evil-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[paceline.tasks]\nevil = evil_task:ENTRY\n")
    done = paceline(tmp_path, "tasks")
    assert done.returncode == 0
    assert "cartpole" in done.stdout
    assert "evil" not in done.stdout
    assert sprung(tmp_path) == []


def test_ranks_and_processes_of_gymnasium_do_not_import_from_the_current_directory(tmp_path: Path):
    folder, program = tmp_path / "here", tmp_path / "bin" / "paceline"
    for directory in (folder, program.parent):
        directory.mkdir()
    # The program as pip installs it, because `python -m` itself would import contextlib from this directory.
    program.write_text("from paceline.__main__ import main\nif __name__ == '__main__':\n    main()\n")
    lay_traps(folder, "numpy", "torch", "gymnasium", "multiprocessing", "contextlib", "typing_extensions", "paceline")
    argv = ["train", "gymnasium:Pendulum-v1", "--env.vectorization", "async", "--ppo.horizon", "8", "--ranks", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), *argv, *SMALL]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert sprung(folder) == []
    assert done.returncode == 0, done.stderr
    assert "completed after 1 iteration," in done.stdout


def test_pythonpath_makes_modules_of_the_current_directory_importable(tmp_path: Path):
    (tmp_path / "own_env.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Own-v0', 'gymnasium.envs.classic_control:PendulumEnv', max_episode_steps=20)\n"
    )
    argv = ["train", "gymnasium:own_env:Own-v0", "--ppo.horizon", "8", "--env.vectorization", "async"]
    done = paceline(tmp_path, *argv, *SMALL, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no license\\nfound')", "RuntimeError: no license"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("def", "SyntaxError: "),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_in_one_line(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_env.py").write_text(code)
    with pytest.raises(UserError, match=f"the module failing_env cannot be imported: {message}") as caught:
        registry.find("gymnasium:failing_env:X-v0")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["gymnasium:.:X", "gymnasium:..x:X", "gymnasium: :X", "gymnasium:a..b:X"])
def test_an_invalid_module_name_is_refused(name: str):
    with pytest.raises(UserError, match="cannot be imported"):
        registry.find(name)


def test_a_rank_exits_cleanly_while_its_watch_waits_for_the_store():
    script = """
import sys
import threading

from torch.distributed import TCPStore

from paceline.__main__ import main

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("key", "value")


def use() -> None:
    while True:
        store.get("key")


threading.Thread(target=use, daemon=True, name="watch").start()
sys.argv = ["paceline", "--version"]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")
