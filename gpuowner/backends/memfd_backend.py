"""memfd behind the port: ``Memfd`` is the allocation, vmem does the mapping."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from belayer.errors import Refused
from gpuowner import vmem
from gpuowner.backends.memfd import Memfd
from gpuowner.backends.port import Access, Allocation, Caps, Info
from gpuowner.backends.ranges import Ranges
from gpuowner.backends.sums import ChunkSum, chunk_sums

_PROT = {
    Access.NONE: vmem.PROT_NONE,
    Access.READ: vmem.PROT_READ,
    Access.READ_WRITE: vmem.PROT_READ | vmem.PROT_WRITE,
}
_SHARED = vmem.MAP_SHARED | vmem.MAP_NORESERVE


class MemfdMemory(Memfd):
    """A Memfd whose size is whole pages, so that a mapping of it is exactly it."""

    def __init__(self, label: str, nbytes: int) -> None:
        super().__init__(label, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)


class MemfdBackend:
    """Memory of the CPU (gpuowner.backends.port)."""

    name = "memfd"

    def __init__(self) -> None:
        self._ranges = Ranges()

    def create(self, label: str, nbytes: int) -> Allocation:
        return MemfdMemory(label, nbytes)

    def adopt(self, fd: int, nbytes: int) -> Allocation:
        return MemfdMemory.adopt(fd, nbytes)

    def dup_fd(self, allocation: Allocation, access: Access) -> int:
        return os.dup(allocation.fd) if access is Access.READ_WRITE else allocation.reader_fd()

    def reserve(self, nbytes: int) -> int:
        va = vmem.reserve(nbytes, mmap.PAGESIZE)
        self._ranges.reserved(va, nbytes)
        return va

    def map(self, va: int, fd: int, nbytes: int, access: Access, *, offset: int = 0) -> None:
        if offset:
            raise Refused(f"offset {offset} into an allocation", remedy="map an allocation from its start")
        self.alias(va, nbytes, fd, nbytes, access)

    def alias(self, va: int, nbytes: int, fd: int, chunk: int, access: Access) -> None:
        if chunk <= 0 or nbytes % chunk or nbytes % mmap.PAGESIZE or chunk % mmap.PAGESIZE:
            raise Refused(f"{nbytes} bytes in chunks of {chunk}: both must be whole pages, and chunks must tile")
        held = os.fstat(fd).st_size
        if chunk > held:
            raise Refused(f"{chunk} bytes of an allocation of {held}", remedy="its size came with the descriptor")
        self._ranges.check_free(va, nbytes)
        for at in range(va, va + nbytes, chunk):
            vmem.map_at(at, chunk, _PROT[access], _SHARED, fd)
        self._ranges.mapped(va, (chunk,) * (nbytes // chunk))

    def protect(self, va: int, access: Access) -> None:
        vmem.protect_at(va, sum(self._ranges.pieces(va)), _PROT[access])

    def unmap(self, va: int) -> None:
        vmem.reserve_at(va, sum(self._ranges.pieces(va)))
        self._ranges.unmapped(va)

    def free_va(self, va: int) -> None:
        vmem.release(va, self._ranges.freed(va))

    def as_buffer(self, va: int, nbytes: int) -> Any:
        return vmem.bytes_at(va, nbytes)

    def digest(self, va: int, nbytes: int) -> tuple[ChunkSum, ...]:
        return chunk_sums(vmem.bytes_at(va, nbytes))

    def zero(self, va: int, nbytes: int) -> None:
        ctypes.memset(va, 0, nbytes)

    def info(self) -> Info:
        return Info(self.name, "cpu", mmap.PAGESIZE)

    def caps(self) -> Caps:
        return Caps(
            ro_map=True,
            ro_fd=True,
            same_va=True,
            survives_owner=True,
            survives_exporter=True,
            proven="Linux, by tests/contract/test_memory_backend.py",
        )
