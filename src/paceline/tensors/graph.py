"""Compiled functions and CUDA graphs, so that the host launches few kernels. On a CPU they are plain calls."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Return `work`. On CUDA with Triton it is compiled, so that its element-wise operations become few kernels.

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
        if not self._warm:
            self._warm = True
            # On the stream of the later capture, because allocations and library handles belong to a stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                result = self._work()
            torch.cuda.current_stream().wait_stream(self._stream)
            return result
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Garbage that Python collects during the capture may free device memory, which is not allowed in a capture.
            gc.collect()
            with torch.cuda.graph(graph, stream=self._stream), self._warp_capture():
                self._result = self._work()
            self._graph = graph
        self._graph.replay()
        return self._result

    @contextmanager
    def _warp_capture(self) -> Iterator[None]:
        if not self._warp:
            yield
            return
        import warp as wp

        # Warp does not notice a capture that torch began.
        stream = warp_stream(self._stream)
        wp.capture_begin(stream=stream, external=True)
        try:
            yield
        finally:
            wp.capture_end(stream=stream)


@cache
def warp_stream(stream: torch.cuda.Stream) -> "wp.Stream":
    """Return the Warp stream of a torch stream, always the same object, which a capture requires."""
    import warp as wp

    return wp.Stream(warp_device(stream.device), cuda_stream=stream.cuda_stream)


def warp_device(device: torch.device) -> "wp.Device":
    """Return the Warp device of the same physical GPU, found by its UUID: the libraries may number GPUs differently."""
    import warp as wp

    return {gpu.uuid: gpu for gpu in wp.get_cuda_devices()}[gpu_uuid(device)]
