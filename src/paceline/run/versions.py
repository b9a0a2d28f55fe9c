"""Versions of the packages that a run depends on."""

from importlib.metadata import PackageNotFoundError, version
from platform import python_version

_PACKAGES = (
    *("paceline", "torch", "mujoco", "mujoco-warp", "warp-lang", "gymnasium", "gymnasium-robotics"),
    *("rsl-rl-lib", "rl-games", "skrl", "jax", "flax", "optax"),
)


def versions() -> dict[str, str]:
    """Return the version of each installed package."""
    found = {"python": python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
