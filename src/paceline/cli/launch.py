"""The command `paceline launch`: run a workflow file."""

import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from tyro.conf import FlagCreatePairsOff, Positional

from paceline.cli.options import parse_options
from paceline.errors import UserError, unknown
from paceline.launch.engines import ENGINES, load_engine
from paceline.launch.engines.engine import LaunchOptions
from paceline.launch.profile import read_profile
from paceline.launch.workflow import read_workflow
from paceline.run.config import option


@dataclass(frozen=True)
class LaunchArguments:
    """Run a workflow file: a YAML file in the format of OSMO, version 2.

    The exit code is 0 if the workflow has completed, 1 if it has failed, 2 if the file was refused, and 130 after an
    interruption.
    """

    file: Annotated[Positional[Path | None], option("FILE")] = None
    """Path of the workflow file. --copy gives examples."""
    set: Annotated[tuple[str, ...], option("NAME=VALUE")] = ()
    """Values of variables of the file, which replace its default-values. A value becomes an integer or a float if it
    is one, and a string otherwise."""
    set_string: Annotated[tuple[str, ...], option("NAME=VALUE")] = ()
    """Values of variables of the file that stay strings, also if they are numbers."""
    on: Annotated[str, option("|".join(ENGINES))] = "local"
    """Engine that runs the workflow. local: every task is a process on this machine. ssh: every task runs on a host of
    the profile. slurm: every group is a Slurm job. kubernetes: every task is a pod of a JobSet. osmo: the osmo command
    submits the file."""
    profile: Annotated[Path | None, option("FILE")] = None
    """File with the settings of this site. The default is ~/.config/paceline/profile.yaml, if it exists, or
    paceline/profile.yaml in $XDG_CONFIG_HOME."""
    dry_run: Annotated[bool, FlagCreatePairsOff] = False
    """Check the file, print what would be submitted, and start nothing. This machine is not checked."""
    follow: Annotated[bool, FlagCreatePairsOff] = False
    """Print the output of the tasks, with the name of the task before each line. Otherwise a table of the tasks is
    shown, or, on slurm, kubernetes and osmo, the command ends when the job is submitted."""
    oversubscribe: Annotated[bool, FlagCreatePairsOff] = False
    """Run tasks also if they request more CPUs, GPUs, memory or disk space than this machine or a host
    has."""
    copy: Annotated[str | None, option("NAME")] = None
    """Copy a workflow file of Paceline to the current directory and start nothing. The files are scaling.yaml,
    train_cameras.yaml, train_one_node.yaml, train_policy.yaml, train_then_evaluate.yaml and train_then_export.yaml."""


def launch(argv: list[str], console: Console) -> int:
    arguments = parse_options(LaunchArguments, _join_repeated(argv, ("--set", "--set-string")), "launch")
    if arguments.copy is not None:
        console.print(escape(f"Wrote {_copy(arguments.copy)}"))
        return 0
    if arguments.file is None:
        raise UserError(
            f"no workflow file given: use paceline launch FILE, or --copy with one of {', '.join(sorted(_shipped()))}"
        )
    chosen = load_engine(arguments.on)
    profile = read_profile(arguments.profile)
    file = read_workflow(arguments.file, arguments.set, arguments.set_string)
    if file.unresolved and not arguments.dry_run and arguments.on != "osmo":
        raise UserError(file.unresolved[0])
    if arguments.dry_run:
        for message in file.unresolved:
            print(f"paceline: warning: {message}; without --dry-run this is an error", file=sys.stderr)
        print(chosen.describe(file, profile))
        return 0
    try:
        return chosen.launch(file, profile, console, LaunchOptions(arguments.oversubscribe, arguments.follow))
    except OSError as error:
        place = profile.storage_root.absolute()
        raise UserError(
            f"cannot write the files of the job: {error}; free space in {place}, or set storage_root in the profile"
        ) from error


def _join_repeated(argv: list[str], options: tuple[str, ...]) -> list[str]:
    """Move the values of options that may be repeated behind one option each. A value contains "="."""
    values: dict[str, list[str]] = {name: [] for name in options}
    rest, current = list[str](), ""
    for argument in argv:
        name, separator, value = argument.replace("_", "-", 1 if argument.startswith("--set_") else 0).partition("=")
        if name in values:
            current = name
            values[name] += [value] if separator else []
        elif current and not argument.startswith("-") and (separator or not values[current]):
            values[current].append(argument)
        else:
            current = ""
            rest.append(argument)
    return rest + [part for name, given in values.items() if given for part in (name, *given)]


def _shipped() -> dict[str, str]:
    """Return the texts of the workflow files of Paceline by name."""
    files = (resources.files("paceline") / "workflows").iterdir()
    return {file.name: file.read_text() for file in files if file.name.endswith(".yaml")}


def _copy(name: str) -> Path:
    target, files = Path(name), _shipped()
    if name not in files:
        raise unknown("workflow file", name, files)
    try:
        with target.open("x") as file:
            file.write(files[name])
    except FileExistsError:
        raise UserError(f"{target} exists already; remove it, or change to another directory") from None
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None
    return target
