"""The worker's side of sealed weights in GPU memory: one mapping for reading, its sums checked on the GPU.

The owner's descriptor carries no access mode (docs/h200.md, Trust), so it is the mapping that forbids writing: a stray
write ends its writer. The descriptor is closed as soon as it is mapped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping as Table

from belayer.clock import Stopwatch
from belayer.errors import Refused, WeightsBroken
from belayer.messages.owner import TensorSpec
from gpuowner.backends.cuda_vmm import CudaVmm, DeviceBytes
from gpuowner.backends.port import Access
from gpuowner.backends.sums import ChunkSum, first_difference


class GpuWeights:
    """``nbytes`` at ``va`` until ``close``. ``tensors``: by name, offsets in bytes from ``va``."""

    def __init__(
        self, memory: CudaVmm, fd: int, nbytes: int, sums: tuple[ChunkSum, ...], tensors: Table[str, TensorSpec]
    ) -> None:
        """Takes ``fd``. Raises WeightsBroken when a chunk differs from ``sums``, with nothing mapped."""
        self._memory, self.nbytes, self.tensors = memory, nbytes, dict(tensors)
        self.va = memory.reserve(nbytes)
        try:
            memory.map(self.va, fd, nbytes, Access.READ)
        except BaseException:
            memory.free_va(self.va)
            raise
        finally:
            os.close(fd)
        try:
            self.verify(sums)
        except BaseException:
            self.close()
            raise

    def verify(self, sums: tuple[ChunkSum, ...]) -> float:
        """Milliseconds of reading all of it."""
        watch = Stopwatch()
        bad = first_difference(self._memory.digest(self.va, self.nbytes), sums)
        if bad is not None:
            raise WeightsBroken(
                f"weights in GPU memory: chunk {bad} differs from its sums",
                kept="nothing of this mapping is used",
                remedy="end this worker; upload the weights again",
            )
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
