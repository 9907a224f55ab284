"""GPU memory that outlives workers: the CUDA driver's virtual memory calls behind the port.

The owner uses ``create`` and ``dup_fd`` only, which load no driver in its process: a child allocates, exports and ends
(``oneshot``). A worker imports, maps and sets its access; its first such call makes the device's primary context, the
one that torch uses, current in the calling thread.

Traps that this file is shaped by (cuda.h): a mapping has no access before cuMemSetAccess; the offset of cuMemMap must
be 0; cuMemUnmap takes exactly what was mapped; an imported handle is a reference of its own and is released as soon as
the mapping holds the memory; unmapping under running kernels is a fault, so everything is synchronised first.

Nothing of this has run on a GPU: it runs over ``fake_vmm``, and waits for a machine (docs/h200.md).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from belayer.errors import Refused
from gpuowner.backends import oneshot
from gpuowner.backends.driver import Driver, Kernel
from gpuowner.backends.port import Access, Allocation, Caps, Info
from gpuowner.backends.ranges import Ranges
from gpuowner.backends.sums import CHUNK, ChunkSum, words_of

_BLOCKS, _THREADS = 264, 512  # two blocks per multiprocessor of an H200; any numbers give the same sums


@dataclass
class CudaMemory:
    """An allocation, as the owner holds it: a descriptor. It keeps the bytes and carries no access mode."""

    nbytes: int
    fd: int

    def reader_fd(self) -> int:
        return os.dup(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class DeviceBytes:
    """Bytes at a device address for torch, CuPy and Numba (``__cuda_array_interface__`` version 3).

    ``torch.as_tensor(buffer, device="cuda")`` copies nothing. The address must be mapped then and stay mapped while a
    tensor lives. The read-only flag is always False: torch refuses a tensor where it is True, so it is the mapping that
    protects."""

    def __init__(self, va: int, nbytes: int) -> None:
        self.va, self.nbytes = va, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.va, False),
            "strides": None,
            "version": 3,
            "stream": None,  # the producer has synchronised
        }


class CudaVmm:
    """gpuowner.backends.port over a driver port; one device."""

    name = "cuda_vmm"

    def __init__(self, driver: Driver, device: int = 0) -> None:
        self._driver, self._device = driver, device
        self._ranges = Ranges()
        self._grain = 0
        self._scratch: tuple[int, int] | None = None

    # --- the owner's half: no driver in this process ---

    def create(self, label: str, nbytes: int) -> Allocation:
        if nbytes <= 0:
            raise ValueError(f"allocation {label!r} of {nbytes} bytes")
        made = oneshot.make(self._driver.spec, self._device, (nbytes,))
        return CudaMemory(made.sizes[0], made.fds[0])

    def adopt(self, fd: int, nbytes: int) -> Allocation:
        return CudaMemory(nbytes, fd)

    def dup_fd(self, allocation: Allocation, access: Access) -> int:
        # Two references of one allocation: the mode is set where it is mapped (same trust domain, docs/h200.md).
        return os.dup(allocation.fd)

    # --- the worker's half ---

    def reserve(self, nbytes: int) -> int:
        grain = self._enter()
        if nbytes <= 0 or nbytes % grain:
            raise Refused(f"a range of {nbytes} bytes", remedy=f"whole multiples of {grain} bytes")
        va = self._driver.reserve(nbytes, grain)
        self._ranges.reserved(va, nbytes)
        return va

    def map(self, va: int, fd: int, nbytes: int, access: Access, *, offset: int = 0) -> None:
        if offset:
            raise Refused(f"offset {offset} into an allocation", remedy="map an allocation from its start")
        self.alias(va, nbytes, fd, nbytes, access)

    def alias(self, va: int, nbytes: int, fd: int, chunk: int, access: Access) -> None:
        grain = self._enter()
        if chunk <= 0 or chunk % grain or nbytes % chunk:
            raise Refused(f"{nbytes} bytes in chunks of {chunk}", remedy=f"multiples of {grain}; chunks must tile")
        self._ranges.check_free(va, nbytes)
        handle = self._driver.import_fd(fd)
        try:
            self.map_handle(va, nbytes, handle, chunk, access)
        finally:
            self._driver.release(handle)

    def map_handle(self, va: int, nbytes: int, handle: int, chunk: int, access: Access) -> None:
        """As ``alias``, of a handle of this process; the caller releases it. A piece that fails takes back the
        others."""
        self._enter()
        self._ranges.check_free(va, nbytes)
        done: list[int] = []
        try:
            for at in range(va, va + nbytes, chunk):
                self._driver.map(at, chunk, 0, handle)
                done.append(at)
                self._driver.set_access(at, chunk, self._device, access)
        except BaseException:
            for at in done:
                self._driver.unmap(at, chunk)
            raise
        self._ranges.mapped(va, (chunk,) * (nbytes // chunk))

    def protect(self, va: int, access: Access) -> None:
        self.synchronize()
        for at, nbytes in self._pieces(va):
            self._driver.set_access(at, nbytes, self._device, access)

    def unmap(self, va: int) -> None:
        self.synchronize()
        for at, nbytes in self._pieces(va):
            self._driver.unmap(at, nbytes)
        self._ranges.unmapped(va)

    def free_va(self, va: int) -> None:
        self._driver.free_va(va, self._ranges.freed(va))

    def as_buffer(self, va: int, nbytes: int) -> DeviceBytes:
        return DeviceBytes(va, nbytes)

    def digest(self, va: int, nbytes: int) -> tuple[ChunkSum, ...]:
        words_of(nbytes)
        out = self._results()
        found = []
        for at in range(0, nbytes, CHUNK):
            count = min(CHUNK, nbytes - at) // 8
            self._driver.fill(out, 0, 16)
            self._driver.launch(Kernel.DIGEST, _BLOCKS, _THREADS, va + at, count, out)
            plain, weighted = self.read_words(out, 2)
            found.append(ChunkSum(plain, weighted))
        return tuple(found)

    def zero(self, va: int, nbytes: int) -> None:
        self._enter()
        self._driver.fill(va, 0, nbytes)
        self._driver.synchronize()

    def info(self) -> Info:
        grain = self._enter()
        return Info(self.name, self._driver.uuid(self._device), grain)

    def caps(self) -> Caps:
        return Caps(
            ro_map=True,
            ro_fd=False,
            same_va=True,
            survives_owner=True,
            survives_exporter=True,
            proven="over fake_vmm only; never on a GPU (stage T1 of benchmarks.h200_check is to show it)",
        )

    # --- more than the port: what the GPU parts of a worker need ---

    def private(self, nbytes: int) -> int:
        """A handle of memory of this process alone; it ends with the process. The caller releases it."""
        self._enter()
        return self._driver.create(self._device, nbytes)

    def release(self, handle: int) -> None:
        self._driver.release(handle)

    def synchronize(self) -> None:
        """Wait for every kernel of this context."""
        self._enter()
        self._driver.synchronize()

    def copy_out(self, host: int, va: int, nbytes: int) -> None:
        self._enter()
        self._driver.copy_out(host, va, nbytes)

    def copy_in(self, va: int, host: int, nbytes: int) -> None:
        self._enter()
        self._driver.copy_in(va, host, nbytes)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Between two mapped ranges of this process."""
        self._enter()
        self._driver.copy(to, source, nbytes)

    def launch(self, kernel: Kernel, blocks: int, threads: int, *args: int) -> None:
        self._enter()
        self._driver.launch(kernel, blocks, threads, *args)

    def read_words(self, va: int, count: int) -> list[int]:
        """``count`` 64-bit words; waits for the kernels before it."""
        self._enter()
        self._driver.synchronize()
        words = (ctypes.c_uint64 * count)()
        self._driver.copy_out(ctypes.addressof(words), va, count * 8)
        return list(words)

    def granularity(self) -> int:
        return self._enter()

    def _enter(self) -> int:
        """The context is current per thread, so each call makes sure; returns the granularity."""
        if not self._grain:
            self._driver.init()
            self._driver.enter(self._device)
            self._grain = self._driver.granularity(self._device)
        else:
            self._driver.enter(self._device)
        return self._grain

    def _pieces(self, va: int) -> list[tuple[int, int]]:
        at, out = va, []
        for nbytes in self._ranges.pieces(va):
            out.append((at, nbytes))
            at += nbytes
        return out

    def _results(self) -> int:
        """Address of a small private buffer for what kernels report; made once, kept for the life of the process."""
        if self._scratch is None:
            grain = self._enter()
            va = self.reserve(grain)
            handle = self.private(grain)
            self.map_handle(va, grain, handle, grain, Access.READ_WRITE)
            self.release(handle)
            self._scratch = (va, grain)
        else:
            self._enter()
        return self._scratch[0]
