"""MuJoCo Warp: envs on a GPU, or on the CPU for parity tests. All calls can be captured into a CUDA graph."""

from contextlib import AbstractContextManager
from operator import attrgetter

import mujoco
import mujoco_warp as mjw
import torch
import warp as wp
from torch import Tensor

from paceline.sim.calibration import measure_capacity
from paceline.sim.simulation import MAX_STATE_VALUE, STATE_FIELDS, Sim, columns_before_acceleration
from paceline.sim.warp_kernels import detect_faults, reset_envs
from paceline.tensors.graph import warp_stream

# Fields that mj_setConst derives from masses, inertias, armatures, gears and the poses of cameras and lights. They must
# be per env if their sources are.
_DERIVED_FIELDS = (
    *("body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0", "tendon_invweight0"),
    *("cam_pos0", "cam_poscom0", "cam_mat0", "light_pos0", "light_poscom0", "light_dir0"),
)

# State that every model has and whose default is zero; the kernel `reset_envs` resets it.
_KERNEL_RESET_FIELDS = ("time", "qpos", "qvel", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied")
_GRAVITY = "opt.gravity"
_OVERFLOWS = int(mjw.OverflowType.ALL) & ~int(mjw.OverflowType.ITERATIONS | mjw.OverflowType.LS_ITERATIONS)


def on_torch_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Warp launches kernels on the current torch stream, without synchronization."""
    if device.type == "cpu":
        return wp.ScopedDevice("cpu")
    return wp.ScopedStream(warp_stream(torch.cuda.current_stream(device)), sync_enter=False, sync_exit=False)


class WarpSim(Sim):
    """Implements `Sim` with MuJoCo Warp. No call waits for the device, allocates memory or branches on a value.

    The numbers of contacts and constraint rows are by default those of `measure_capacity`.
    """

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
        super().__init__(model, num_envs, device)
        capacity = measure_capacity(model)
        contacts, constraints = contacts_per_env or capacity.contacts, constraints_per_env or capacity.constraints
        batched = dict.fromkeys(per_env_fields + _DERIVED_FIELDS, num_envs) if per_env_fields else {}
        batched.pop(_GRAVITY, None)
        with on_torch_stream(self.device):
            self.warp_model = mjw.put_model(model, batch_sizes=batched)
            if _GRAVITY in per_env_fields:
                # Kernels support one gravity per env, but `put_model` has no batch size for options.
                self.warp_model.opt.gravity = wp.array(model.opt.gravity[None].repeat(num_envs, 0), dtype=wp.vec3)
            # Overflows are counted per env instead of printed by the kernels.
            self.warp_model.opt.warn_overflow = 0
            self.warp_data = mjw.make_data(model, num_envs, nconmax=contacts, njmax=constraints)
        self._fields = {name: wp.to_torch(attrgetter(name)(self.warp_model)) for name in per_env_fields}
        views = {name: wp.to_torch(getattr(self.warp_data, name)) for name in STATE_FIELDS}
        self._engine_state = {name: tensor for name, tensor in views.items() if tensor.numel()}
        self._initial = {n: rows.clone() for n, rows in self._engine_state.items() if n not in _KERNEL_RESET_FIELDS}
        self.qpos, self.qvel, self.act = (views[name] for name in ("qpos", "qvel", "act"))
        self.ctrl, self.mocap_pos, self.mocap_quat = (views[name] for name in ("ctrl", "mocap_pos", "mocap_quat"))

        # step1 sets all sensors to zero, so sensors of accelerations and forces are kept in a copy.
        self._engine_sensordata = wp.to_torch(self.warp_data.sensordata)
        self._early_columns = torch.from_numpy(columns_before_acceleration(model)).to(device)
        self._all_early = bool(self._early_columns.all())
        self.sensordata = self._engine_sensordata if self._all_early else self._engine_sensordata.clone()
        self.sense()

    def step(self, substeps: int) -> None:
        with on_torch_stream(self.device):
            mjw.step2(self.warp_model, self.warp_data)
            for _ in range(substeps - 1):
                mjw.step1(self.warp_model, self.warp_data)
                mjw.step2(self.warp_model, self.warp_data)
            data, counts = self.warp_data, [wp.from_torch(t) for t in (self.failures, self.overflows)]
            flags = [wp.from_torch(t) for t in (self.failed, self.overflowed)]
            inputs = [MAX_STATE_VALUE, _OVERFLOWS, data.qpos, data.qvel, data.overflow, *counts]
            wp.launch(detect_faults, self.num_envs, inputs=inputs, outputs=flags)
        if not self._all_early:
            self.sensordata.copy_(self._engine_sensordata)

    def sense(self) -> None:
        # This is the first half of the next physics step, so it adds no cost.
        with on_torch_stream(self.device):
            mjw.step1(self.warp_model, self.warp_data)
        if not self._all_early:
            torch.where(self._early_columns, self._engine_sensordata, self.sensordata, out=self.sensordata)

    def reset(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        with on_torch_stream(self.device):
            inputs = [wp.from_torch(tensor.contiguous()) for tensor in (mask, qpos, qvel)]
            outputs = [getattr(self.warp_data, name) for name in _KERNEL_RESET_FIELDS]
            wp.launch(reset_envs, self.num_envs, inputs=inputs, outputs=outputs)
        for name, start in self._initial.items():
            current = self._engine_state[name]
            torch.where(mask.view(-1, *[1] * (current.dim() - 1)), start, current, out=current)
        if not self._all_early:
            self.sensordata.masked_fill_(mask[:, None] & ~self._early_columns, 0.0)

    def kinematics(self, name: str) -> Tensor:
        return wp.to_torch(getattr(self.warp_data, name))

    def refresh_constants(self, derived: bool = True) -> None:
        if derived:
            with on_torch_stream(self.device):
                mjw.set_const(self.warp_model, self.warp_data)

    def push(self, change: Tensor) -> None:
        self.qvel += change

    def _prepare_loaded_state(self) -> None:
        wp.to_torch(self.warp_data.overflow).zero_()
