"""Warnings of MuJoCo as warnings of Python."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class MujocoWarning(UserWarning):
    """A warning of MuJoCo."""


@contextmanager
def as_python_warnings() -> Iterator[None]:
    """Inside the context, raise warnings of Python in place of those that MuJoCo prints and writes to MUJOCO_LOG.TXT.
    Without MuJoCo there are none."""
    try:
        import mujoco
    except ImportError:
        yield
        return
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda text: warnings.warn_explicit(text.strip(), MujocoWarning, "mujoco", 0))
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
