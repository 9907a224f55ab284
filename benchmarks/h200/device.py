"""Between torch and gpuowner's backend: tensors over raw addresses, a step that is captured in a CUDA graph whose
memory can be parked, and memory figures. The fake driver's addresses are host memory, so there the same tensors are CPU
tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.h200.plan import GRAIN
from gpuowner import vmem
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import REAL, driver_for
from gpuowner.backends.park import GraphPool

_ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class Gpu:
    """Device 0 of this process. ``pool``: what parks."""

    def __init__(self, spec: str) -> None:
        self.real = spec == REAL
        self.spec = spec
        self.device = torch.device("cuda", 0) if self.real else torch.device("cpu")
        torch.set_num_threads(1)
        if self.real:
            torch.cuda.set_device(0)
            torch.zeros(1, device=self.device)  # torch's primary context, before any mapping (trap b of gpu-memory)
        self.memory = CudaVmm(driver_for(spec))
        self.pool = GraphPool(self.memory)
        self._next = self._left = 0
        self.capture_error = ""

    def tensor(self, va: int, nbytes: int) -> torch.Tensor:
        """uint8 view of mapped memory; the address must stay mapped whenever it is used."""
        if self.real:
            return torch.as_tensor(self.memory.as_buffer(va, nbytes), device=self.device)
        return torch.frombuffer(vmem.bytes_at(va, nbytes), dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """From the pool, zeroed; small ones share a block, since each block is a physical allocation of its own."""
        whole = -(-nbytes // 256) * 256
        if whole > self._left:
            self._left = -(-whole // GRAIN) * GRAIN
            self._next = self.pool.allocate(self._left)
        va, self._next, self._left = self._next, self._next + whole, self._left - whole
        return self.tensor(va, nbytes)

    def sync(self) -> None:
        if self.real:
            torch.cuda.synchronize()

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """``step`` as a CUDA graph in the pool; on the CPU the step itself.

        A capture that fails is kept in ``capture_error``, which fails its check, and the run goes on without a graph:
        time on such a machine is rare, and the other answers do not depend on it."""
        if not self.real:
            return step
        try:
            return self._capture(step)
        except RuntimeError as why:
            self.capture_error = str(why)
            torch.cuda.synchronize()
            return step

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        pool = self._torch_pool()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # The warm-up makes the pool's segments, so that the capture itself need not allocate.
        with torch.cuda.stream(side), torch.cuda.use_mem_pool(pool):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # relaxed: should a segment be made all the same, mapping it must not break the capture.
        with torch.cuda.graph(graph, pool=pool.id, stream=side, capture_error_mode="relaxed"):
            step()
        torch.cuda.synchronize()
        replay: Callable[[], None] = graph.replay
        return replay

    def _torch_pool(self) -> Any:
        """A torch MemPool whose segments come from ours. A C callback must not raise: 0 is torch's out of memory."""

        def alloc(nbytes: int, device: int, stream: int) -> int:
            try:
                return self.pool.allocate(nbytes, zero=False)
            except Exception as why:  # noqa: BLE001
                print(f"graph pool: {why}", flush=True)
                return 0

        def free(address: int, nbytes: int, device: int, stream: int) -> None:
            try:
                self.pool.free(address)
            except Exception as why:  # noqa: BLE001
                print(f"graph pool: {why}", flush=True)

        # Strong references for the life of the process: torch keeps bare pointers.
        self._callbacks = _ALLOC(alloc), _FREE(free)
        pointers = [ctypes.cast(each, ctypes.c_void_p).value for each in self._callbacks]
        self._allocator = torch._C._cuda_customAllocator(*pointers)
        self._mem_pool = torch.cuda.MemPool(self._allocator)
        return self._mem_pool
