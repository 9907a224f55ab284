"""Memory of an engine that a standby gives back while it idles: graphs, what they read, and workspace.

vLLM names by a tag whatever it allocates in a memory pool of its own. Ours answers per tag:

- ``cudagraph``, ``runtime``: saved to the host and brought back byte-equal. A replay reads state that was written into
  its pool at capture; new pages alone end in wrong addresses (conformance rows 26 and 53).
- ``workspace``: saved as well. vLLM's own backend drops it; captured graphs may hold views of it, and it is small.
- ``weights``, ``kv_cache``: never in a pool. They lie in the owner's memory, which is not ours to give back.

torch asks for segments through two C functions. A C callback must not raise: address 0 is torch's out of memory, and
what failed is kept for whoever asks why.
"""

from __future__ import annotations

import ctypes
from typing import Any

from belayer.errors import BelayerError, Refused
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.park import GraphPool

PARKED = ("cudagraph", "runtime", "workspace")
OWNED = ("weights", "kv_cache")

_ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class TaggedPool:
    """One tag's segments, as torch's pluggable allocator asks for them. ``failures``: what could not be given, in
    words."""

    def __init__(self, memory: CudaVmm, tag: str) -> None:
        self.tag, self.pool = tag, GraphPool(memory)
        self.failures: list[str] = []
        # Strong references for the life of the process: torch keeps bare pointers.
        self._callbacks = (_ALLOC(self._alloc), _FREE(self._free))

    def pointers(self) -> tuple[int, int]:
        """Addresses of the C functions ``void *(size_t, int, void *)`` and ``void (void *, size_t, int, void *)``."""
        first, second = (ctypes.cast(each, ctypes.c_void_p).value for each in self._callbacks)
        assert first is not None
        assert second is not None
        return first, second

    def _alloc(self, nbytes: int, device: int, stream: int | None) -> int:
        try:
            return self.pool.allocate(nbytes, zero=False)  # a wait for the device would break a capture
        except BelayerError as why:
            self.failures.append(f"{self.tag}: {nbytes} bytes: {why.message}")
            return 0

    def _free(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        try:
            self.pool.free(address)
        except BelayerError as why:
            self.failures.append(f"{self.tag}: free of {address:#x}: {why.message}")


class Pools:
    """All tags of one engine. ``park`` and ``unpark`` are all or nothing as seen from outside."""

    def __init__(self, memory: CudaVmm) -> None:
        self._tagged = {tag: TaggedPool(memory, tag) for tag in PARKED}
        self._torch: dict[str, Any] = {}

    def tagged(self, tag: str) -> TaggedPool:
        """Raises Refused for memory that the owner holds, and for a tag that this adapter was not written for."""
        if tag not in self._tagged:
            what = "lies in the owner's memory" if tag in OWNED else "is not a tag of vLLM 0.32"
            raise Refused(f"{tag!r} {what}: no pool for it", remedy=f"pools: {', '.join(PARKED)}")
        return self._tagged[tag]

    def nbytes(self) -> int:
        return sum(one.pool.nbytes() for one in self._tagged.values())

    @property
    def parked(self) -> bool:
        return any(one.pool.parked for one in self._tagged.values())

    def park(self) -> int:
        """Bytes given back. Raises Refused when a segment could not be made, or freed, since the last call: what is
        missing in a pool is not seen by its content."""
        failures = [said for one in self._tagged.values() for said in one.failures]
        if failures:
            raise Refused(f"{len(failures)} call(s) of torch into the graph pools failed, the first: {failures[0]}")
        return sum(one.pool.park() for one in self._tagged.values() if not one.pool.parked)

    def unpark(self) -> int:
        """Bytes brought back. Raises DriverError (no room: those brought back stay, call again), BelayerError (content
        differs: end this process)."""
        return sum(one.pool.unpark() for one in self._tagged.values() if one.pool.parked)

    def discard(self, tags: tuple[str, ...]) -> int:
        return sum(self.tagged(tag).pool.discard() for tag in tags)

    def torch_pool(self, tag: str) -> Any:
        """A torch MemPool over the tag's segments; needs CUDA. Kept for ever: pytorch issue 146431."""
        import torch

        pointers = self.tagged(tag).pointers()
        if tag not in self._torch:
            allocator = torch._C._cuda_customAllocator(*pointers)
            self._torch[tag] = (torch.cuda.MemPool(allocator), allocator)
        return self._torch[tag][0]
