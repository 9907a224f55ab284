"""The worker's side of a KV arena in GPU memory: addresses that lead to scratch until the lease, and to the arena after
it.

A standby on a CPU warms up on a private copy of the arena's pages; a GPU has no such mapping. So a standby never maps
the arena at all: its whole range is one small chunk over and over, in which kernels warm up and graphs are captured,
and ``promote`` puts the arena in its place at the same addresses (promise R8). The descriptor that comes with OpenArena
is closed unused: on a GPU it could be mapped for writing."""

from __future__ import annotations

import os

import msgspec

from belayer.clock import Stopwatch
from belayer.errors import BelayerError
from belayer.messages import owner as m
from belayer.seqpacket import SeqClient
from gpuowner.attach import OwnerClient
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.port import Access

SCRATCH = 64 << 20  # bytes; fewer pieces to map than with one granule, and little beside an engine


class Promoted(msgspec.Struct, frozen=True):
    """Milliseconds of each part of a promotion."""

    lease: float
    map: float
    zero: float


class GpuArena:
    """``nbytes`` at ``va`` for the life of the process. ``epoch`` is -1 while no lease is held; ``promoted`` tells what
    the promotion took."""

    def __init__(self, client: OwnerClient, memory: CudaVmm, slot: str, nbytes: int, rank: int = 0) -> None:
        self._client, self._memory, self._slot, self._rank = client, memory, slot, rank
        self.grant, fds = client.call(m.OpenArena(slot=slot, rank=rank, nbytes=nbytes), m.ArenaGrant)
        for fd in fds:
            os.close(fd)
        self.nbytes, self.epoch = nbytes, -1
        self.promoted: Promoted | None = None
        self.va = memory.reserve(nbytes)
        chunk = SCRATCH if nbytes % SCRATCH == 0 else memory.granularity()
        handle = memory.private(chunk)
        try:
            memory.map_handle(self.va, nbytes, handle, chunk, Access.READ_WRITE)
        finally:
            memory.release(handle)
        client.on_return(self._reclaim)

    def promote(self, epoch: int, owner_generation: int = 0) -> float:
        """Take the lease of ``epoch``, map the arena at ``va`` and zero it; returns milliseconds. What another engine
        left there could be NaN, which masked attention spreads (0 * NaN). Raises LeaseRefused, Fenced or OwnerGone with
        the scratch still mapped; DriverError or BelayerError later than that, and then this process must end."""
        watch = Stopwatch()
        self._client.must_live()
        owner = owner_generation or self._client.welcome.owner_generation
        message = m.AcquireLease(slot=self._slot, rank=self._rank, epoch=epoch, owner_generation=owner)
        _, fds = self._client.call(message, m.LeaseGrant)
        lease = watch.lap()
        try:
            if len(fds) != 1:
                raise BelayerError(f"the lease of {self._slot} came with {len(fds)} descriptors")
            self._memory.unmap(self.va)
            self._memory.map(self.va, fds[0], self.nbytes, Access.READ_WRITE)
        finally:
            for fd in fds:
                os.close(fd)
        mapped = watch.lap()
        self._memory.zero(self.va, self.nbytes)
        self.epoch = epoch
        self.promoted = Promoted(lease, mapped, watch.lap())
        return lease + mapped + self.promoted.zero

    def _reclaim(self, client: SeqClient, owner_generation: int) -> None:
        if self.epoch >= 0:
            message = m.ReclaimLease(
                slot=self._slot, rank=self._rank, epoch=self.epoch, owner_generation=owner_generation
            )
            client.call(message, m.ArenaInfo)
