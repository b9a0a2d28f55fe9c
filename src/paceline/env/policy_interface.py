"""Types with which a task describes the inputs and the outputs of its policy, for exported policies."""

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import mujoco

# Envs of other simulators need no MuJoCo, so it is imported inside the functions.


class ObservationPart(NamedTuple):
    """Successive columns of an observation group. Without noise they are scale * clamp(quantity - offset, *clip)."""

    name: str
    width: int
    """Number of columns, at least 1."""
    unit: str | tuple[str, ...] = ""
    """Unit of the quantity, for all columns or for each; empty if it has none."""
    scale: float | tuple[float, ...] = 1.0
    """Factor, for all columns or for each."""
    offset: float | tuple[float, ...] = 0.0
    """Value of the quantity that becomes zero, for all columns or for each."""
    clip: tuple[float, float] | None = None
    """Minimum and maximum of quantity - offset."""
    labels: tuple[str, ...] = ()
    """Name of each column, such as the names of joints."""
    description: str = ""
    """Meaning, frame of reference and value at the start of an episode, as full sentences."""


class ActionMapping(NamedTuple):
    """Computation of the controls from an action, one control per action:

    base = previous control if `relative`, otherwise `offset`
    target = base + scale * clamp(action, *clip)
    control = clamp(previous control + smoothing * (target - previous control), *range)
    """

    scale: tuple[float, ...]
    """Change of each control at an action of 1."""
    offset: tuple[float, ...]
    """Control at an action of zero. It is not used by relative actions."""
    clip: tuple[float, float] | None = None
    """Minimum and maximum of the actions."""
    relative: bool = False
    """True if an action changes the previous control."""
    smoothing: float = 1.0
    """Weight of the new target in the moving average of the targets, above 0, at most 1."""
    range: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Minimum and maximum of each control."""
    initial_control: Literal["zero", "joint_pos"] = "zero"
    """Previous control in the first step: zero, or the positions of the joints."""


class CommandRange(NamedTuple):
    """Range of a command or goal that the robot is given from outside."""

    labels: tuple[str, ...]
    """Name of each number of the command."""
    unit: tuple[str, ...]
    """Unit of each number."""
    low: tuple[float, ...]
    high: tuple[float, ...]
    entry: str = ""
    """Entry of the task state that holds the command in its columns. With it, the command can be set in the viewer."""


XYZ, QUATERNION = ("x", "y", "z"), ("w", "x", "y", "z")
"""Labels of vectors and of rotations."""


def joint_names(model: "mujoco.MjModel") -> tuple[str, ...]:
    """Return the names of the hinges and slides, in the order of their positions in `qpos`."""
    import mujoco

    single = np.isin(model.jnt_type, (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)))
    return tuple(model.joint(index).name for index in single.nonzero()[0])


def default_qpos(model: "mujoco.MjModel") -> tuple[float, ...]:
    """Return the positions of the keyframe "home", or of the initial pose of a model without it."""
    import mujoco

    home = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_KEY, "home")
    return tuple((model.qpos0 if home < 0 else model.key_qpos[home]).tolist())
