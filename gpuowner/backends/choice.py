"""What ``[gpuowner] memory`` names, for the owner: where its allocations come from. Asked once, before anything
starts."""

from __future__ import annotations

from belayer.errors import HostUnfit, Refused
from gpuowner.backends import oneshot
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import REAL, driver_for
from gpuowner.backends.memfd import Memfd
from gpuowner.backends.port import Allocation, Maker

MEMFD, CUDA_VMM = "memfd", "cuda_vmm"


class MemfdMaker:
    name = MEMFD

    def create(self, label: str, nbytes: int) -> Allocation:
        return Memfd(label, nbytes)

    def adopt(self, fd: int, nbytes: int) -> Allocation:
        return Memfd.adopt(fd, nbytes)


class CudaMaker:
    """Exactly the bytes that were asked for, so that a size says the same to the ledger, the grant and the worker."""

    name = CUDA_VMM

    def __init__(self, memory: CudaVmm) -> None:
        self._memory = memory

    def create(self, label: str, nbytes: int) -> Allocation:
        made = self._memory.create(label, nbytes)
        if made.nbytes != nbytes:
            made.close()
            raise Refused(
                f"{label}: {nbytes} bytes of GPU memory are not whole granules, {made.nbytes} would be",
                kept="nothing was allocated",
                remedy="make kv_bytes a multiple of 2 MiB",
            )
        return made

    def adopt(self, fd: int, nbytes: int) -> Allocation:
        return self._memory.adopt(fd, nbytes)


def maker_for(memory: str, kind: str, spec: str = REAL) -> Maker:
    """Raises HostUnfit: no driver or device here, or a kind that this memory is not wired for."""
    if memory == MEMFD:
        return MemfdMaker()
    oneshot.make(spec, 0, ())
    if kind == "weights":
        raise HostUnfit(
            "gpuowner does not load weights into GPU memory yet: its loader writes memfds",
            kept="nothing was started",
            remedy='run slots on the CPU with memory = "memfd"; docs/h200.md says what of the GPU path is built',
        )
    return CudaMaker(CudaVmm(driver_for(spec)))
