"""The memory that a writer writes a version to, and the one that the rest of it is copied from, by their kind.

On a CPU both are mapped; the bytes go in by write(2), which is cheaper. On a GPU they come through the host and go in
by copies of the driver, and what is kept of the last version is copied on the device.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from belayer.errors import Refused
from belayer.messages import owner as m
from gpuowner.backends.choice import CUDA_VMM, MEMFD
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import driver_for
from gpuowner.backends.port import Access
from gpuowner.backends.sums import packed
from gpuowner.copying import Sink, base_jobs, run_jobs, sink_for
from gpuowner.digest import CHUNK, digests_of
from gpuowner.vmem import MAP_NORESERVE, MAP_SHARED, PROT_READ, PROT_WRITE, Mapping

Spans = Iterable[tuple[int, int]]  # [start, end) in bytes


class Target(Protocol):
    """``sink``: where new bytes go; may be called from several threads."""

    sink: Sink

    def copy(self, spans: Spans, sink: Sink, threads: int) -> None:
        """From the same places of the last version; ``sink`` in the place of ours, where bytes pass the host."""

    def put_items(self, start: int, end: int, at: NDArray[np.int64], bits: NDArray[Any]) -> None:
        """Single items, ``at`` counted from ``start`` in items of the size of ``bits``; all end before ``end``."""

    def digests(self, chunks: Sequence[int], threads: int) -> dict[int, bytes]:
        """Of chunks as they are now: sha256, or sums."""

    def close(self) -> None:
        """Nothing is mapped any more. A second call does nothing."""


def target_for(grant: m.UpdateGrant, fd: int, base_fd: int, driver: str) -> Target:
    """Takes both descriptors; ``base_fd`` is -1 where there is no last version. Raises Refused, HostUnfit."""
    if grant.backend == MEMFD:
        return HostTarget(fd, base_fd, grant.nbytes)
    try:
        if grant.backend != CUDA_VMM:
            raise Refused(f"the owner keeps {grant.model} in {grant.backend}, which this writer does not know")
        target = DeviceTarget(_device(driver), fd, base_fd, grant.nbytes)
        if grant.mode == "swap" and not grant.has_base:
            target.zero()
        return target
    finally:
        for one in (fd, base_fd):
            if one >= 0:
                os.close(one)


@cache
def _device(driver: str) -> CudaVmm:
    """One for the life of the process: a trainer makes thousands of versions, and each device keeps a little memory."""
    return CudaVmm(driver_for(driver))


class HostTarget:
    def __init__(self, fd: int, base_fd: int, nbytes: int) -> None:
        self._fd, self._base_fd, self._nbytes = fd, base_fd, nbytes
        self._mapping: Mapping | None = None
        self.sink = sink_for(fd, self._writable)

    def copy(self, spans: Spans, sink: Sink, threads: int) -> None:
        base = Mapping(self._base_fd, self._nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
        try:
            run_jobs(base_jobs(list(spans), base), sink, threads, lambda *_: None, None, ())
        finally:
            base.close()

    def put_items(self, start: int, end: int, at: NDArray[np.int64], bits: NDArray[Any]) -> None:
        view = np.frombuffer(self._writable().buffer(), dtype=np.uint8)
        view[start:end].view(bits.dtype)[at] = bits

    def digests(self, chunks: Sequence[int], threads: int) -> dict[int, bytes]:
        memory = Mapping(self._fd, self._nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
        try:
            view = memoryview(memory.buffer()).cast("B")
            return dict(zip(chunks, digests_of(view, chunks, threads), strict=True))
        finally:
            memory.close()

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        for fd in (self._fd, self._base_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._base_fd = -1

    def _writable(self) -> Mapping:
        if self._mapping is None:
            flags = MAP_SHARED | MAP_NORESERVE
            self._mapping = Mapping(self._fd, self._nbytes, PROT_READ | PROT_WRITE, flags)
        return self._mapping


class _DeviceSink:
    def __init__(self, memory: CudaVmm, va: int) -> None:
        self._memory, self._va = memory, va

    def write(self, offset: int, data: memoryview) -> None:
        if len(data):
            source = np.frombuffer(data, dtype=np.uint8)
            self._memory.copy_in(self._va + offset, source.ctypes.data, source.nbytes)


class DeviceTarget:
    """Both versions are mapped as long as it is open; the descriptors are the caller's to close."""

    def __init__(self, memory: CudaVmm, fd: int, base_fd: int, nbytes: int) -> None:
        self._memory, self._nbytes = memory, nbytes
        self._mapped: list[int] = []
        try:
            self._va = self._map(fd, Access.READ_WRITE)
            self._base = self._map(base_fd, Access.READ) if base_fd >= 0 else 0
        except BaseException:
            self.close()
            raise
        self.sink: Sink = _DeviceSink(memory, self._va)

    def _map(self, fd: int, access: Access) -> int:
        va = self._memory.reserve(self._nbytes)
        try:
            self._memory.map(va, fd, self._nbytes, access)
        except BaseException:
            self._memory.free_va(va)
            raise
        self._mapped.append(va)
        return va

    def zero(self) -> None:
        """New memory of a device has any content, and what no tensor fills is summed as well."""
        self._memory.zero(self._va, self._nbytes)

    def copy(self, spans: Spans, sink: Sink, threads: int) -> None:
        for start, end in spans:
            self._memory.copy(self._va + start, self._base + start, end - start)

    def put_items(self, start: int, end: int, at: NDArray[np.int64], bits: NDArray[Any]) -> None:
        host = (ctypes.c_ubyte * (end - start))()
        self._memory.synchronize()
        self._memory.copy_out(ctypes.addressof(host), self._va + start, end - start)
        np.frombuffer(memoryview(host), dtype=bits.dtype)[at] = bits
        self._memory.copy_in(self._va + start, ctypes.addressof(host), end - start)

    def digests(self, chunks: Sequence[int], threads: int) -> dict[int, bytes]:
        self._memory.synchronize()
        found = {}
        for chunk in chunks:
            at = chunk * CHUNK
            sums = self._memory.digest(self._va + at, min(CHUNK, self._nbytes - at))
            (found[chunk],) = packed(sums)
        return found

    def close(self) -> None:
        while self._mapped:
            va = self._mapped.pop()
            self._memory.unmap(va)
            self._memory.free_va(va)
