"""Engines that run a workflow: the one table of them."""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from paceline.errors import unknown

if TYPE_CHECKING:
    from paceline.launch.engines.engine import Engine

ENGINES = {
    "local": "every task is a process on this machine",
    "ssh": "every task runs on a host of the profile, started over SSH",
    "slurm": "every group is a Slurm job",
    "kubernetes": "every task is a pod of a JobSet",
    "osmo": "the osmo command submits the file",
}
"""The engines and what they do with a task. The module of an engine has its name; see `engine.Engine`."""


def load_engine(name: str) -> "Engine":
    """Import the module of an engine and return it."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return cast("Engine", import_module(f"paceline.launch.engines.{name}"))
