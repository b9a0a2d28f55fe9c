"""MuJoCo Warp: envs on a GPU, or on the CPU for parity tests. All calls can be captured into a CUDA graph."""

from contextlib import AbstractContextManager

import mujoco
import mujoco_warp as mjw
import torch
import warp as wp
from torch import Tensor

from paceline.sim.model import columns_before_acceleration
from paceline.sim.simulation import MAX_STATE_VALUE, STATE_FIELDS
from paceline.sim.warp_kernels import detect_faults, reset_envs
from paceline.tensors.graph import warp_stream

# Fields that mj_setConst derives from masses, inertias, armatures and gears. They must be per env if their sources are.
_DERIVED_FIELDS = ("body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0", "tendon_invweight0")

_GRAVITY = "opt.gravity"

_OVERFLOWS = int(mjw.OverflowType.ALL) & ~int(mjw.OverflowType.ITERATIONS | mjw.OverflowType.LS_ITERATIONS)


def on_torch_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Warp launches kernels on the current torch stream, without synchronization."""
    if device.type == "cpu":
        return wp.ScopedDevice("cpu")
    return wp.ScopedStream(warp_stream(torch.cuda.current_stream(device)), sync_enter=False, sync_exit=False)


# State that every model has and whose default is zero; the kernel `reset_envs` resets it.
_KERNEL_RESET_FIELDS = ("time", "qpos", "qvel", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied")


class WarpSim:
    """Implements `Sim` with MuJoCo Warp. No call waits for the device, allocates memory or branches on a value."""

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        device: torch.device,
        per_env_fields: tuple[str, ...] = (),
        contacts_per_env: int | None = None,
        constraints_per_env: int | None = None,
    ):
        if model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4:
            raise ValueError("MuJoCo Warp does not support RK4 in two half steps: use implicitfast or Euler")
        wp.config.log_level = wp.LOG_WARNING
        self.model, self.num_envs, self.device = model, num_envs, device
        self._per_env_fields = per_env_fields
        batched = dict.fromkeys(per_env_fields + _DERIVED_FIELDS, num_envs) if per_env_fields else {}
        batched.pop(_GRAVITY, None)
        with on_torch_stream(self.device):
            self._model = mjw.put_model(model, batch_sizes=batched)
            if _GRAVITY in per_env_fields:
                # Kernels support one gravity per env, but `put_model` has no batch size for options.
                self._model.opt.gravity = wp.array(model.opt.gravity[None].repeat(num_envs, 0), dtype=wp.vec3)
            # Overflows are counted per env instead of printed by the kernels.
            self._model.opt.warn_overflow = 0
            self._data = mjw.make_data(model, num_envs, nconmax=contacts_per_env, njmax=constraints_per_env)
        live = {name: wp.to_torch(getattr(self._data, name)) for name in STATE_FIELDS}
        self._engine_state = {name: tensor for name, tensor in live.items() if tensor.numel()}
        self._initial = {
            name: rows.clone() for name, rows in self._engine_state.items() if name not in _KERNEL_RESET_FIELDS
        }
        self.qpos, self.qvel, self.act, self.time = (live[name] for name in ("qpos", "qvel", "act", "time"))
        self.ctrl, self.mocap_pos, self.mocap_quat = (live[name] for name in ("ctrl", "mocap_pos", "mocap_quat"))

        # step1 sets all sensors to zero, so sensors of accelerations and forces are kept in a copy.
        self._engine_sensordata = wp.to_torch(self._data.sensordata)
        early = torch.from_numpy(columns_before_acceleration(model)).to(device)
        self._all_early, self._early_columns = bool(early.all()), early
        self.sensordata = self._engine_sensordata if self._all_early else self._engine_sensordata.clone()

        def flags(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_envs, dtype=dtype, device=device)

        self.fault_free = False
        self.failed, self.overflowed = flags(torch.bool), flags(torch.bool)
        self.failures, self.overflows = flags(torch.int64), flags(torch.int64)
        self.sense()

    def step(self, substeps: int) -> None:
        with on_torch_stream(self.device):
            mjw.step2(self._model, self._data)
            for _ in range(substeps - 1):
                mjw.step1(self._model, self._data)
                mjw.step2(self._model, self._data)
            data, counts = self._data, [wp.from_torch(t) for t in (self.failures, self.overflows)]
            flags = [wp.from_torch(t) for t in (self.failed, self.overflowed)]
            inputs = [MAX_STATE_VALUE, _OVERFLOWS, data.qpos, data.qvel, data.overflow, *counts]
            wp.launch(detect_faults, self.num_envs, inputs=inputs, outputs=flags)
        if not self._all_early:
            self.sensordata.copy_(self._engine_sensordata)

    def sense(self) -> None:
        # This is the first half of the next physics step, so it adds no cost.
        with on_torch_stream(self.device):
            mjw.step1(self._model, self._data)
        if not self._all_early:
            torch.where(self._early_columns, self._engine_sensordata, self.sensordata, out=self.sensordata)

    def reset(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        with on_torch_stream(self.device):
            inputs = [wp.from_torch(tensor.contiguous()) for tensor in (mask, qpos, qvel)]
            outputs = [getattr(self._data, name) for name in _KERNEL_RESET_FIELDS]
            wp.launch(reset_envs, self.num_envs, inputs=inputs, outputs=outputs)
        for name, start in self._initial.items():
            live = self._engine_state[name]
            torch.where(mask.view(-1, *[1] * (live.dim() - 1)), start, live, out=live)
        if not self._all_early:
            self.sensordata.masked_fill_(mask[:, None] & ~self._early_columns, 0.0)

    def state(self) -> dict[str, Tensor]:
        counts = {"failures": self.failures, "overflows": self.overflows, "sensordata": self.sensordata}
        fields = {f"field/{name}": self.field(name) for name in self._per_env_fields}
        return {name: tensor.clone() for name, tensor in (self._engine_state | counts | fields).items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, live in self._engine_state.items():
            live.copy_(state[name])
        for name in self._per_env_fields:
            self.field(name).copy_(state[f"field/{name}"])
        if self._per_env_fields:
            self.refresh_constants()
        wp.to_torch(self._data.overflow).zero_()
        self.sense()
        self.sensordata.copy_(state["sensordata"])
        self.failures.copy_(state["failures"])
        self.overflows.copy_(state["overflows"])

    def field(self, name: str) -> Tensor:
        if name not in self._per_env_fields:
            raise KeyError(f"model field {name!r} is not per env; per-env fields are {self._per_env_fields}")
        return wp.to_torch(self._model.opt.gravity if name == _GRAVITY else getattr(self._model, name))

    def refresh_constants(self, derived: bool = True) -> None:
        if derived:
            with on_torch_stream(self.device):
                mjw.set_const(self._model, self._data)

    def push(self, change: Tensor) -> None:
        self.qvel += change
