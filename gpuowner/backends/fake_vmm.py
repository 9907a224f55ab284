"""A CUDA driver made of memfds, for machines without a GPU. It spans processes: real descriptors, real mappings, and
the kernel itself counts references, so that memory is freed exactly when handles, mappings and descriptors are all
gone.

Strict where the driver is strict (cuda.h): whole granules, offset 0, only reserved addresses, unmap and set_access of
exactly what was mapped, no access before set_access, no copy or kernel without a current context. A write through a
read-only mapping, or to no mapping, is SIGSEGV in the writer: it stands for Xid 31. It is stricter in one point: map
and set_access want a current context, since the real ones have failed without one in threads that had none.

Not imitated: speed, asynchrony, error states that outlive a call, several devices.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from belayer.clock import monotonic
from gpuowner import vmem
from gpuowner.backends.driver import FAKE, PROBE_FACTOR, PROBE_ROUNDS, PROBE_TERM, DriverError, Kernel
from gpuowner.backends.port import Access
from gpuowner.backends.sums import chunk_sums

GRANULARITY = 2 << 20
_PREFIX = "belayer-fakevmm"
_PROT = {
    Access.NONE: vmem.PROT_NONE,
    Access.READ: vmem.PROT_READ,
    Access.READ_WRITE: vmem.PROT_READ | vmem.PROT_WRITE,
}
_NUMBERS = {
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NOT_INITIALIZED": 3,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_INVALID_CONTEXT": 201,
}
_MASK = (1 << 64) - 1


def _fail(call: str, name: str, why: str) -> DriverError:
    return DriverError(call, f"CUDA_ERROR_{name}", _NUMBERS[f"CUDA_ERROR_{name}"], why)


def used_bytes(name: str) -> int:
    """Bytes of fake device ``name`` that any process of this host keeps, by a descriptor or by a mapping; what NVML's
    "used" is on a real one. Descriptors in flight in a socket are not seen."""
    found: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            found.update(_of_process(process, f"/memfd:{_PREFIX}-{name}-"))
    return sum(found.values())


def _of_process(process: Path, prefix: str) -> dict[int, int]:
    """Inode -> bytes; the size stands in the name, since a mapping shows only its own length."""
    found: dict[int, int] = {}
    try:
        rows = [row.split() for row in (process / "maps").read_text().splitlines() if prefix in row]
        found = {int(fields[4]): int(fields[5].rpartition("-")[2]) for fields in rows}
        links = list((process / "fd").iterdir())
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return found  # it ended meanwhile, or is another user's: then it holds nothing of ours
    for link in links:
        try:
            target, inode = os.readlink(link), os.stat(link).st_ino
        except OSError:
            continue  # closed meanwhile (one is the listing itself), or of a path too long to be read: not ours
        if target.startswith(prefix):
            found[inode] = int(target.split()[0].rpartition("-")[2])
    return found


class FakeDriver:
    """One device ``name`` of ``total`` bytes (gpuowner.backends.driver). State is this process's, memory the host's."""

    def __init__(self, name: str, total: int) -> None:
        self.spec, self._name, self._total = f"{FAKE}:{name}:{total}", name, total
        self._initialised = self._primary = False
        self._current = threading.local()
        self._numbers = itertools.count(0x7F00)
        self._handles: dict[int, tuple[int, int]] = {}  # handle -> descriptor, bytes
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, int] = {}  # address -> bytes
        self._kernels: dict[Kernel, Callable[..., None]] = {
            Kernel.DIGEST: _digest,
            Kernel.PROBE: _probe,
            Kernel.POKE: _poke,
            Kernel.SPIN: _spin,
        }

    # --- device ---

    def init(self) -> None:
        self._initialised = True

    def count(self) -> int:
        self._ready("cuDeviceGetCount")
        return 1

    def uuid(self, device: int) -> str:
        self._device("cuDeviceGetUuid", device)
        return f"GPU-fake-{self._name}"

    def granularity(self, device: int) -> int:
        self._device("cuMemGetAllocationGranularity", device)
        return GRANULARITY

    def enter(self, device: int) -> None:
        self._device("cuDevicePrimaryCtxRetain", device)
        self._primary = self._current.made = True

    def has_context(self, device: int) -> bool:
        return self._primary

    # --- physical memory ---

    def create(self, device: int, nbytes: int) -> int:
        self._device("cuMemCreate", device)
        if nbytes <= 0 or nbytes % GRANULARITY:
            raise _fail("cuMemCreate", "INVALID_VALUE", f"{nbytes} bytes are no multiple of {GRANULARITY}")
        if used_bytes(self._name) + nbytes > self._total:
            raise _fail("cuMemCreate", "OUT_OF_MEMORY", f"{nbytes} bytes")
        fd = os.memfd_create(f"{_PREFIX}-{self._name}-{nbytes}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return self._handle(fd, nbytes)

    def release(self, handle: int) -> None:
        fd, _ = self._of("cuMemRelease", handle)
        del self._handles[handle]
        os.close(fd)

    def export_fd(self, handle: int) -> int:
        return os.dup(self._of("cuMemExportToShareableHandle", handle)[0])

    def import_fd(self, fd: int) -> int:
        call = "cuMemImportFromShareableHandle"
        self._ready(call)
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError as why:
            raise _fail(call, "INVALID_VALUE", f"{fd} is no open descriptor") from why
        if not target.startswith(f"/memfd:{_PREFIX}-{self._name}-"):
            raise _fail(call, "INVALID_VALUE", f"descriptor {fd} is {target}")
        return self._handle(os.dup(fd), os.fstat(fd).st_size)

    # --- address space ---

    def reserve(self, nbytes: int, alignment: int) -> int:
        self._ready("cuMemAddressReserve")
        if nbytes <= 0 or nbytes % GRANULARITY:
            raise _fail("cuMemAddressReserve", "INVALID_VALUE", f"{nbytes} bytes are no multiple of {GRANULARITY}")
        va = vmem.reserve(nbytes, alignment or GRANULARITY)
        self._reserved[va] = nbytes
        return va

    def free_va(self, va: int, nbytes: int) -> None:
        if self._reserved.get(va) != nbytes:
            raise _fail("cuMemAddressFree", "INVALID_VALUE", f"{va:#x} of {nbytes} bytes was not reserved as such")
        if any(va <= at < va + nbytes for at in self._mapped):
            raise _fail("cuMemAddressFree", "INVALID_VALUE", f"{va:#x} still holds a mapping")
        vmem.release(va, nbytes)
        del self._reserved[va]

    def map(self, va: int, nbytes: int, offset: int, handle: int) -> None:
        fd, held = self._of("cuMemMap", handle)
        self._context("cuMemMap")
        if offset:
            raise _fail("cuMemMap", "INVALID_VALUE", f"offset {offset} must be 0")
        if nbytes <= 0 or nbytes % GRANULARITY or va % GRANULARITY or nbytes > held:
            raise _fail("cuMemMap", "INVALID_VALUE", f"{nbytes} bytes at {va:#x} of an allocation of {held}")
        if not any(at <= va and va + nbytes <= at + size for at, size in self._reserved.items()):
            raise _fail("cuMemMap", "INVALID_VALUE", f"{va:#x} is not reserved")
        if any(at < va + nbytes and va < at + size for at, size in self._mapped.items()):
            raise _fail("cuMemMap", "INVALID_VALUE", f"{va:#x} is mapped already")
        vmem.map_at(va, nbytes, vmem.PROT_NONE, vmem.MAP_SHARED | vmem.MAP_NORESERVE, fd)
        self._mapped[va] = nbytes

    def unmap(self, va: int, nbytes: int) -> None:
        self._exactly("cuMemUnmap", va, nbytes)
        vmem.reserve_at(va, nbytes)
        del self._mapped[va]

    def set_access(self, va: int, nbytes: int, device: int, access: Access) -> None:
        self._device("cuMemSetAccess", device)
        self._context("cuMemSetAccess")
        self._exactly("cuMemSetAccess", va, nbytes)
        vmem.protect_at(va, nbytes, _PROT[access])

    # --- work ---

    def fill(self, va: int, value: int, nbytes: int) -> None:
        self._context("cuMemsetD8")
        ctypes.memset(va, value, nbytes)

    def copy_out(self, host: int, va: int, nbytes: int) -> None:
        self._context("cuMemcpyDtoH")
        ctypes.memmove(host, va, nbytes)

    def copy_in(self, va: int, host: int, nbytes: int) -> None:
        self._context("cuMemcpyHtoD")
        ctypes.memmove(va, host, nbytes)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._context("cuMemcpyDtoD")
        ctypes.memmove(to, source, nbytes)

    def launch(self, kernel: Kernel, blocks: int, threads: int, *args: int) -> None:
        self._context("cuLaunchKernel")
        if not 0 < threads <= 1024 or blocks <= 0:
            raise _fail("cuLaunchKernel", "INVALID_VALUE", f"{blocks} blocks of {threads} threads")
        self._kernels[kernel](*args)

    def synchronize(self) -> None:
        self._context("cuCtxSynchronize")

    # --- checks ---

    def _handle(self, fd: int, nbytes: int) -> int:
        number = next(self._numbers)
        self._handles[number] = (fd, nbytes)
        return number

    def _ready(self, call: str) -> None:
        if not self._initialised:
            raise _fail(call, "NOT_INITIALIZED", "cuInit was not called")

    def _device(self, call: str, device: int) -> None:
        self._ready(call)
        if device != 0:
            raise _fail(call, "INVALID_DEVICE", f"device {device}")

    def _context(self, call: str) -> None:
        self._ready(call)
        if not getattr(self._current, "made", False):
            raise _fail(call, "INVALID_CONTEXT", "no context is current in this thread")

    def _of(self, call: str, handle: int) -> tuple[int, int]:
        self._ready(call)
        if handle not in self._handles:
            raise _fail(call, "INVALID_VALUE", f"no handle {handle:#x}")
        return self._handles[handle]

    def _exactly(self, call: str, va: int, nbytes: int) -> None:
        self._ready(call)
        if self._mapped.get(va) != nbytes:
            raise _fail(call, "INVALID_VALUE", f"{va:#x} of {nbytes} bytes is not exactly one mapping")


def _words(va: int, count: int) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * count).from_address(va)


def _digest(words: int, count: int, out: int) -> None:
    (found,) = chunk_sums(vmem.bytes_at(words, count * 8))
    sums = _words(out, 2)
    sums[0], sums[1] = (sums[0] + found.plain) & _MASK, (sums[1] + found.weighted) & _MASK


def _probe(out: int, count: int, seed: int) -> None:
    x = np.arange(count, dtype=np.uint64) + np.uint64(seed)
    for _ in range(PROBE_ROUNDS):
        x = x * np.uint64(PROBE_FACTOR) + np.uint64(PROBE_TERM)
    ctypes.memmove(out, x.ctypes.data, count * 8)


def _poke(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _spin(nanoseconds: int) -> None:
    end = monotonic() + min(nanoseconds, 5_000_000_000) / 1e9
    while monotonic() < end:
        pass
