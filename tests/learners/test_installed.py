"""Libraries are extras: training without them, and the error if one is missing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

LIBRARIES = ("rsl_rl", "rl_games", "skrl", "jax", "flax", "optax", "gymnasium", "tensordict")
SMALL = ["--gpu-ids", "none", "--num-envs", "6", "--max-iterations", "1", "--run-dir", "run"]


def paceline(cwd: Path, before: str, *argv: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a new interpreter, with code before and after."""
    script = f"""import sys
{before}
sys.argv = ["paceline", *{list(argv)!r}]
from paceline.__main__ import main
try:
    main()
finally:
    {after or "pass"}
"""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def without(*packages: str) -> str:
    """Return code that makes packages look as if they were not installed."""
    return "; ".join(f"sys.modules[{package!r}] = None" for package in packages)


@pytest.mark.parametrize(
    ("learner", "package", "extra"),
    [
        ("rsl_rl", "rsl_rl", "rsl-rl"),
        ("rl_games", "rl_games", "rl-games"),
        ("skrl", "skrl", "skrl"),
        ("skrl_jax", "jax", "jax"),
    ],
)
def test_a_missing_library_is_named_with_the_extra_to_install(learner: str, package: str, extra: str, tmp_path: Path):
    done = paceline(tmp_path, without(package), "train", "cartpole", "--learner", learner, *SMALL)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert package in line
    assert f"pip install 'paceline[{extra}]'" in line
    assert not list(tmp_path.iterdir())


def test_the_native_learner_trains_without_any_of_them(tmp_path: Path):
    done = paceline(tmp_path, without(*LIBRARIES), "train", "cartpole", *SMALL)
    assert done.returncode == 0, done.stderr


def test_the_native_learner_imports_none_of_them(tmp_path: Path):
    print_imported = f"print(sorted(set(sys.modules) & set({LIBRARIES!r})))"
    done = paceline(tmp_path, "", "train", "cartpole", *SMALL, after=print_imported)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_the_default_install_has_none_of_them():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = " ".join(project["dependencies"])
    assert not [name for name in (*LIBRARIES, "rsl-rl", "rl-games") if name in names]
