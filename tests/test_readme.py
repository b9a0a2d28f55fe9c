"""The tree of files in the README."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "paceline"
# Folders that the tree describes as a whole.
DESCRIBED = {
    *("launch/engines", "run/loggers", "tasks", "tasks/velocity"),
    *("learners/rsl_rl", "learners/rl_games", "learners/skrl"),
}


def tree() -> str:
    files = (ROOT / "README.md").read_text().partition("## Files")[2]
    return files[files.index("    src/paceline/") : files.index("    tests/")]


def modules() -> list[str]:
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return [str(path) for path in paths if path.name not in ("__init__.py", "__main__.py")]


def test_every_file_of_the_tree_exists():
    named = set(re.findall(r"[a-z][a-z0-9_]*\.(?:py|yaml|cuh)", tree()))
    assert len(named) > 100
    assert named - {path.name for path in PACKAGE.rglob("*")} == set()


def test_every_module_is_in_the_tree():
    missing = [module for module in modules() if module.rpartition("/")[0] not in DESCRIBED]
    missing = [module for module in missing if not re.search(rf"\b{re.escape(Path(module).name)}", tree())]
    assert missing == []
