"""What ``[gpuowner] memory`` names, for the owner: where its allocations come from. Asked once, before anything
starts."""

from __future__ import annotations

from collections.abc import Collection

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


def maker_for(memory: str, spec: str = REAL, devices: Collection[str] = ()) -> Maker:
    """``devices``: of the slots, as configured. Raises HostUnfit: no driver or device here, or a slot on another device
    than the first one, where an owner puts all of its memory."""
    if memory == MEMFD:
        return MemfdMaker()
    first = oneshot.make(spec, 0, ()).device
    elsewhere = sorted({word for word in devices if word.lower() not in ("gpu", "gpu:0", f"gpu:{first}".lower())})
    if elsewhere:
        raise HostUnfit(
            f"slots are on {', '.join(elsewhere)}, and owners put weights and arenas on the first GPU, {first}",
            kept="nothing was started",
            remedy="put all slots on that one, or start the daemons with CUDA_VISIBLE_DEVICES naming the other",
        )
    return CudaMaker(CudaVmm(driver_for(spec)))
