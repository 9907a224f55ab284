"""The device seam: what of a worker's life differs between a CPU and a GPU, behind one set of verbs.

The life itself (belayerd.worker.main, engine) is one code. On a CPU nothing is parked and there is no device to probe;
on a GPU graph memory is parked while the worker stands by, and every step that touches it can fail by name.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from belayer.clock import Stopwatch, monotonic
from belayer.errors import BelayerError, Refused, WorkerFailed
from belayerd.worker.adapter.gpu_pools import OWNED, Pools
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import DriverError
from gpuowner.backends.probe import WarmProbe

_AGAIN_S = 0.05
_NO_ROOM = "CUDA_ERROR_OUT_OF_MEMORY"


class Device(Protocol):
    """``name``: "cpu", or "gpu:UUID"."""

    name: str

    @property
    def parked(self) -> bool:
        """Nothing may run while it is: graphs would read addresses without memory."""

    def park(self) -> str:
        """After the oracle of a standby: what was given back, in words. Raises WorkerFailed."""

    def unpark(self) -> str:
        """Before a promotion: all of it back, byte-equal. Raises WorkerFailed; the worker must then not serve."""

    def probe(self, deadline_s: float) -> float:
        """Milliseconds of a small kernel. Raises GpuUnhealthy, Refused where there is no device."""

    def pool(self, tag: str) -> AbstractContextManager[Any]:
        """Where vLLM's allocations of ``tag`` go."""


class CpuDevice:
    """Nothing to park, nothing to probe."""

    name = "cpu"
    parked = False

    def park(self) -> str:
        return "CPU: no graph memory to park"

    def unpark(self) -> str:
        return "CPU: no graph memory was parked"

    def probe(self, deadline_s: float) -> float:
        raise Refused("this worker runs on the CPU: there is no device to probe")

    def pool(self, tag: str) -> AbstractContextManager[Any]:
        return nullcontext()


class GpuDevice:
    """One GPU of this process. ``room_s``: how long an unpark waits for memory that others are giving back (the fenced
    main's, whose driver is still tearing it down)."""

    def __init__(self, memory: CudaVmm, *, room_s: float = 2.0) -> None:
        self._memory, self._room_s = memory, room_s
        self.name = f"gpu:{memory.info().device}"
        self.pools = Pools(memory)
        self._probe = WarmProbe(memory)
        self._failed = ""

    @property
    def parked(self) -> bool:
        return self.pools.parked

    @property
    def memory(self) -> CudaVmm:
        return self._memory

    def must_be(self, wanted: str) -> None:
        """Raises WorkerFailed when this is not the configured device: an index of CUDA_VISIBLE_DEVICES is not one of
        NVML (conformance row 17), a UUID is the same everywhere."""
        if wanted.startswith("gpu:GPU-") and wanted != self.name:
            raise WorkerFailed(f"this process computes on {self.name}, its slot is on {wanted}")

    def park(self) -> str:
        self._well()
        watch = Stopwatch()
        try:
            nbytes = self.pools.park()
        except BelayerError as why:
            raise self._fail("park", why) from why
        return f"{nbytes} bytes of graph memory parked in {watch.ms():.0f} ms"

    def unpark(self) -> str:
        """Waits ``room_s`` for memory; any other failure is final, since the content can no longer be trusted."""
        self._well()
        watch, end, pause = Stopwatch(), monotonic() + self._room_s, threading.Event()
        nbytes = self.pools.nbytes()
        while True:
            try:
                self.pools.unpark()
            except DriverError as why:
                if why.name != _NO_ROOM or monotonic() >= end:
                    raise self._fail("unpark", why) from why
                pause.wait(_AGAIN_S)
            except BelayerError as why:
                raise self._fail("unpark", why) from why
            else:
                return f"{nbytes} bytes of graph memory back in {watch.ms():.0f} ms"

    def probe(self, deadline_s: float) -> float:
        self._well()
        return self._probe.probe(deadline_s)

    def pool(self, tag: str) -> AbstractContextManager[Any]:
        """The owner's memory is answered elsewhere: weights by the loader, the KV cache by the arena."""
        if tag in OWNED:
            return nullcontext()
        import torch

        return torch.cuda.use_mem_pool(self.pools.torch_pool(tag))

    def _well(self) -> None:
        if self._failed:
            raise WorkerFailed(f"this worker failed before: {self._failed}", remedy="end it")

    def _fail(self, what: str, why: BelayerError) -> WorkerFailed:
        self._failed = f"{what} on {self.name}: {why.message}"
        return WorkerFailed(self._failed, kept="the owners' memory as it is", remedy="end this worker")
