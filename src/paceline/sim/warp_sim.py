"""MuJoCo Warp: worlds on a GPU (or, for parity tests, on the CPU), capturable into a CUDA graph."""

from contextlib import AbstractContextManager

import mujoco
import mujoco_warp as mjw
import torch
import warp as wp
from torch import Tensor

from paceline.sim.model import sensed_before_forces
from paceline.sim.simulation import LARGEST_SANE_VALUE, STATE_FIELDS
from paceline.sim.warp_kernels import look_for_faults, restart
from paceline.tensors.graph import warp_stream

# What mj_setConst derives from masses, inertias, armatures and gears; each must be per world where its source is.
_DERIVED_FIELDS = ("body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0", "tendon_invweight0")

_GRAVITY = "opt.gravity"

_OVERFLOWS = int(mjw.OverflowType.ALL) & ~int(mjw.OverflowType.ITERATIONS | mjw.OverflowType.LS_ITERATIONS)


def on_torch_stream(device: torch.device) -> AbstractContextManager[object]:
    """Inside, Warp launches its kernels on torch's current stream, so that neither has to wait for the other."""
    if device.type == "cpu":
        return wp.ScopedDevice("cpu")
    return wp.ScopedStream(warp_stream(torch.cuda.current_stream(device)), sync_enter=False, sync_exit=False)


# State that every model has, and whose default is zero; `restart` resets it in one kernel.
_ALWAYS_THERE = ("time", "qpos", "qvel", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied")


class WarpSim:
    """A `Sim` on MuJoCo Warp. No call waits for the host, allocates anew or branches on a value."""

    def __init__(
        self,
        model: mujoco.MjModel,
        worlds: int,
        device: torch.device,
        per_world_fields: tuple[str, ...] = (),
        contacts_per_world: int | None = None,
        constraints_per_world: int | None = None,
    ):
        if model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4:
            raise ValueError("MuJoCo Warp steps in two halves, which RK4 does not have: use implicitfast or Euler")
        wp.config.log_level = wp.LOG_WARNING
        self.model, self.worlds, self.device = model, worlds, device
        self._per_world_fields = per_world_fields
        batched = dict.fromkeys(per_world_fields + _DERIVED_FIELDS, worlds) if per_world_fields else {}
        batched.pop(_GRAVITY, None)
        with on_torch_stream(self.device):
            self._model = mjw.put_model(model, batch_sizes=batched)
            if _GRAVITY in per_world_fields:
                # Kernels take the row of their world from options too; only `put_model` has no size for them.
                self._model.opt.gravity = wp.array(model.opt.gravity[None].repeat(worlds, 0), dtype=wp.vec3)
            # Overflows are counted per world instead of printed from inside the kernels.
            self._model.opt.warn_overflow = 0
            self._data = mjw.make_data(model, worlds, nconmax=contacts_per_world, njmax=constraints_per_world)
        live = {name: wp.to_torch(getattr(self._data, name)) for name in STATE_FIELDS}
        self._live = {name: tensor for name, tensor in live.items() if tensor.numel()}
        self._initial = {name: rows.clone() for name, rows in self._live.items() if name not in _ALWAYS_THERE}
        self.qpos, self.qvel, self.act, self.time = (live[name] for name in ("qpos", "qvel", "act", "time"))
        self.ctrl, self.mocap_pos, self.mocap_quat = (live[name] for name in ("ctrl", "mocap_pos", "mocap_quat"))

        # step1 zeroes all sensors, so those of accelerations and forces are kept beside the engine's own.
        self._sensed = wp.to_torch(self._data.sensordata)
        fresh = torch.from_numpy(sensed_before_forces(model)).to(device)
        self._all_fresh, self._fresh = bool(fresh.all()), fresh
        self.sensordata = self._sensed if self._all_fresh else self._sensed.clone()

        def flags(dtype: torch.dtype) -> Tensor:
            return torch.zeros(worlds, dtype=dtype, device=device)

        self.all_well = False
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
            inputs = [LARGEST_SANE_VALUE, _OVERFLOWS, data.qpos, data.qvel, data.overflow, *counts]
            wp.launch(look_for_faults, self.worlds, inputs=inputs, outputs=flags)
        if not self._all_fresh:
            self.sensordata.copy_(self._sensed)

    def sense(self) -> None:
        # The first half of the next physics step, so this costs nothing.
        with on_torch_stream(self.device):
            mjw.step1(self._model, self._data)
        if not self._all_fresh:
            torch.where(self._fresh, self._sensed, self.sensordata, out=self.sensordata)

    def reset(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        with on_torch_stream(self.device):
            inputs = [wp.from_torch(tensor.contiguous()) for tensor in (mask, qpos, qvel)]
            outputs = [getattr(self._data, name) for name in _ALWAYS_THERE]
            wp.launch(restart, self.worlds, inputs=inputs, outputs=outputs)
        for name, start in self._initial.items():
            live = self._live[name]
            torch.where(mask.view(-1, *[1] * (live.dim() - 1)), start, live, out=live)
        if not self._all_fresh:
            self.sensordata.masked_fill_(mask[:, None] & ~self._fresh, 0.0)

    def state(self) -> dict[str, Tensor]:
        counts = {"failures": self.failures, "overflows": self.overflows, "sensordata": self.sensordata}
        fields = {f"field/{name}": self.field(name) for name in self._per_world_fields}
        return {name: tensor.clone() for name, tensor in (self._live | counts | fields).items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, live in self._live.items():
            live.copy_(state[name])
        for name in self._per_world_fields:
            self.field(name).copy_(state[f"field/{name}"])
        if self._per_world_fields:
            self.refresh_constants()
        wp.to_torch(self._data.overflow).zero_()
        self.sense()
        self.sensordata.copy_(state["sensordata"])
        self.failures.copy_(state["failures"])
        self.overflows.copy_(state["overflows"])

    def field(self, name: str) -> Tensor:
        if name not in self._per_world_fields:
            raise KeyError(f"model field {name!r} is not per world; those that are: {self._per_world_fields}")
        return wp.to_torch(self._model.opt.gravity if name == _GRAVITY else getattr(self._model, name))

    def refresh_constants(self, derived: bool = True) -> None:
        if derived:
            with on_torch_stream(self.device):
                mjw.set_const(self._model, self._data)

    def push(self, change: Tensor) -> None:
        self.qvel += change
