"""The interface of both physics engines: many envs of one model as torch tensors."""

from typing import Protocol

import mujoco
import torch
from torch import Tensor

from paceline.errors import UserError, unknown
from paceline.sim.calibration import measure_capacity

ENGINES = ("auto", "mujoco", "warp")

# MuJoCo treats a state beyond this magnitude as invalid (mjMAXVAL).
MAX_STATE_VALUE = 1e10


class Sim(Protocol):
    """`num_envs` copies of one model. Tensors have one row per env and are float32 on `device`.

    One env step calls `step`, then `reset` for the envs whose episode ended, then `sense`. The order matters, because
    the next `step` starts from what `sense` computed.
    """

    num_envs: int
    device: torch.device
    model: mujoco.MjModel

    qpos: Tensor
    """[env, nq]. Read-only, as all tensors except `ctrl`, `mocap_pos` and `mocap_quat`."""
    qvel: Tensor
    """[env, nv]"""
    act: Tensor
    """[env, na]"""
    ctrl: Tensor
    """[env, nu]. Write it before `step`."""
    mocap_pos: Tensor
    """[env, nmocap, 3]. May be written, like `ctrl`."""
    mocap_quat: Tensor
    """[env, nmocap, 4]. May be written, like `ctrl`."""
    sensordata: Tensor
    """[env, nsensordata]. After `step`, values are from the start of the last substep; after `sense`, they are current.
    Sensors of accelerations and forces keep the value of the last substep and are zero after a reset."""
    failed: Tensor
    """Envs whose state became non-finite or huge in the last `step`, bool [env]. They must be reset."""
    fault_free: bool
    """True if no env failed or overflowed in the last `step`; False if the engine does not know without waiting."""
    overflowed: Tensor
    """Envs that ran out of contact or constraint rows in the last `step`, bool [env]. In MuJoCo Warp all envs share one
    pool of contacts: if it is exhausted, any env may have lost contacts, and all are marked."""
    failures: Tensor
    """Number of failures of each env, int64 [env]."""
    overflows: Tensor
    """Number of steps in which each env overflowed, int64 [env]."""

    @property
    def time(self) -> Tensor:
        """Seconds since the reset, [env]."""
        ...

    def step(self, substeps: int) -> None:
        """Simulate `substeps` physics steps with the current `ctrl`."""
        ...

    def sense(self) -> None:
        """Update position and velocity sensors of all envs."""
        ...

    def reset(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Set the envs of `mask` to `qpos` and `qvel`, and the rest of their state to the model's defaults."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return copies of all tensors that determine future steps. Names are the same on both engines."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None: ...

    def field(self, name: str) -> Tensor:
        """Return a per-env field of the model, or "opt.gravity", [env, ...]. Only the fields of `per_env_fields` exist.

        To change it, write in place and call `refresh_constants`, both before `sense`.
        """
        ...

    def refresh_constants(self, derived: bool = True) -> None:
        """Apply changes of per-env fields. `derived` also recomputes the constants that depend on masses, inertias,
        armatures and gears; it is required if one of these changed."""
        ...

    def push(self, change: Tensor) -> None:
        """Add `change` to the velocities, [env, nv]. Call it before `sense`."""
        ...


STATE_FIELDS = (
    "time",
    "qpos",
    "qvel",
    "act",
    "history",
    "plastic",
    "qacc_warmstart",
    "ctrl",
    "qfrc_applied",
    "xfrc_applied",
    "eq_active",
    "mocap_pos",
    "mocap_quat",
    "userdata",
)
"""MuJoCo's integration state without plugins, which MuJoCo Warp does not support."""


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
    contacts_per_env: int | None = None,
    constraints_per_env: int | None = None,
    threads: int | None = None,
) -> Sim:
    """Create the envs on one engine; the other engine is not imported.

    `threads` is for the C engine; the default is the number of usable cores. `contacts_per_env` and
    `constraints_per_env` are for MuJoCo Warp; the defaults are measured with `measure_capacity`.
    """
    if choose_engine(engine, device) == "mujoco":
        from paceline.sim.mujoco_sim import MujocoSim

        return MujocoSim(model, num_envs, per_env_fields, threads)
    try:
        from paceline.sim.warp_sim import WarpSim
    except ModuleNotFoundError as error:
        raise UserError(
            f"engine 'warp' needs {error.name}, which is not installed: pip install mujoco-warp, "
            "or train on the CPU with --gpu-ids none"
        ) from None

    capacity = measure_capacity(model)
    contacts, constraints = contacts_per_env or capacity.contacts, constraints_per_env or capacity.constraints
    return WarpSim(model, num_envs, device, per_env_fields, contacts, constraints)
