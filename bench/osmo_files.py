"""Dry-run all workflow files below a directory, for example a checkout of OSMO. Print which are refused, and why.

Variables that a file leaves undefined get a value: file:///data if the name ends with url, prefix or location, and 1
otherwise. --set gives other values.

    python bench/osmo_files.py CHECKOUT [--on local] [--set image=ubuntu num_cpu=4]
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

_UNDEFINED = re.compile(r"unknown variable '(\w+)'")
_MOST_VARIABLES = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="Directory that is searched for workflow files.")
    parser.add_argument("--on", default="local", help="Engine of the dry run.")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="Values of undefined variables.")
    arguments = parser.parse_args()
    values = dict(value.split("=", 1) for value in arguments.set)
    refused = list[str]()
    files = [file for file in sorted(arguments.checkout.rglob("*.yaml")) if _is_workflow(file)]
    for file in files:
        given, error = _dry_run(file, arguments.on, values)
        name = file.relative_to(arguments.checkout)
        refused += [str(name)] if error else []
        print(f"{'refused' if error else 'parsed ':8} {name} {' '.join(given)}", flush=True)
        if error:
            print(f"         {error.removeprefix(f'paceline: {file}:')}")
    print(f"{len(files)} files, {len(files) - len(refused)} parsed, {len(refused)} refused")


def _is_workflow(file: Path) -> bool:
    return bool(re.search(r"^workflow:", file.read_text(errors="replace"), re.MULTILINE))


def _dry_run(file: Path, engine: str, values: dict[str, str]) -> tuple[list[str], str]:
    """Return the values that were given to undefined variables, and the error or an empty string."""
    given, error = dict[str, str](), ""
    for _ in range(_MOST_VARIABLES):
        arguments = [f"{name}={value}" for name, value in given.items()]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "launch", file, "--dry-run", "--on", engine]
            + (["--set", *arguments] if arguments else []),
            capture_output=True,
            text=True,
            check=False,
        )
        error = done.stderr.strip() if done.returncode else ""
        found = _UNDEFINED.search(error)
        if not found or found[1] in given:
            break
        name = found[1]
        place = name.endswith(("url", "prefix", "location"))
        given[name] = values.get(name, "file:///data" if place else "1")
    return [f"{name}={value}" for name, value in given.items()], error


if __name__ == "__main__":
    main()
