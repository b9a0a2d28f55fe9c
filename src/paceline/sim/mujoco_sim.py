"""MuJoCo's C engine: many worlds over all cores, in float64, shown to tasks as float32."""

import copy
import sys
from collections.abc import Callable
from functools import cache

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch, SimulationError
from torch import Tensor

from paceline.device.cpu import usable_cores
from paceline.sim.model import sensed_before_forces
from paceline.sim.simulation import LARGEST_SANE_VALUE, STATE_FIELDS

_OVERFLOW_WARNINGS = (mujoco.mjtWarning.mjWARN_CONTACTFULL.value, mujoco.mjtWarning.mjWARN_CNSTRFULL.value)
_BAD_CONTROL_WARNING = mujoco.mjtWarning.mjWARN_BADCTRL.value


class MujocoSim:
    """A `Sim` on `mujoco.batch.Batch`; bit-identical for any number of threads."""

    def __init__(
        self, model: mujoco.MjModel, worlds: int, per_world_fields: tuple[str, ...] = (), threads: int | None = None
    ):
        # Without this flag a world that blows up resets itself silently and nobody counts it.
        model = copy.copy(model)
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(_print_unless_counted)
        self.model, self.worlds, self.device = model, worlds, torch.device("cpu")
        self._batch = Batch(model, worlds, threads or usable_cores())
        self._rows = {name: self._batch.bind(name) for name in STATE_FIELDS}
        self._live = {name: torch.from_numpy(row) for name, row in self._rows.items() if row.size}
        self._default_row = self._batch.state[0].copy()
        self._numbers, self._warnings = self._batch.state.reshape(-1), self._batch.warning[:, :, 1]
        self._sensed = self._batch.bind("sensordata")
        self._fresh = np.flatnonzero(sensed_before_forces(model))
        self._of_forces = np.flatnonzero(~sensed_before_forces(model))

        self.qpos, self.qvel, self.act, self.ctrl, self.mocap_pos, self.mocap_quat = (
            torch.from_numpy(self._rows[name]).float().clone()
            for name in ("qpos", "qvel", "act", "ctrl", "mocap_pos", "mocap_quat")
        )
        self.sensordata = torch.zeros(worlds, model.nsensordata)
        moving = (("qpos", self.qpos), ("qvel", self.qvel), ("act", self.act))
        given = (("ctrl", self.ctrl), ("mocap_pos", self.mocap_pos), ("mocap_quat", self.mocap_quat))
        self._outward = [(shown, self._live[name]) for name, shown in moving if shown.numel()]
        self._inward = [(self._live[name], shown) for name, shown in given if shown.numel()]
        self.all_well = True
        self.failed = self.overflowed = self._nobody = torch.zeros(worlds, dtype=torch.bool)
        self.failures, self.overflows = torch.zeros(worlds, dtype=torch.int64), torch.zeros(worlds, dtype=torch.int64)

        self._expanded = {name: self._batch.expand(name) for name in per_world_fields}
        self._fields = {name: torch.from_numpy(rows).float() for name, rows in self._expanded.items()}
        if per_world_fields:
            self.refresh_constants()
        self.reset(torch.ones(worlds, dtype=torch.bool), self.qpos.clone(), self.qvel.clone())
        self.sense()

    @property
    def time(self) -> Tensor:
        return self._live["time"].float()

    def step(self, substeps: int) -> None:
        self._take_inputs()
        raised = _call(Batch.step, self._batch, nstep=substeps)
        for shown, live in self._outward:
            shown.copy_(live)
        self._show_sensors(slice(None))
        self._look_for_faults(raised)

    def _look_for_faults(self, raised: np.ndarray) -> None:
        counts = self._warnings
        if not len(raised) and not counts.any() and _sane(self._numbers):
            # Almost always, and cheaper to find out for all worlds at once than for each.
            self.all_well, self.failed, self.overflowed = True, self._nobody, self._nobody
            return
        self.all_well = False
        # The engine puts zero in place of a control that is not finite, and goes on; MuJoCo Warp fails, so we do too.
        self.failed = _blew_up(self.qpos, self.qvel) | torch.from_numpy(counts[:, _BAD_CONTROL_WARNING] > 0)
        self.failed[raised] = True
        self.failures += self.failed
        self.overflowed = torch.from_numpy(counts[:, _OVERFLOW_WARNINGS].any(1))
        self.overflows += self.overflowed
        counts[...] = 0

    def sense(self) -> None:
        # A model without such sensors needs no pass at all: the next step computes its own kinematics.
        if not len(self._fresh):
            return
        self._take_inputs()
        _call(Batch.forward, self._batch, stage=mujoco.mjtStage.mjSTAGE_VEL.value)
        self._show_sensors(self._fresh)

    def reset(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        worlds = np.flatnonzero(mask.numpy())
        if not len(worlds):
            return
        self._take_inputs()
        # A world is its state row: writing the row is what `Batch.reset` does, without the call.
        self._batch.state[worlds] = self._default_row
        self._rows["qpos"][worlds] = qpos.numpy()[worlds]
        self._rows["qvel"][worlds] = qvel.numpy()[worlds]
        self._show()
        if len(self._of_forces):
            self.sensordata.numpy()[np.ix_(worlds, self._of_forces)] = 0.0

    def _take_inputs(self) -> None:
        """What the task wrote since the last call becomes the engine's."""
        for live, given in self._inward:
            live.copy_(given)

    def _show_sensors(self, columns: slice | np.ndarray) -> None:
        if not self.model.nsensordata:
            return
        # A failed world's values may be too large for float32; infinity is right, and no cause for a warning.
        with np.errstate(over="ignore"):
            self.sensordata.numpy()[:, columns] = self._sensed[:, columns]

    def _show(self) -> None:
        for shown, live in self._outward:
            shown.copy_(live)
        for live, given in self._inward:
            given.copy_(live)

    def state(self) -> dict[str, Tensor]:
        counts = {"failures": self.failures, "overflows": self.overflows, "sensordata": self.sensordata}
        fields = {f"field/{name}": field for name, field in self._fields.items()}
        self._take_inputs()
        return {name: tensor.clone() for name, tensor in (self._live | counts | fields).items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, live in self._live.items():
            live.copy_(state[name])
        self._show()
        for name, field in self._fields.items():
            field.copy_(state[f"field/{name}"])
        if self._fields:
            self.refresh_constants()
        self._warnings[...] = 0
        self.sense()
        self.sensordata.copy_(state["sensordata"])
        self.failures.copy_(state["failures"])
        self.overflows.copy_(state["overflows"])

    def field(self, name: str) -> Tensor:
        if name not in self._fields:
            raise KeyError(f"model field {name!r} is not per world; those that are: {tuple(self._fields)}")
        return self._fields[name]

    def refresh_constants(self, derived: bool = True) -> None:
        for name, field in self._fields.items():
            self._expanded[name][...] = field.numpy()
        if derived:
            self._batch.set_const()

    def push(self, change: Tensor) -> None:
        self._rows["qvel"] += change.numpy()
        self.qvel.copy_(self._live["qvel"])


def _blew_up(qpos: Tensor, qvel: Tensor) -> Tensor:
    """Worlds with a non-finite or huge state, bool [world]; a NaN compares false and so counts."""
    return ~((qpos.abs().amax(1) < LARGEST_SANE_VALUE) & (qvel.abs().amax(1) < LARGEST_SANE_VALUE))


def _sane(numbers: np.ndarray) -> bool:
    """Whether none is huge or not a number: a comparison with NaN is false."""
    return bool(np.abs(numbers).max() < LARGEST_SANE_VALUE)


def _call(function: Callable[..., None], batch: Batch, **arguments: int) -> np.ndarray:
    """Run a batch call; the worlds in which the engine itself raised keep the state they had, and are returned."""
    try:
        function(batch, **arguments)
    except SimulationError as error:
        _tell_once(batch.error(int(error.ids[0])))
        return error.ids
    return np.empty(0, dtype=np.int64)


@cache
def _tell_once(message: str) -> None:
    print(f"MuJoCo: {message}", file=sys.stderr)


def _print_unless_counted(message: str) -> None:
    """By default MuJoCo prints a line, and adds it to MUJOCO_LOG.TXT, for every world that fails or overflows."""
    if "Time = " not in message:
        print(f"MuJoCo: {message}", file=sys.stderr)
