"""What a memory backend does for the owner (create, hand out) and for a worker (map, protect, park, check).

One contract test runs over every backend (tests/contract/test_memory_backend.py). The owner's half needs neither a GPU
context nor a mapping: an allocation is a file descriptor. Addresses are plain integers, because tensors hold the bare
address: unmapping under a live tensor is the caller's mistake and ends in SIGSEGV or Xid 31.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from gpuowner.backends.sums import ChunkSum
from gpuowner.digest import Told, nobody


class Access(StrEnum):
    """What this process may do with a mapped range."""

    NONE = "none"
    READ = "read"
    READ_WRITE = "read_write"


@dataclass(frozen=True)
class Caps:
    """What a backend can promise.

    ``ro_map``: a write through a READ mapping ends the writer. ``ro_fd``: a reader's descriptor itself cannot be mapped
    for writing; without it sealing is a matter of trust among workers. ``same_va``: a range can be unmapped and mapped
    again at its address. ``survives_owner``, ``survives_exporter``: bytes outlive the process that holds, or that made,
    the descriptor. ``proven``: where this has been seen, in words."""

    ro_map: bool
    ro_fd: bool
    same_va: bool
    survives_owner: bool
    survives_exporter: bool
    proven: str


@dataclass(frozen=True)
class Info:
    """``device``: UUID as NVML writes it, or "cpu". ``granularity``: bytes; sizes are rounded up to it."""

    backend: str
    device: str
    granularity: int


class Allocation(Protocol):
    """``nbytes`` of memory behind ``fd``; the bytes live while any descriptor or mapping of them does."""

    nbytes: int
    fd: int

    def reader_fd(self) -> int:
        """A new descriptor for a reader; the caller closes it."""

    def close(self) -> None: ...


class WeightsMemory(Allocation, Protocol):
    """An allocation that holds a version of weights."""

    def difference(self, chunks: tuple[bytes, ...], told: Told = nobody) -> int | None:
        """Read all of it; index of the first chunk that is not what ``chunks`` say, or None. ``told`` hears how far.
        Slow: for a thread."""

    def prefault(self) -> None:
        """Take now what a writer would otherwise get late, or otherwise. Raises HostUnfit."""

    def seal_for_ever(self) -> None:
        """No write by anyone from now on, where the memory can forbid it. Raises OSError: a writer is left."""

    def sealed_for_ever(self) -> bool: ...


class Maker(Protocol):
    """The owner's half: makes memory, never maps it."""

    name: str

    def create(self, label: str, nbytes: int) -> Allocation:
        """Memory of at least ``nbytes``. Raises Refused (no room), HostUnfit (no such device here), ValueError."""

    def adopt(self, fd: int, nbytes: int) -> Allocation:
        """Memory of an earlier life of the owner by its descriptor, which is the allocation's from now on. Raises
        OSError when it cannot be that memory; a GPU's descriptor cannot tell, its digests do."""


class Backend(Maker, Protocol):
    """The whole of it. Ranges are named by the address that ``reserve`` or ``map`` was given; a range that does not fit
    what was reserved or mapped is Refused with nothing changed."""

    def dup_fd(self, allocation: Allocation, access: Access) -> int:
        """A new descriptor to send to a process that may have ``access``; the caller closes it."""

    def reserve(self, nbytes: int) -> int:
        """Address of ``nbytes`` of address space without memory."""

    def map(self, va: int, fd: int, nbytes: int, access: Access, *, offset: int = 0) -> None:
        """Memory at ``va``, inside a reservation and free. ``offset`` into the allocation must be 0 (cuMemMap)."""

    def alias(self, va: int, nbytes: int, fd: int, chunk: int, access: Access) -> None:
        """The first ``chunk`` bytes of ``fd`` over and over: a large range that costs ``chunk`` bytes, for warm-up."""

    def protect(self, va: int, access: Access) -> None:
        """Change the access of exactly what was mapped at ``va``."""

    def unmap(self, va: int) -> None:
        """Back to address space without memory; exactly what was mapped (or aliased) at ``va``."""

    def free_va(self, va: int) -> None:
        """Give the reservation back; nothing may be mapped in it."""

    def as_buffer(self, va: int, nbytes: int) -> Any:
        """Bytes at ``va`` without a copy: a ctypes array, or an object with ``__cuda_array_interface__`` (uint8)."""

    def digest(self, va: int, nbytes: int) -> tuple[ChunkSum, ...]:
        """Sums of each 64 MiB (gpuowner.backends.sums)."""

    def zero(self, va: int, nbytes: int) -> None: ...

    def info(self) -> Info: ...

    def caps(self) -> Caps: ...
