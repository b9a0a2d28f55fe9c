"""Fewer kernels, and no host between them: compiled stretches and CUDA graphs. On a CPU, plain calls."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

import torch

from paceline.device.gpus import gpu_uuid

if TYPE_CHECKING:
    import warp as wp

P = ParamSpec("P")
T = TypeVar("T")


def fuse(work: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """The same function; on CUDA with its element-wise operations compiled into few kernels, where Triton is there.

    `work` must be tensors alone: no value of a tensor decides what it does, and no shape changes between calls.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return work
    # Each object's method and each shape is compiled by itself, and there may be many of them in a process.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    return torch.compile(work, fullgraph=True, dynamic=False)


def capture(work: Callable[[], T], device: torch.device, warp: bool = False) -> Callable[[], T]:
    """A function that does what `work` does; on CUDA, from its second call on, by replaying one graph.

    What `work` returns is overwritten by the next call, and what it keeps between calls it must write in place. With
    `warp`, its Warp launches are captured too.
    """
    return _Graph(work, device, warp) if device.type == "cuda" else work


class _Graph(Generic[T]):
    """The first call runs eagerly, which compiles kernels and sets up libraries; the second is captured. So nothing is
    done twice and nothing is thrown away."""

    def __init__(self, work: Callable[[], T], device: torch.device, warp: bool):
        self._work, self._warp = work, warp
        self._stream = torch.cuda.Stream(device)
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> T:
        if self._graph is not None:
            self._graph.replay()
            return self._result
        if not self._warm:
            self._warm = True
            return self._run_eagerly()
        self._capture()
        return self()

    def _run_eagerly(self) -> T:
        # On the stream of the capture to come, because allocations and library handles belong to a stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._result = self._work_with_warp() if self._warp else self._work()
        self._graph = graph

    def _work_with_warp(self) -> T:
        import warp as wp

        # Warp must be told of a capture that torch began.
        stream = warp_stream(self._stream)
        wp.capture_begin(stream=stream, external=True)
        try:
            return self._work()
        finally:
            wp.capture_end(stream=stream)


def warp_stream(stream: torch.cuda.Stream) -> "wp.Stream":
    """Warp's name for a torch stream: always the same object, as a capture needs it."""
    return _warp_stream(str(stream.device), stream.cuda_stream)


@cache
def _warp_stream(device: str, handle: int) -> "wp.Stream":
    import warp as wp

    return wp.Stream(warp_device(torch.device(device)), cuda_stream=handle)


def warp_device(device: torch.device) -> "wp.Device":
    """The same physical GPU, by its UUID: two libraries' indices need not mean the same one."""
    import warp as wp

    found = {gpu.uuid: gpu for gpu in wp.get_cuda_devices()}
    return found[gpu_uuid(device)]
