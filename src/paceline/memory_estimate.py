"""Estimate the memory that the envs of a task need."""

from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from typing import Any

import mujoco
import torch

from paceline.env.robot_env import RobotEnv
from paceline.sim.calibration import measured
from paceline.tasks.registry import Entry, EnvEntry


def least_bytes(entry: Entry, worlds: int, engine: str) -> int:
    """The env's state, its engine's arrays, one rollout, and a layer's input and output as the critic looks at it all.
    Networks, further copies, compiled code and what the libraries take for themselves come on top."""
    options = entry.task()
    if isinstance(entry, EnvEntry):
        env = entry.make(options, num_envs=worlds, device=torch.device("cpu"), seed=0, first_env=0)
    else:
        env = RobotEnv(options, worlds, "mujoco")
    env.reset()
    step = env.step(torch.zeros(worlds, env.num_actions))
    seen = (*step.obs.values(), *step.final_obs.values(), step.reward, step.terminated, step.truncated, step.log)
    step_bytes = sum(tensor.nbytes for tensor in seen)
    # Floats beside what the env gives: actions, their means, their noise; and the layers, for `obs` and `final_obs`.
    step_bytes += 4 * worlds * (3 * env.num_actions + 2 * 2 * max(entry.training.hidden_layers))
    state_bytes = sum(tensor.nbytes for tensor in env.state().values())
    engine_bytes = _warp_bytes(env.sim.model, worlds) if engine == "warp" and isinstance(env, RobotEnv) else 0
    return state_bytes + engine_bytes + entry.training.horizon * step_bytes


def _warp_bytes(model: mujoco.MjModel, worlds: int) -> int:
    """What MuJoCo Warp allocates; on the CPU, where it takes as much as on a GPU and needs no kernel compiled."""
    if not find_spec("mujoco_warp"):
        return 0
    import mujoco_warp
    import warp

    def capacity(value: Any) -> int:
        if is_dataclass(value):
            return sum(capacity(getattr(value, field.name)) for field in fields(value))
        return value.capacity if isinstance(value, warp.array) else 0

    room = measured(model)
    warp.config.log_level = warp.LOG_ERROR
    with warp.ScopedDevice("cpu"):
        return capacity(mujoco_warp.make_data(model, worlds, nconmax=room.contacts, njmax=room.constraints))
