"""Compiled functions and CUDA graphs, so that the host launches few kernels. On a CPU they are plain calls."""

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
    """Return `work`, on CUDA compiled so that its element-wise operations become few kernels, if Triton is installed.

    `work` must not branch on the values of tensors, and shapes must not change between calls.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return work
    # The method of each object is compiled separately, and a process can have many objects.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    return torch.compile(work, fullgraph=True, dynamic=False)


def capture(work: Callable[[], T], device: torch.device, warp: bool = False) -> Callable[[], T]:
    """Return a function that does what `work` does; on CUDA it replays one graph from the second call on.

    The result is overwritten by the next call, and `work` must update its state in place. With `warp`, Warp launches
    are captured as well.
    """
    return CudaGraph(work, device, warp) if device.type == "cuda" else work


class CudaGraph(Generic[T]):
    """Runs the first call eagerly, which compiles kernels and initializes libraries, and captures the second call, so
    that no work is done twice."""

    def __init__(self, work: Callable[[], T], device: torch.device, warp: bool):
        self._work, self._warp = work, warp
        self._stream = torch.cuda.Stream(device)
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        """True from the second call on."""
        return self._graph is not None

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
        # On the stream of the later capture, because allocations and library handles belong to a stream.
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

        # Warp does not notice a capture that torch began.
        stream = warp_stream(self._stream)
        wp.capture_begin(stream=stream, external=True)
        try:
            return self._work()
        finally:
            wp.capture_end(stream=stream)


def warp_stream(stream: torch.cuda.Stream) -> "wp.Stream":
    """Return the Warp stream of a torch stream, always the same object, as a capture needs it."""
    return _warp_stream(str(stream.device), stream.cuda_stream)


@cache
def _warp_stream(device: str, handle: int) -> "wp.Stream":
    import warp as wp

    return wp.Stream(warp_device(torch.device(device)), cuda_stream=handle)


def warp_device(device: torch.device) -> "wp.Device":
    """Return the Warp device of the same physical GPU, found by its UUID: the libraries may number GPUs differently."""
    import warp as wp

    found = {gpu.uuid: gpu for gpu in wp.get_cuda_devices()}
    return found[gpu_uuid(device)]
