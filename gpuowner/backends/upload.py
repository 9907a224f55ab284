"""Sealed weights from a memfd into GPU memory, by a child that ends: the owner loads no driver for it.

``python -m gpuowner.backends.upload CHANNEL SPEC DEVICE FD NBYTES``: the child maps the memfd, makes and maps GPU
memory, copies, takes the sums on the GPU and compares them with those that NumPy takes of the memfd, and hands out the
descriptor. What the owner then holds is known to be the bytes that it had hashed. No owner calls this yet
(docs/h200.md)."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple, NoReturn

from belayer.errors import WeightsBroken
from gpuowner.backends import oneshot
from gpuowner.backends.cuda_vmm import CudaMemory, CudaVmm
from gpuowner.backends.driver import driver_for
from gpuowner.backends.port import Access
from gpuowner.backends.sums import CHUNK, ChunkSum, chunk_sums
from gpuowner.vmem import MAP_NORESERVE, MAP_SHARED, PROT_READ, Mapping

_BASE_S, _BYTES_PER_S = 60.0, 1e9  # slower than 1 GB/s to a GPU is a host in trouble


class Uploaded(NamedTuple):
    """``sums`` cover the whole allocation; what lies behind the ``nbytes`` of the source is zero."""

    memory: CudaMemory
    sums: tuple[ChunkSum, ...]


def upload(spec: str, device: int, source_fd: int, nbytes: int) -> Uploaded:
    """Raises HostUnfit, Refused (no room), both with the child's own words; nothing is held then."""
    deadline_s = _BASE_S + nbytes / _BYTES_PER_S
    arguments = [spec, str(device), str(source_fd), str(nbytes)]
    told, (fd,) = oneshot.ask("gpuowner.backends.upload", arguments, 1, deadline_s, keep=(source_fd,))
    return Uploaded(CudaMemory(int(told["nbytes"]), fd), tuple(ChunkSum(*row) for row in told["sums"]))


def _run(channel: int, spec: str, device: int, source_fd: int, nbytes: int) -> None:
    source = Mapping(source_fd, nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
    driver = driver_for(spec)
    memory = CudaVmm(driver, device)
    grain = memory.granularity()
    whole = -(-nbytes // grain) * grain
    handle = memory.private(whole)
    va = memory.reserve(whole)
    memory.map_handle(va, whole, handle, whole, Access.READ_WRITE)
    memory.zero(va, whole)
    for at in range(0, nbytes, CHUNK):
        memory.copy_in(va + at, source.address + at, min(CHUNK, nbytes - at))
    memory.protect(va, Access.READ)
    sums = memory.digest(va, whole)
    _same_or_refuse(source, nbytes, sums)
    fd = driver.export_fd(handle)
    oneshot.answer(channel, {"nbytes": whole, "sums": sums}, [fd])
    os.close(fd)


def _same_or_refuse(source: Mapping, nbytes: int, sums: tuple[ChunkSum, ...]) -> None:
    """Chunk by chunk: a tail of single bytes is padded with the zeroes that the GPU has there."""
    raw = memoryview(source.buffer()).cast("B")
    for index, found in enumerate(sums):
        part = raw[index * CHUNK : min((index + 1) * CHUNK, nbytes)]
        tail = len(part) % 8
        expected = chunk_sums(bytes(part) + bytes(8 - tail) if tail else part)[0] if len(part) else ChunkSum(0, 0)
        if found != expected:
            raise WeightsBroken(f"chunk {index} is not on the GPU what it is in memory", kept="the memory of the owner")


def main() -> NoReturn:
    channel, spec, device, source_fd, nbytes = sys.argv[1:]
    oneshot.guarded(lambda: _run(int(channel), spec, int(device), int(source_fd), int(nbytes)))


if __name__ == "__main__":
    main()
