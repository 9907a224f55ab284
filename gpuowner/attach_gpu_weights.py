"""The worker's side of sealed weights in GPU memory: one mapping for reading, its sums checked on the GPU.

The owner's descriptor carries no access mode (docs/h200.md, Trust), so it is the mapping that forbids writing: a stray
write ends its writer. The descriptor is closed as soon as it is mapped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping as Table

from belayer.clock import Stopwatch
from belayer.errors import Refused, WeightsBroken
from belayer.messages import owner as m
from belayer.messages.owner import TensorSpec
from belayer.seqpacket import SeqClient
from gpuowner.attach import OwnerClient, attach_weights
from gpuowner.backends.choice import CUDA_VMM
from gpuowner.backends.cuda_vmm import CudaVmm, DeviceBytes
from gpuowner.backends.port import Access
from gpuowner.backends.sums import ChunkSum, first_difference, unpacked


class GpuWeights:
    """``nbytes`` at ``va`` until ``close``. ``tensors``: by name, offsets in bytes from ``va``."""

    def __init__(
        self, memory: CudaVmm, fd: int, nbytes: int, sums: tuple[ChunkSum, ...], tensors: Table[str, TensorSpec]
    ) -> None:
        """Takes ``fd``. Raises WeightsBroken when a chunk differs from ``sums``, with nothing mapped."""
        self._memory, self.nbytes, self.tensors, self.sums = memory, nbytes, dict(tensors), sums
        self.va = _mapped(memory, fd, nbytes)
        try:
            self.verify()
        except BaseException:
            self.close()
            raise

    def verify(self, sums: tuple[ChunkSum, ...] | None = None) -> float:
        """Milliseconds of reading all of it. ``sums``: None for those that it was attached with."""
        watch = Stopwatch()
        _same_or_refuse(self._memory, self.va, self.nbytes, self.sums if sums is None else sums)
        return watch.ms()

    def of(self, spec: TensorSpec) -> DeviceBytes:
        """The bytes of one tensor, without a copy."""
        if spec.offset < 0 or spec.offset + spec.nbytes > self.nbytes:
            raise Refused(f"{spec.name} lies outside the {self.nbytes} bytes of its model")
        return self._memory.as_buffer(self.va + spec.offset, spec.nbytes)

    def contains(self, address: int, nbytes: int) -> bool:
        return self.va <= address and address + nbytes <= self.va + self.nbytes

    def close(self) -> None:
        """No tensor may be left over it."""
        self._memory.unmap(self.va)
        self._memory.free_va(self.va)


class GpuWeightsView(GpuWeights):
    """A sealed model of the owner behind ``client``. ``grant`` says which version is mapped."""

    def __init__(self, client: OwnerClient, memory: CudaVmm, model: str, rank: int = 0) -> None:
        """Raises as ``GpuWeights``; Refused when the owner keeps the model elsewhere, WeightsTorn."""
        self.grant, layout, fd = attach_weights(client, model, rank, CUDA_VMM)
        sums = unpacked(self.grant.chunk_digests)
        super().__init__(memory, fd, self.grant.nbytes, sums, {spec.name: spec for spec in layout})
        self._client = client
        client.on_return(self._rejoin)

    def _rejoin(self, client: SeqClient, owner_generation: int) -> None:
        grant = self.grant
        mapped = m.RejoinWeights(
            model=grant.model, rank=grant.rank, version=grant.version, digest=grant.digest,
            owner_generation=owner_generation,
        )  # fmt: skip
        client.call(mapped, m.WeightsInfo)

    def follow(self) -> bool:
        """Map the owner's last version at the same address; False when its memory was mapped already (an update in
        place, or none). Its bytes are verified before they take the place of the old ones; no kernel may read these
        meanwhile.

        Raises WeightsTorn, Refused or WeightsBroken (the new version differs from its sums, or lies otherwise) with the
        mapping as it was; DriverError when the new one could not be mapped in its place: the process must end."""
        grant, layout, fd = attach_weights(self._client, self.grant.model, self.grant.rank, CUDA_VMM)
        sums, memory = unpacked(grant.chunk_digests), self._memory
        try:
            if grant.memory == self.grant.memory:
                self.verify(sums)
                self.grant, self.sums = grant, sums
                return False
            if grant.nbytes != self.nbytes or {spec.name: spec for spec in layout} != self.tensors:
                raise WeightsBroken(
                    f"weights of {grant.model} v{grant.version} lie otherwise than v{self.grant.version}",
                    kept=f"v{self.grant.version} as it is mapped",
                    remedy="start a new worker: this one's tensors cannot follow",
                )
            beside = _mapped(memory, os.dup(fd), self.nbytes)
            try:
                _same_or_refuse(memory, beside, self.nbytes, sums)
            finally:
                memory.unmap(beside)
                memory.free_va(beside)
            memory.unmap(self.va)
            memory.map(self.va, fd, self.nbytes, Access.READ)
            self.grant, self.sums = grant, sums
            return True
        finally:
            os.close(fd)


def _mapped(memory: CudaVmm, fd: int, nbytes: int) -> int:
    """Address of a new mapping for reading. Takes ``fd``."""
    try:
        va = memory.reserve(nbytes)
        try:
            memory.map(va, fd, nbytes, Access.READ)
        except BaseException:
            memory.free_va(va)
            raise
    finally:
        os.close(fd)
    return va


def _same_or_refuse(memory: CudaVmm, va: int, nbytes: int, sums: tuple[ChunkSum, ...]) -> None:
    bad = first_difference(memory.digest(va, nbytes), sums)
    if bad is not None:
        raise WeightsBroken(
            f"weights in GPU memory: chunk {bad} differs from its sums",
            kept="nothing of this mapping is used",
            remedy="end this worker; let the owner load or publish the weights again",
        )
