"""mmap(2) by address, which Python's mmap module does not offer.

A worker's tensors point into a mapping; at a handover the mapping must change from private to shared *at
the same address* so that no tensor moves. That needs MAP_FIXED, hence ctypes.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def _check(failed: bool, call: str) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


class Mapping:
    """``nbytes`` of a descriptor in this address space at ``address``; unmapped by ``close`` only,
    because tensors hold the bare address and no reference."""

    def __init__(self, fd: int, nbytes: int, prot: int, flags: int) -> None:
        self.nbytes = nbytes
        address = _libc.mmap(None, nbytes, prot, flags, fd, 0)
        _check(address == _FAILED, "mmap")
        self.address: int = address

    def replace(self, fd: int, prot: int, flags: int) -> None:
        """Map ``fd`` over the same address range, atomically (mmap(2), MAP_FIXED). Raises OSError: the
        old mapping may then be gone, so the caller must not go on."""
        got = _libc.mmap(self.address, self.nbytes, prot, flags | MAP_FIXED, fd, 0)
        _check(got == _FAILED, "mmap at a fixed address")

    def protect(self, prot: int) -> None:
        _check(_libc.mprotect(self.address, self.nbytes, prot) != 0, "mprotect")

    def buffer(self) -> Any:
        """The bytes as a ctypes array (buffer protocol, no copy). A write to a read-only mapping is
        SIGSEGV."""
        return (ctypes.c_ubyte * self.nbytes).from_address(self.address)

    def buffer_from(self, offset: int) -> Any:
        """The bytes from ``offset`` to the end, as ``buffer``."""
        return (ctypes.c_ubyte * (self.nbytes - offset)).from_address(self.address + offset)

    def contains(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def close(self) -> None:
        if self.address:
            _check(_libc.munmap(self.address, self.nbytes) != 0, "munmap")
            self.address = 0


def map_at(address: int, nbytes: int, prot: int, flags: int, fd: int) -> None:
    """Map ``fd`` over exactly this range, replacing what is there (MAP_FIXED): the caller owns the range."""
    got = _libc.mmap(address, nbytes, prot, flags | MAP_FIXED, fd, 0)
    _check(got == _FAILED, "mmap at a fixed address")


def reserve_at(address: int, nbytes: int) -> None:
    """Turn a range of ours back into address space without memory."""
    map_at(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1)


def reserve(nbytes: int, alignment: int) -> int:
    """Aligned address of ``nbytes`` of address space without memory; ``release`` gives it back."""
    flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
    whole = _libc.mmap(None, nbytes + alignment, PROT_NONE, flags, -1, 0)
    _check(whole == _FAILED, "mmap of a reservation")
    address = -(-int(whole) // alignment) * alignment
    for start, end in ((int(whole), address), (address + nbytes, int(whole) + nbytes + alignment)):
        if end > start:
            release(start, end - start)
    return address


def release(address: int, nbytes: int) -> None:
    _check(_libc.munmap(address, nbytes) != 0, "munmap")


def protect_at(address: int, nbytes: int, prot: int) -> None:
    _check(_libc.mprotect(address, nbytes, prot) != 0, "mprotect")


def bytes_at(address: int, nbytes: int) -> Any:
    """The range as a ctypes array (no copy)."""
    return (ctypes.c_ubyte * nbytes).from_address(address)
