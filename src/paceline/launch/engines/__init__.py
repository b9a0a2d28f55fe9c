"""Engines that run a workflow: the one list of them."""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from paceline.errors import unknown

if TYPE_CHECKING:
    from paceline.launch.engines.engine import Engine

ENGINES = ("local", "ssh", "slurm", "kubernetes", "osmo")
"""Names of the engines. The module of an engine has its name; see `engine.Engine`."""


def load_engine(name: str) -> "Engine":
    """Import the module of an engine and return it."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return cast("Engine", import_module(f"paceline.launch.engines.{name}"))
