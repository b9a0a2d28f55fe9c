"""Layout of the sensor data of a compiled model."""

import mujoco
import numpy as np


def sensor_columns(model: mujoco.MjModel) -> dict[str, slice]:
    """Return the columns of each sensor in `sensordata`, by sensor name."""
    sizes = zip(model.sensor_adr.tolist(), model.sensor_dim.tolist(), strict=True)
    return {model.sensor(i).name: slice(start, start + size) for i, (start, size) in enumerate(sizes)}


def columns_before_acceleration(model: mujoco.MjModel) -> np.ndarray:
    """Return a mask of the columns of `sensordata` that depend on positions and velocities only, bool [nsensordata]."""
    early = model.sensor_needstage < mujoco.mjtStage.mjSTAGE_ACC.value
    return np.repeat(early, model.sensor_dim)
