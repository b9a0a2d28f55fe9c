"""MJCF files: those of this package, each a robot on a floor under a sky, and those of other installed packages."""

from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

import mujoco

from paceline.errors import UserError


def load(name: str) -> mujoco.MjSpec:
    """Read `models/NAME.xml`. The file "scene" is the floor and the sky without a robot."""
    return mujoco.MjSpec.from_file(str(files("paceline.robots") / "models" / f"{name}.xml"))


def wheel_file(package: str, path: str, extra: str) -> Path:
    """Return the path of a model of another package, which `paceline[extra]` installs. The package is not imported,
    because that would import all of its environments and their dependencies."""
    remedy = f"pip install 'paceline[{extra}]'"
    try:
        file = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise UserError(f"the model comes with {package}, which is not installed: {remedy}") from None
    if not file.is_file():
        raise UserError(f"this version of {package} has no {file}: {remedy}")
    return file
