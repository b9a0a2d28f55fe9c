"""MJCF files of this package: robots, each on a floor under a sky."""

from importlib.resources import files

import mujoco


def load(name: str) -> mujoco.MjSpec:
    """Read `models/NAME.xml`. The file "scene" is the floor and the sky without a robot."""
    return mujoco.MjSpec.from_file(str(files("paceline.robots") / "models" / f"{name}.xml"))
