"""Weights in GPU memory as their owner holds them: a descriptor, and a child for whatever must look at the bytes.

The owner has no context and reads none of it. ``python -m gpuowner.backends.device_memory CHANNEL SPEC DEVICE FD
NBYTES`` is the child that does: it maps the memory for reading, answers with its sums, and ends. It is asked after each
commit and after each adoption, as the owner hashes a memfd itself.

There is no seal: whoever has the descriptor can map it for writing (docs/h200.md, Trust). What holds in its place is
that a writer unmaps before it asks for the commit, and that the owner reads every byte after that."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NoReturn

from belayer.errors import HostUnfit
from gpuowner.backends import oneshot
from gpuowner.backends.cuda_vmm import CudaMemory, CudaVmm
from gpuowner.backends.driver import DriverError, driver_for
from gpuowner.backends.port import Access
from gpuowner.backends.sums import ChunkSum, first_difference, unpacked
from gpuowner.digest import Told, nobody

_MODULE = "gpuowner.backends.device_memory"
_BASE_S, _BYTES_PER_S = 60.0, 10e9  # a context takes seconds on a crowded host; reading runs at memory speed


@dataclass
class DeviceMemory(CudaMemory):
    """``spec``, ``device``: what a child makes its driver from."""

    spec: str
    device: int = 0

    @classmethod
    def create(cls, spec: str, device: int, nbytes: int) -> DeviceMemory:
        """Raises HostUnfit, Refused (no room). Whole granules, so ``nbytes`` may be more than asked for."""
        made = oneshot.make(spec, device, (nbytes,))
        return cls(made.sizes[0], made.fds[0], spec, device)

    def difference(self, chunks: tuple[bytes, ...], told: Told = nobody) -> int | None:
        """Index of the first chunk whose sums are not ``chunks``, or None; ``told`` hears of all of it at once. Slow:
        for a thread. Raises HostUnfit when nobody can look now, Refused when this is no memory of the device any
        more."""
        bad = first_difference(self.sums(), unpacked(chunks))
        if bad is None:
            told(self.nbytes, self.nbytes)
        return bad

    def sums(self) -> tuple[ChunkSum, ...]:
        arguments = [self.spec, str(self.device), str(self.fd), str(self.nbytes)]
        deadline_s = _BASE_S + self.nbytes / _BYTES_PER_S
        told, _ = oneshot.ask(_MODULE, arguments, 0, deadline_s, keep=(self.fd,))
        return tuple(ChunkSum(*row) for row in told["sums"])

    def prefault(self) -> None:
        """A GPU gives all of it at once."""

    def seal_for_ever(self) -> None:
        """Nothing to do: see above."""

    def sealed_for_ever(self) -> bool:
        return False


def _run(channel: int, spec: str, device: int, fd: int, nbytes: int) -> None:
    memory = CudaVmm(driver_for(spec), device)
    try:
        va = memory.reserve(nbytes)
        memory.map(va, fd, nbytes, Access.READ)
        sums = memory.digest(va, nbytes)
    except DriverError as why:
        if why.name == "CUDA_ERROR_OUT_OF_MEMORY":  # of the context, not of the weights: they are as they were
            raise HostUnfit(f"no room on the device to read {nbytes} bytes of weights: {why.message}") from why
        raise
    oneshot.answer(channel, {"sums": sums}, [])


def main() -> NoReturn:
    channel, spec, device, fd, nbytes = sys.argv[1:]
    oneshot.guarded(lambda: _run(int(channel), spec, int(device), int(fd), int(nbytes)))


if __name__ == "__main__":
    main()
