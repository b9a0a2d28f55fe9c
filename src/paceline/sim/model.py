"""Facts about a compiled model that both engines and tasks need."""

import mujoco
import numpy as np


def sensor_columns(model: mujoco.MjModel) -> dict[str, slice]:
    """Where each sensor's values stand in `sensordata`, by its name."""
    sizes = zip(model.sensor_adr.tolist(), model.sensor_dim.tolist(), strict=True)
    return {model.sensor(i).name: slice(start, start + size) for i, (start, size) in enumerate(sizes)}


def sensed_before_forces(model: mujoco.MjModel) -> np.ndarray:
    """Columns of `sensordata` that need positions and velocities only, bool [nsensordata]."""
    fresh = model.sensor_needstage < mujoco.mjtStage.mjSTAGE_ACC.value
    return np.repeat(fresh, model.sensor_dim)
