"""The one interface of both engines: many worlds of one model, seen as torch tensors."""

from typing import Protocol

import mujoco
import torch
from torch import Tensor

from paceline.errors import UserError, unknown
from paceline.sim.calibration import measured

ENGINES = ("auto", "mujoco", "warp")

# Beyond this magnitude MuJoCo itself calls a state bad (mjMAXVAL).
LARGEST_SANE_VALUE = 1e10


class Sim(Protocol):
    """Worlds of one model, one row each, float32 on `device`.

    One env step is `step`, then `reset` for the worlds that ended, then `sense`; the three in this order, because
    what `sense` computes is what the next `step` starts from.
    """

    worlds: int
    device: torch.device
    model: mujoco.MjModel

    qpos: Tensor
    """[world, nq]; read only, as are all but `ctrl`, `mocap_pos` and `mocap_quat`."""
    qvel: Tensor
    """[world, nv]"""
    act: Tensor
    """[world, na]"""
    ctrl: Tensor
    """[world, nu]; write it before `step`."""
    mocap_pos: Tensor
    """[world, nmocap, 3]; may be written, as `ctrl`."""
    mocap_quat: Tensor
    """[world, nmocap, 4]; may be written, as `ctrl`."""
    sensordata: Tensor
    """[world, nsensordata]; after `step` as of the last substep's start, after `sense` as of now. Sensors of
    accelerations and forces keep the last substep's value, and are zero in a world that was just reset."""
    failed: Tensor
    """Worlds whose state became non-finite or huge in the last `step`, bool [world]; they must be reset."""
    all_well: bool
    """Whether the engine knows that none did, without waiting for a device; false where it cannot know."""
    overflowed: Tensor
    """Worlds that ran out of contact or constraint rows in the last `step`, bool [world]. On MuJoCo Warp contacts are
    one pool for all worlds: when it is empty, any of them may have lost some, and all are marked."""
    failures: Tensor
    """How often each world failed, int64 [world]."""
    overflows: Tensor
    """In how many steps each world overflowed, int64 [world]."""

    @property
    def time(self) -> Tensor:
        """Seconds since the reset, [world]."""
        ...

    def step(self, substeps: int) -> None:
        """Integrate `substeps` times with the present `ctrl`."""
        ...

    def sense(self) -> None:
        """Bring position and velocity sensors up to date in all worlds."""
        ...

    def reset(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Put the worlds of `mask` into this state, everything else at the model's defaults."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that the future depends on, as copies; the same names on both engines."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None: ...

    def field(self, name: str) -> Tensor:
        """A field of the model, or "opt.gravity", with one row per world, [world, ...]; only those named at the start.
        Write in place, then call `refresh_constants`, all before `sense`."""
        ...

    def refresh_constants(self, derived: bool = True) -> None:
        """Make the engine follow what was written into `field`s; also in the constants that are `derived` from masses,
        inertias, armatures and gears, if these were among them."""
        ...

    def push(self, change: Tensor) -> None:
        """Add to the velocities, [world, nv]; before `sense`."""
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
"""MuJoCo's integration state, less plugins (which MuJoCo Warp does not have)."""


def choose_engine(engine: str, device: torch.device) -> str:
    """`auto` is MuJoCo's C engine on a CPU and MuJoCo Warp on a GPU."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    if engine == "auto":
        return "warp" if device.type == "cuda" else "mujoco"
    if engine == "mujoco" and device.type == "cuda":
        raise UserError("engine 'mujoco' runs on the CPU: use --gpu-ids none with it, or --engine warp on a GPU")
    return engine


def make_sim(
    model: mujoco.MjModel,
    worlds: int,
    engine: str,
    device: torch.device,
    per_world_fields: tuple[str, ...] = (),
    contacts_per_world: int | None = None,
    constraints_per_world: int | None = None,
    threads: int | None = None,
) -> Sim:
    """Build the worlds on the chosen engine; only that engine is imported. `threads` are the C engine's, by default as
    many as there are cores; contacts and constraints are Warp's, by default as many as were measured to be enough."""
    if choose_engine(engine, device) == "mujoco":
        from paceline.sim.mujoco_sim import MujocoSim

        return MujocoSim(model, worlds, per_world_fields, threads)
    try:
        from paceline.sim.warp_sim import WarpSim
    except ModuleNotFoundError as error:
        raise UserError(
            f"engine 'warp' needs {error.name}, which is not installed: pip install mujoco-warp, "
            "or train on the CPU with --gpu-ids none"
        ) from None

    room = measured(model)
    contacts, constraints = contacts_per_world or room.contacts, constraints_per_world or room.constraints
    return WarpSim(model, worlds, device, per_world_fields, contacts, constraints)
