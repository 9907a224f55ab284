"""Graph memory of a standby: given back to the device while it idles, and brought back at the same addresses.

A captured CUDA graph holds addresses, and replays read state that was written into its pool while it was captured. So
parking saves the content to the host and unparking writes it back into new physical memory at the old addresses; new
pages alone are not enough. The host copy is pageable on purpose: pinned memory slows the end of a process, and the end
of a process is our fence.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from belayer.errors import BelayerError, Refused
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.port import Access
from gpuowner.backends.sums import ChunkSum, first_difference


@dataclass
class _Block:
    nbytes: int
    kept: ctypes.Array[ctypes.c_char] | None = None
    sums: tuple[ChunkSum, ...] = ()


class GraphPool:
    """Blocks of private device memory at fixed addresses. ``allocate`` and ``free`` have the shape of a torch pluggable
    allocator; none of them may be called while the pool is parked."""

    def __init__(self, memory: CudaVmm) -> None:
        self._memory = memory
        self._blocks: dict[int, _Block] = {}
        self.parked = False

    def allocate(self, nbytes: int, *, zero: bool = True) -> int:
        """Address of at least ``nbytes``. ``zero`` waits for the device, which a graph capture forbids."""
        self._awake("allocate")
        grain = self._memory.granularity()
        whole = -(-nbytes // grain) * grain
        va = self._memory.reserve(whole)
        self._back(va, whole)
        if zero:
            self._memory.zero(va, whole)
        self._blocks[va] = _Block(whole)
        return va

    def free(self, va: int) -> None:
        self._awake("free")
        if va not in self._blocks:
            raise Refused(f"no block of this pool is at {va:#x}")
        self._memory.unmap(va)
        self._memory.free_va(va)
        del self._blocks[va]

    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())

    def park(self) -> int:
        """Save, then give back; returns the bytes given back. A failure before a block is saved leaves it mapped."""
        self._awake("park")
        self._memory.synchronize()
        for va, block in self._blocks.items():
            block.sums = self._memory.digest(va, block.nbytes)
            block.kept = ctypes.create_string_buffer(block.nbytes)
            self._memory.copy_out(ctypes.addressof(block.kept), va, block.nbytes)
        for va in self._blocks:
            self._memory.unmap(va)
        self.parked = True
        return self.nbytes()

    def discard(self) -> int:
        """Give back without saving: ``unpark`` brings zeros. Returns the bytes given back."""
        self._awake("discard")
        for va, block in self._blocks.items():
            self._memory.unmap(va)
            block.kept, block.sums = None, ()
        self.parked = True
        return self.nbytes()

    def unpark(self) -> int:
        """New memory at the old addresses with the old content, checked (zeros after ``discard``); returns its bytes.
        Raises DriverError (no room: call again) or BelayerError (content differs: the process must not serve)."""
        if not self.parked:
            raise Refused("the pool is not parked")
        done: list[int] = []
        try:
            for va, block in self._blocks.items():
                self._back(va, block.nbytes)
                done.append(va)
        except BelayerError:
            for va in done:
                self._memory.unmap(va)
            raise
        for va, block in self._blocks.items():
            self._restore(va, block)
        self.parked = False
        return self.nbytes()

    def _restore(self, va: int, block: _Block) -> None:
        if block.kept is None:
            self._memory.zero(va, block.nbytes)
            return
        self._memory.copy_in(va, ctypes.addressof(block.kept), block.nbytes)
        bad = first_difference(self._memory.digest(va, block.nbytes), block.sums)
        if bad is not None:
            raise BelayerError(
                f"graph memory at {va:#x}: chunk {bad} came back different",
                remedy="end this worker; the device is suspect",
            )
        block.kept = None

    def _back(self, va: int, nbytes: int) -> None:
        handle = self._memory.private(nbytes)
        try:
            self._memory.map_handle(va, nbytes, handle, nbytes, Access.READ_WRITE)
        finally:
            self._memory.release(handle)

    def _awake(self, what: str) -> None:
        if self.parked:
            raise Refused(f"{what} while the pool is parked", remedy="unpark first")
