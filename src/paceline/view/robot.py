"""The robot of an env in the data of MuJoCo: its state, its base and its size."""

import mujoco
import numpy as np

from paceline.cameras.level_of_detail import initial_pose
from paceline.cameras.scene import HFIELD, PLANE
from paceline.env.robot_env import RobotEnv
from paceline.env.task import CommandDisplay


def copy_state(env: RobotEnv, command: CommandDisplay | None, data: mujoco.MjData, index: int = 0) -> None:
    """Copy the state of an env, and the goal rotation of its command to the first mocap body."""
    for name in ("qpos", "qvel", "act", "mocap_pos", "mocap_quat"):
        getattr(data, name)[:] = getattr(env.sim, name)[index].numpy()
    if command and command.rotation is not None and len(data.mocap_quat):
        data.mocap_quat[0] = command.rotation[index].numpy()
    data.time = env.sim.time[index].item()


def base_body(model: mujoco.MjModel) -> int:
    """Return the body of a robot that moves freely, or 0 if there is none. An object without joints is no robot."""
    free = model.jnt_bodyid[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE.value]
    return next((int(body) for body in free if (model.body_parentid == body).any()), 0)


def bounds(model: mujoco.MjModel) -> np.ndarray:
    """Return the smallest and the largest coordinates of a robot that moves freely, otherwise of all bodies, in the
    initial pose and without planes and heightfields, in meters, [2, 3]."""
    base, data = base_body(model), initial_pose(model)
    is_part = ~np.isin(model.geom_type, (PLANE, HFIELD))
    if base:
        is_part &= model.body_rootid[model.geom_bodyid] == base
    geoms = np.flatnonzero(is_part)
    if not len(geoms):
        return np.array([[-0.5, -0.5, 0.0], [0.5, 0.5, 1.0]])
    rotation = data.geom_xmat[geoms].reshape(-1, 3, 3)
    center = data.geom_xpos[geoms] + np.einsum("gij,gj->gi", rotation, model.geom_aabb[geoms, :3])
    half = np.einsum("gij,gj->gi", np.abs(rotation), model.geom_aabb[geoms, 3:])
    return np.stack(((center - half).min(0), (center + half).max(0)))
