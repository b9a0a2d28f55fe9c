"""Detect, on a CPU, operations that a CUDA graph cannot hold, so that a task without them can be captured on a GPU."""

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Report = Callable[[str], None]
"""Receives what is wrong with an operation and what to write in place of it."""

_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, np))
_MOST_FINDINGS = 20
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::copy")
_TO_HOST = (Tensor.numpy, Tensor.tolist, Tensor.cpu, Tensor.__array__)
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor)
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.eye)
_VALUES = (
    Tensor.item,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    torch.equal,
    torch.allclose,
)
_SHAPES = (
    *(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select),
    *(torch.unique, Tensor.unique, torch.bincount, Tensor.bincount),
)
_ITEMS = (Tensor.__getitem__, Tensor.__setitem__)
_GLOBAL_RANDOMNESS = (
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial),
    *(torch.rand_like, torch.randn_like, torch.randint_like, Tensor.bernoulli, Tensor.multinomial),
    *(Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.bernoulli_, Tensor.exponential_),
)

_VALUE_FAULT = (
    "takes the value of a tensor to the host: compute both results and select by torch.where(condition, a, b)"
)
_MASK_FAULT = "indexes by a mask: use torch.where or masked_fill"
_SHAPE_FAULT = "has a result whose shape depends on values: keep one row per env and select by torch.where"


class SyncFindings:
    """Operations that a CUDA graph cannot hold, once per line of source code. It is a `Report`."""

    def __init__(self) -> None:
        self.caller = "the env"
        """Function whose operations are reported."""
        self._texts: dict[str, str] = {}

    def __call__(self, fault: str) -> None:
        place, line = _place()
        source = f", `{line}`" if line else ""
        self._texts.setdefault(place, f"{self.caller} in {place}{source}: {fault}")

    @property
    def texts(self) -> list[str]:
        return list(self._texts.values())[:_MOST_FINDINGS]


def _place() -> tuple[str, str]:
    """Return file and line of the innermost frame outside of this module and of libraries, and its source."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((__file__, *_LIBRARIES)):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}", linecache.getline(file, line).strip()


class DetectSyncs(TorchDispatchMode):
    """Reports kernels that wait for the host, have a data-dependent shape or copy between devices. Numpy is not seen:
    the C engine uses it on purpose, and `DetectHostWork` reports it in tasks."""

    def __init__(self, report: Report):
        super().__init__()
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fault := _fault_of_kernel(func, args, kwargs):
            self._report(fault)
        return func(*args, **kwargs)


class DetectHostWork(TorchFunctionMode):
    """Reports calls into torch that a task must not make. On a CPU, some of them run no kernel. It also reports the
    most common calls that `DetectSyncs` finds by their kernels, whose first use imports torch's compiler."""

    def __init__(self, report: Report):
        super().__init__()
        self._report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fault := _fault_of_call(func, args, kwargs):
            self._report(fault)
        return func(*args, **kwargs)


def _fault_of_kernel(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    name = func.name().partition(".")[0]
    if torch.Tag.data_dependent_output in func.tags:
        return _VALUE_FAULT
    if name in _INDEXING:
        return _MASK_FAULT if any(map(_is_mask, args[1])) else None
    if torch.Tag.dynamic_output_shape in func.tags:
        return _SHAPE_FAULT
    if name in _COPIES:
        devices = {tensor.device for tensor in args if isinstance(tensor, Tensor)}
        target = kwargs.get("device")
        if len(devices | ({torch.device(target)} if target is not None else set())) > 1:
            return "copies from one device to another: keep all tensors on the device of the envs"
    return None


def _fault_of_call(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    if func in _TO_HOST or (func is Tensor.to and "cpu" in (*args[1:], *kwargs.values())):
        return "takes a tensor to the host: use functions of torch"
    if func in _VALUES:
        return _VALUE_FAULT
    if func in _SHAPES:
        return _SHAPE_FAULT
    if func in _ITEMS and any(map(_is_mask, args[1] if isinstance(args[1], tuple) else args[1:2])):
        return _MASK_FAULT
    if func in _FROM_HOST:
        return "copies from the host in every step: use Python numbers, constants(), or torch.full with a device"
    if func in _FACTORIES and kwargs.get("device") is None:
        return "names no device, so that it makes a CPU tensor on a GPU: add device=state.qpos.device"
    if func in _GLOBAL_RANDOMNESS:
        return "samples from torch's global generator: use `uniform`, with more num_reset_samples or num_step_samples"
    return None


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
