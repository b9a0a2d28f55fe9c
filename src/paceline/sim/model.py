"""Facts about a compiled model that both engines and tasks need."""

import mujoco
import numpy as np


def sensor_columns(model: mujoco.MjModel, name: str) -> slice:
    """Where a sensor's values stand in `sensordata`."""
    index = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SENSOR, name)
    if index < 0:
        names = [model.sensor(i).name for i in range(model.nsensor)]
        raise ValueError(f"no sensor {name!r} in the model; choose from {names}")
    start = model.sensor_adr[index]
    return slice(start, start + model.sensor_dim[index])


def sensed_before_forces(model: mujoco.MjModel) -> np.ndarray:
    """Columns of `sensordata` that need positions and velocities only, bool [nsensordata]."""
    fresh = model.sensor_needstage < mujoco.mjtStage.mjSTAGE_ACC.value
    return np.repeat(fresh, model.sensor_dim)
