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
from paceline.sim.model import columns_before_acceleration
from paceline.sim.simulation import MAX_STATE_VALUE, STATE_FIELDS

_OVERFLOW_WARNINGS = (mujoco.mjtWarning.mjWARN_CONTACTFULL.value, mujoco.mjtWarning.mjWARN_CNSTRFULL.value)
_BAD_CONTROL_WARNING = mujoco.mjtWarning.mjWARN_BADCTRL.value


class MujocoSim:
    """Implements `Sim` with `mujoco.batch.Batch`. Results are bit-identical for any number of threads."""

    def __init__(
        self, model: mujoco.MjModel, num_envs: int, per_env_fields: tuple[str, ...] = (), threads: int | None = None
    ):
        # Without this flag, MuJoCo resets an env that diverges without reporting it.
        model = copy.copy(model)
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(_print_unless_env_warning)
        self.model, self.num_envs, self.device = model, num_envs, torch.device("cpu")
        self.batch = Batch(model, num_envs, threads or usable_cores())
        self._rows = {name: self.batch.bind(name) for name in STATE_FIELDS}
        self._engine_state = {name: torch.from_numpy(row) for name, row in self._rows.items() if row.size}
        self._default_row = self.batch.state[0].copy()
        self._state_values, self._warnings = self.batch.state.reshape(-1), self.batch.warning[:, :, 1]
        self._engine_sensordata = self.batch.bind("sensordata")
        self._early_columns = np.flatnonzero(columns_before_acceleration(model))
        self._acceleration_columns = np.flatnonzero(~columns_before_acceleration(model))

        self.qpos, self.qvel, self.act, self.ctrl, self.mocap_pos, self.mocap_quat = (
            torch.from_numpy(self._rows[name]).float().clone()
            for name in ("qpos", "qvel", "act", "ctrl", "mocap_pos", "mocap_quat")
        )
        self.sensordata = torch.zeros(num_envs, model.nsensordata)
        outputs = (("qpos", self.qpos), ("qvel", self.qvel), ("act", self.act))
        inputs = (("ctrl", self.ctrl), ("mocap_pos", self.mocap_pos), ("mocap_quat", self.mocap_quat))
        self._outputs = [(tensor, self._engine_state[name]) for name, tensor in outputs if tensor.numel()]
        self._inputs = [(self._engine_state[name], tensor) for name, tensor in inputs if tensor.numel()]
        self.fault_free = True
        self.failed = self.overflowed = self._none = torch.zeros(num_envs, dtype=torch.bool)
        self.failures, self.overflows = (torch.zeros(num_envs, dtype=torch.int64) for _ in range(2))

        self._expanded = {name: self.batch.expand(name) for name in per_env_fields}
        self._fields = {name: torch.from_numpy(rows).float() for name, rows in self._expanded.items()}
        if per_env_fields:
            self.refresh_constants()
        self.reset(torch.ones(num_envs, dtype=torch.bool), self.qpos.clone(), self.qvel.clone())
        self.sense()

    @property
    def time(self) -> Tensor:
        return self._engine_state["time"].float()

    def step(self, substeps: int) -> None:
        self._copy_inputs()
        raised = _call(Batch.step, self.batch, nstep=substeps)
        for tensor, live in self._outputs:
            tensor.copy_(live)
        self._copy_sensordata(slice(None))
        self._detect_faults(raised)

    def _detect_faults(self, raised: np.ndarray) -> None:
        counts = self._warnings
        if not len(raised) and not counts.any() and _is_valid(self._state_values):
            # This is the usual case; one check of all envs is cheaper than one check per env.
            self.fault_free, self.failed, self.overflowed = True, self._none, self._none
            return
        self.fault_free = False
        # The engine replaces a control that is not finite by zero and continues. MuJoCo Warp fails, so this fails too.
        self.failed = _diverged(self.qpos, self.qvel) | torch.from_numpy(counts[:, _BAD_CONTROL_WARNING] > 0)
        self.failed[raised] = True
        self.failures += self.failed
        self.overflowed = torch.from_numpy(counts[:, _OVERFLOW_WARNINGS].any(1))
        self.overflows += self.overflowed
        counts[...] = 0

    def sense(self) -> None:
        # Without such sensors nothing has to be computed here: the next step computes its own kinematics.
        if not len(self._early_columns):
            return
        self._copy_inputs()
        _call(Batch.forward, self.batch, stage=mujoco.mjtStage.mjSTAGE_VEL.value)
        self._copy_sensordata(self._early_columns)

    def reset(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        envs = np.flatnonzero(mask.numpy())
        if not len(envs):
            return
        self._copy_inputs()
        # `Batch.reset` writes the state row of an env; writing it directly is faster.
        self.batch.state[envs] = self._default_row
        self._rows["qpos"][envs] = qpos.numpy()[envs]
        self._rows["qvel"][envs] = qvel.numpy()[envs]
        self._copy_state()
        if len(self._acceleration_columns):
            self.sensordata.numpy()[np.ix_(envs, self._acceleration_columns)] = 0.0

    def _copy_inputs(self) -> None:
        """Copy controls and mocap poses from the float32 tensors to the engine."""
        for live, tensor in self._inputs:
            live.copy_(tensor)

    def _copy_sensordata(self, columns: slice | np.ndarray) -> None:
        if not self.model.nsensordata:
            return
        # Values of a failed env can exceed the range of float32. They become infinite, without a NumPy warning.
        with np.errstate(over="ignore"):
            self.sensordata.numpy()[:, columns] = self._engine_sensordata[:, columns]

    def _copy_state(self) -> None:
        for tensor, live in self._outputs:
            tensor.copy_(live)
        for live, tensor in self._inputs:
            tensor.copy_(live)

    def state(self) -> dict[str, Tensor]:
        counts = {"failures": self.failures, "overflows": self.overflows, "sensordata": self.sensordata}
        fields = {f"field/{name}": field for name, field in self._fields.items()}
        self._copy_inputs()
        return {name: tensor.clone() for name, tensor in (self._engine_state | counts | fields).items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, live in self._engine_state.items():
            live.copy_(state[name])
        self._copy_state()
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
            raise KeyError(f"model field {name!r} is not per env; per-env fields are {tuple(self._fields)}")
        return self._fields[name]

    def refresh_constants(self, derived: bool = True) -> None:
        for name, field in self._fields.items():
            self._expanded[name][...] = field.numpy()
        if derived:
            self.batch.set_const()

    def push(self, change: Tensor) -> None:
        self._rows["qvel"] += change.numpy()
        self.qvel.copy_(self._engine_state["qvel"])


def _diverged(qpos: Tensor, qvel: Tensor) -> Tensor:
    """Return the envs with a non-finite or huge state, bool [env]. Comparisons with NaN are false."""
    return ~((qpos.abs().amax(1) < MAX_STATE_VALUE) & (qvel.abs().amax(1) < MAX_STATE_VALUE))


def _is_valid(values: np.ndarray) -> bool:
    """Return True if no value is NaN or huge. Comparisons with NaN are false."""
    return bool(np.abs(values).max() < MAX_STATE_VALUE)


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
