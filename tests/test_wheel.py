"""The built wheel works without the repository."""

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]


def run(command: list[str | Path], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_trains_plays_and_exports_in_a_new_environment(tmp_path: Path):
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT], tmp_path)
    (wheel,) = tmp_path.glob("paceline-*.whl")
    source = ROOT / "src"
    files = {str(file.relative_to(source)) for file in source.rglob("*.*") if "__pycache__" not in file.parts}
    assert files <= set(ZipFile(wheel).namelist())
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    run([*pip, "--python", python, "install", "--quiet", "--no-deps", wheel], tmp_path)
    # The dependencies are those of this environment. Its own, editable Paceline is not among them, because Python does
    # not process the .pth files of a directory that a .pth file adds.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    place = run([python, "-c", "import paceline; print(paceline.__file__)"], tmp_path)
    assert Path(place.strip()).is_relative_to(site)

    paceline = environment / "bin" / "paceline"
    small = ["--gpu-ids", "none", "--num-envs", "8", "--max-iterations", "2", "--ppo.hidden", "16"]
    run([paceline, "train", "cartpole", "--run-dir", "run", *small], tmp_path)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
    run([paceline, "train", "go1-velocity", "--run-dir", "robot", *small], tmp_path)
    assert "nothing was found" in run([paceline, "check", "cartpole", "--steps", "10"], tmp_path)
    assert "my_arm/task.py" in run([paceline, "new-task", "my-arm"], tmp_path)
    run([paceline, "play", "run", "--seconds", "0.2", "--video", "video.mp4"], tmp_path)
    assert (tmp_path / "video.mp4").stat().st_size > 0
    assert run([paceline, "export", "run", "--format", "torchscript"], tmp_path) == "run/policy.pt\n"
