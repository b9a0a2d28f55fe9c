"""The Makefile installs and locks the same extras."""

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(*arguments: str) -> str:
    """Return the commands that make would run."""
    return subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_tests_and_the_lock_file_have_all_extras_of_the_package():
    defined = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    locked = commands("lock").split("scripts/lock ")[1].split()[0]
    listed = locked.split(",")
    assert len(set(listed)) == len(listed)
    left_out = defined.keys() - set(listed)
    assert set(listed) <= defined.keys()
    # An extra may be left out if another one contains it.
    assert {line for name in left_out for line in defined[name]} <= {line for name in listed for line in defined[name]}
    assert f"-e '.[{locked}]'" in commands("-W", "requirements.lock", ".venv/.installed-test")


def test_the_list_of_extras_exists_once():
    files = [ROOT / "Makefile", *filter(Path.is_file, (ROOT / "scripts").iterdir())]
    assert sum(file.read_text().count("torchrunx,report,viewer") for file in files) == 1
