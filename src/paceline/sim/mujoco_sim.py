"""MuJoCo's C engine: many envs on all CPU cores, simulated in float64, with float32 tensors for tasks."""

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
from paceline.sim.simulation import MAX_STATE_VALUE, STATE_FIELDS, Sim, columns_before_acceleration

_OVERFLOW_WARNINGS = (mujoco.mjtWarning.mjWARN_CONTACTFULL.value, mujoco.mjtWarning.mjWARN_CNSTRFULL.value)
_BAD_CONTROL_WARNING = mujoco.mjtWarning.mjWARN_BADCTRL.value
_OUTPUTS, _INPUTS = ("qpos", "qvel", "act"), ("ctrl", "mocap_pos", "mocap_quat")


class MujocoSim(Sim):
    """Implements `Sim` with `mujoco.batch.Batch`. Results are bit-identical for any number of threads, by default one
    per usable core."""

    def __init__(
        self, model: mujoco.MjModel, num_envs: int, per_env_fields: tuple[str, ...] = (), threads: int | None = None
    ):
        # Without this flag, MuJoCo resets an env that diverges without reporting it.
        model = copy.copy(model)
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(_print_unless_env_warning)
        super().__init__(model, num_envs, torch.device("cpu"))
        self._none = self.failed
        # Float32 copies of the poses that `kinematics` was called for, and the memory of the engine.
        self._kinematics: dict[str, tuple[Tensor, np.ndarray]] = {}
        self.batch = Batch(model, num_envs, threads or usable_cores())
        self._rows = {name: self.batch.bind(name) for name in STATE_FIELDS}
        self._engine_state = {name: torch.from_numpy(row) for name, row in self._rows.items() if row.size}
        self._default_row = self.batch.state[0].copy()
        self._state_values, self._warnings = self.batch.state.reshape(-1), self.batch.warning[:, :, 1]
        self._engine_sensordata = self.batch.bind("sensordata")
        early = columns_before_acceleration(model)
        self._early_columns, self._acceleration_columns = np.flatnonzero(early), np.flatnonzero(~early)

        tensors = {name: torch.from_numpy(self._rows[name]).float().clone() for name in (*_OUTPUTS, *_INPUTS)}
        self.qpos, self.qvel, self.act, self.ctrl, self.mocap_pos, self.mocap_quat = tensors.values()
        self.sensordata = torch.zeros(num_envs, model.nsensordata)
        # Pairs of a float32 tensor and the memory of the engine.
        self._outputs, self._inputs = (
            [(tensors[name], self._engine_state[name]) for name in names if name in self._engine_state]
            for names in (_OUTPUTS, _INPUTS)
        )
        self._expanded = {name: self.batch.expand(name) for name in per_env_fields}
        self._fields = {name: torch.from_numpy(rows).float() for name, rows in self._expanded.items()}
        if per_env_fields:
            self.refresh_constants()
        self.reset(torch.ones(num_envs, dtype=torch.bool), self.qpos.clone(), self.qvel.clone())
        self.sense()

    def step(self, substeps: int) -> None:
        self._write_inputs()
        raised = _call(Batch.step, self.batch, nstep=substeps)
        for tensor, memory in self._outputs:
            tensor.copy_(memory)
        self._read_sensordata(slice(None))
        self._detect_faults(raised)

    def _detect_faults(self, raised: np.ndarray) -> None:
        counts = self._warnings
        # One check of all envs is cheaper than one check per env. Comparisons with NaN are false.
        all_valid = bool(np.abs(self._state_values).max() < MAX_STATE_VALUE)
        self.fault_free = all_valid and not len(raised) and not counts.any()
        if self.fault_free:
            self.failed = self.overflowed = self._none
            return
        valid = (self.qpos.abs().amax(1) < MAX_STATE_VALUE) & (self.qvel.abs().amax(1) < MAX_STATE_VALUE)
        # The engine replaces a control that is not finite by zero and continues. MuJoCo Warp fails, so this fails too.
        self.failed = ~valid | torch.from_numpy(counts[:, _BAD_CONTROL_WARNING] > 0)
        self.failed[raised] = True
        self.failures += self.failed
        self.overflowed = torch.from_numpy(counts[:, _OVERFLOW_WARNINGS].any(1))
        self.overflows += self.overflowed
        counts[...] = 0

    def sense(self) -> None:
        # Without such sensors and without cameras nothing has to be computed here: the next step computes its own
        # kinematics.
        if not len(self._early_columns) and not self._kinematics:
            return
        self._write_inputs()
        _call(Batch.forward, self.batch, stage=mujoco.mjtStage.mjSTAGE_VEL.value)
        self._read_sensordata(self._early_columns)
        for poses, memory in self._kinematics.values():
            poses.numpy()[...] = memory

    def kinematics(self, name: str) -> Tensor:
        if name not in self._kinematics:
            memory = self.batch.bind(name)
            shape = (*memory.shape[:2], 3, 3) if name.endswith("mat") else memory.shape
            self._kinematics[name] = torch.zeros(shape), memory.reshape(shape)
            self.sense()
        return self._kinematics[name][0]

    def reset(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        envs = np.flatnonzero(mask.numpy())
        if not len(envs):
            return
        self._write_inputs()
        # `Batch.reset` writes the state row of an env; writing it directly is faster.
        self.batch.state[envs] = self._default_row
        self._rows["qpos"][envs] = qpos.numpy()[envs]
        self._rows["qvel"][envs] = qvel.numpy()[envs]
        self._read_state()
        if len(self._acceleration_columns):
            self.sensordata.numpy()[np.ix_(envs, self._acceleration_columns)] = 0.0

    def push(self, change: Tensor) -> None:
        self._rows["qvel"] += change.numpy()
        self.qvel.copy_(self._engine_state["qvel"])

    def refresh_constants(self, derived: bool = True) -> None:
        for name, field in self._fields.items():
            self._expanded[name][...] = field.numpy()
        if derived:
            self.batch.set_const()

    def state(self) -> dict[str, Tensor]:
        self._write_inputs()
        return super().state()

    def _prepare_loaded_state(self) -> None:
        self._read_state()
        self._warnings[...] = 0

    def _write_inputs(self) -> None:
        """Copy controls and mocap poses from the float32 tensors to the engine."""
        for tensor, memory in self._inputs:
            memory.copy_(tensor)

    def _read_state(self) -> None:
        for tensor, memory in (*self._outputs, *self._inputs):
            tensor.copy_(memory)

    def _read_sensordata(self, columns: slice | np.ndarray) -> None:
        if not self.model.nsensordata:
            return
        # Values of a failed env can exceed the range of float32. They become infinite, without a NumPy warning.
        with np.errstate(over="ignore"):
            self.sensordata.numpy()[:, columns] = self._engine_sensordata[:, columns]


def _call(function: Callable[..., None], batch: Batch, **arguments: int) -> np.ndarray:
    """Call a function of the batch and return the envs in which the engine raised an error; these keep their state."""
    try:
        function(batch, **arguments)
    except SimulationError as error:
        _print_once(batch.error(int(error.ids[0])))
        return error.ids
    return np.empty(0, dtype=np.int64)


@cache
def _print_once(message: str) -> None:
    print(f"MuJoCo: {message}", file=sys.stderr)


def _print_unless_env_warning(message: str) -> None:
    """Print a warning of MuJoCo, except those of a single env, which `failures` and `overflows` count.

    By default MuJoCo prints every warning and appends it to MUJOCO_LOG.TXT.
    """
    if "Time = " not in message:
        print(f"MuJoCo: {message}", file=sys.stderr)
