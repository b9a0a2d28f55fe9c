"""The interface of both physics engines: many envs of one model as torch tensors."""

from abc import ABC, abstractmethod
from typing import get_args

import mujoco
import numpy as np
import torch
from torch import Tensor

from paceline.errors import UserError, unknown
from paceline.run.config import Engine

ENGINES: tuple[str, ...] = get_args(Engine)
# MuJoCo treats a state beyond this magnitude as invalid (mjMAXVAL).
MAX_STATE_VALUE = 1e10
STATE_FIELDS = (
    *("time", "qpos", "qvel", "act", "history", "plastic", "qacc_warmstart", "ctrl"),
    *("qfrc_applied", "xfrc_applied", "eq_active", "mocap_pos", "mocap_quat", "userdata"),
)
"""MuJoCo's integration state without plugins, which MuJoCo Warp does not support."""


class Sim(ABC):
    """`num_envs` copies of one model. Tensors have one row per env and are float32 on `device`.

    One env step calls `step`, then `reset` for the envs whose episode ended, then `sense`. The order matters, because
    the next `step` starts from what `sense` computed.
    """

    qpos: Tensor
    """Positions, [env, nq]. Read-only, as all tensors except `ctrl`, `mocap_pos` and `mocap_quat`."""
    qvel: Tensor
    """Velocities, [env, nv]."""
    act: Tensor
    """Activations of the actuators, [env, na]."""
    ctrl: Tensor
    """Controls of the actuators, [env, nu]. Write them before `step`."""
    mocap_pos: Tensor
    """Positions of mocap bodies, [env, nmocap, 3]. May be written, like `ctrl`."""
    mocap_quat: Tensor
    """Quaternions of mocap bodies, [env, nmocap, 4]. May be written, like `ctrl`."""
    sensordata: Tensor
    """Sensor values, [env, nsensordata]. After `step`, they are from the start of the last substep; after `sense`, they
    are current. Sensors of accelerations and forces keep the value of the last substep and are zero after a reset."""
    failed: Tensor
    """Envs whose state became non-finite or huge in the last `step`, bool [env]. They must be reset."""
    overflowed: Tensor
    """Envs that ran out of contact or constraint rows in the last `step`, bool [env]. In MuJoCo Warp all envs share one
    pool of contacts: if it is exhausted, any env may have lost contacts, and all are marked."""
    failures: Tensor
    """Number of failures of each env, int64 [env]."""
    overflows: Tensor
    """Number of steps in which each env overflowed, int64 [env]."""
    fault_free: bool = False
    """True if no env failed or overflowed in the last `step`; False if only a host sync could determine it."""
    _engine_state: dict[str, Tensor]
    """Memory of the engine for the `STATE_FIELDS` that the model has."""
    _fields: dict[str, Tensor]
    """Model fields that differ between envs."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, device: torch.device):
        self.model, self.num_envs, self.device = model, num_envs, device
        self._shared_fields: dict[str, Tensor] = {}
        flags, counts = (torch.zeros(num_envs, dtype=dtype, device=device) for dtype in (torch.bool, torch.int64))
        self.failed, self.overflowed, self.failures, self.overflows = flags, flags.clone(), counts, counts.clone()

    @property
    def time(self) -> Tensor:
        """Seconds since the reset, [env]."""
        return self._engine_state["time"].float()

    @abstractmethod
    def step(self, substeps: int) -> None:
        """Simulate `substeps` physics steps with the current `ctrl`."""

    @abstractmethod
    def sense(self) -> None:
        """Update position and velocity sensors of all envs."""

    @abstractmethod
    def reset(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Set the envs of `mask` to `qpos` and `qvel`, and the rest of their state to the model's defaults."""

    @abstractmethod
    def push(self, change: Tensor) -> None:
        """Add `change` to the velocities, [env, nv]. Call it before `sense`."""

    def field(self, name: str) -> Tensor:
        """Return a per-env field of the model, or "opt.gravity", [env, ...]. Only the fields of `per_env_fields` exist.

        To change it, write in place and call `refresh_constants`, both before `sense`.
        """
        if name not in self._fields:
            raise KeyError(f"model field {name!r} is not per env; per-env fields are {self.per_env_fields}")
        return self._fields[name]

    @property
    def per_env_fields(self) -> tuple[str, ...]:
        """Names of the model fields that differ between envs."""
        return tuple(self._fields)

    def model_field(self, name: str) -> Tensor:
        """Return a field of the model, [env, ...] if it differs between envs, otherwise [1, ...]."""
        if name in self._fields:
            return self._fields[name]
        if name not in self._shared_fields:
            values = torch.from_numpy(np.array(getattr(self.model, name)))
            self._shared_fields[name] = values.to(self.device, torch.float32).unsqueeze(0)
        return self._shared_fields[name]

    @abstractmethod
    def kinematics(self, name: str) -> Tensor:
        """Return poses that `sense` updates in place: cam_xpos, cam_xmat, light_xpos, light_xdir, geom_xpos or
        geom_xmat, [env, object, ...]. Matrices are [3, 3]."""

    @abstractmethod
    def refresh_constants(self, derived: bool = True) -> None:
        """Apply changes of per-env fields. `derived` also recomputes the constants that depend on masses, inertias,
        armatures and gears; it is required if one of these changed."""

    def state(self) -> dict[str, Tensor]:
        """Return copies of all tensors that determine future steps. Names are the same on both engines."""
        return {name: tensor.clone() for name, tensor in self._named_state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self._named_state().items():
            tensor.copy_(state[name])
        if self._fields:
            self.refresh_constants()
        self._prepare_loaded_state()
        self.sense()
        # `sense` updates only some of the sensors.
        self.sensordata.copy_(state["sensordata"])

    def _named_state(self) -> dict[str, Tensor]:
        saved = {"failures": self.failures, "overflows": self.overflows, "sensordata": self.sensordata}
        return self._engine_state | saved | {f"field/{name}": field for name, field in self._fields.items()}

    @abstractmethod
    def _prepare_loaded_state(self) -> None:
        """Clear the faults of earlier steps, and copy the engine's state where the engine has its own memory."""


def initial_data(model: mujoco.MjModel) -> mujoco.MjData:
    """Return the state in the first keyframe, or the default state of a model without keyframes. Poses of bodies are
    not computed."""
    data = mujoco.MjData(model)
    if model.nkey:
        mujoco.mj_resetDataKeyframe(model, data, 0)
    return data


def sensor_columns(model: mujoco.MjModel) -> dict[str, slice]:
    """Return the columns of each sensor in `sensordata`, by sensor name."""
    sizes = zip(model.sensor_adr.tolist(), model.sensor_dim.tolist(), strict=True)
    return {model.sensor(i).name: slice(start, start + size) for i, (start, size) in enumerate(sizes)}


def columns_before_acceleration(model: mujoco.MjModel) -> np.ndarray:
    """Return a mask of the columns of `sensordata` that depend on positions and velocities only, bool [nsensordata]."""
    return np.repeat(model.sensor_needstage < mujoco.mjtStage.mjSTAGE_ACC.value, model.sensor_dim)


def choose_engine(engine: str, device: torch.device) -> str:
    """Resolve "auto": MuJoCo's C engine on a CPU, MuJoCo Warp on a GPU."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    if engine == "auto":
        return "warp" if device.type == "cuda" else "mujoco"
    if engine == "mujoco" and device.type == "cuda":
        raise UserError("engine 'mujoco' runs on the CPU: use --gpu-ids none with it, or --engine warp on a GPU")
    return engine


def make_sim(
    model: mujoco.MjModel,
    num_envs: int,
    engine: str,
    device: torch.device,
    per_env_fields: tuple[str, ...] = (),
    threads: int | None = None,
) -> Sim:
    """Return the envs on one engine; the other engine is not imported. `threads` is for the C engine."""
    if choose_engine(engine, device) == "mujoco":
        try:
            from paceline.sim.mujoco_sim import MujocoSim
        except ModuleNotFoundError as error:
            raise UserError(
                f"engine 'mujoco' needs MuJoCo 4, but {mujoco.__version__} is installed, without {error.name}: pip "
                "install 'mujoco>=4,<5', in another environment if a package such as mjlab needs the older one"
            ) from None

        return MujocoSim(model, num_envs, per_env_fields, threads)
    try:
        from paceline.sim.warp_sim import WarpSim
    except ModuleNotFoundError as error:
        raise UserError(
            f"engine 'warp' needs {error.name}, which is not installed: pip install mujoco-warp, "
            "or train on the CPU with --gpu-ids none"
        ) from None
    return WarpSim(model, num_envs, device, per_env_fields)
