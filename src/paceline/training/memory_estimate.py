"""Estimate the memory that the envs of a task need."""

from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from typing import Any

import mujoco
import torch

from paceline.env.robot_env import RobotEnv
from paceline.sim.calibration import measure_capacity
from paceline.tasks.registry import EnvEntry, TaskEntry


def min_bytes(entry: TaskEntry, num_envs: int, engine: str) -> int:
    """Return a lower bound of the memory that training needs, in bytes.

    It contains the state of the envs, the arrays of the engine, one rollout, and the input and output of the widest
    layer when the critic evaluates the whole rollout. It does not contain parameters, further copies, compiled code and
    the memory of the libraries.
    """
    options = entry.task()
    if isinstance(entry, EnvEntry):
        env = entry.make(options, num_envs=num_envs, device=torch.device("cpu"), seed=0, first_env=0)
    else:
        env = RobotEnv(options, num_envs, "mujoco")
    env.reset()
    step = env.step(torch.zeros(num_envs, env.num_actions))
    tensors = (*step.obs.values(), *step.final_obs.values(), step.reward, step.terminated, step.truncated, step.log)
    step_bytes = sum(tensor.nbytes for tensor in tensors)
    # Floats in addition to the env's outputs: actions, their means and noise, and the layers for `obs` and `final_obs`.
    step_bytes += 4 * num_envs * (3 * env.num_actions + 2 * 2 * max(entry.training.hidden_layers))
    state_bytes = sum(tensor.nbytes for tensor in env.state().values())
    engine_bytes = _warp_bytes(env.sim.model, num_envs) if engine == "warp" and isinstance(env, RobotEnv) else 0
    return state_bytes + engine_bytes + entry.training.horizon * step_bytes


def _warp_bytes(model: mujoco.MjModel, num_envs: int) -> int:
    """Return the bytes that MuJoCo Warp allocates. Measured on the CPU, where the sizes are the same and no kernel is
    compiled."""
    if not find_spec("mujoco_warp"):
        return 0
    import mujoco_warp
    import warp

    def capacity(value: Any) -> int:
        if is_dataclass(value):
            return sum(capacity(getattr(value, field.name)) for field in fields(value))
        return value.capacity if isinstance(value, warp.array) else 0

    allocated = measure_capacity(model)
    warp.config.log_level = warp.LOG_ERROR
    with warp.ScopedDevice("cpu"):
        return capacity(mujoco_warp.make_data(model, num_envs, nconmax=allocated.contacts, njmax=allocated.constraints))
