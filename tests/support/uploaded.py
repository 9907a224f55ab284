"""Bytes in GPU memory as an owner's uploading child leaves them."""

from __future__ import annotations

import mmap
from typing import NamedTuple

from gpuowner.backends.device_memory import DeviceMemory
from gpuowner.backends.memfd import Memfd
from gpuowner.backends.sums import ChunkSum
from gpuowner.backends.upload import Upload


class Uploaded(NamedTuple):
    memory: DeviceMemory
    sums: tuple[ChunkSum, ...]


def upload(spec: str, data: bytes, half: int = 0) -> Uploaded:
    """``half``: bytes that are copied at a time, whole pages; all at once by default."""
    half = half or -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = DeviceMemory.create(spec, 0, len(data))
    staging = Memfd("staging", 2 * half)
    mapping = staging.map_writable()
    try:
        with Upload(spec, 0, memory.fd, memory.nbytes, staging.fd, half) as going:
            for index, at in enumerate(range(0, len(data), half)):
                part = data[at : at + half]
                going.free(index % 2)
                mapping.buffer_from(index % 2 * half)[: len(part)] = part
                going.put(index % 2, at, len(part))
            return Uploaded(memory, going.finish())
    except BaseException:
        memory.close()
        raise
    finally:
        mapping.close()
        staging.close()
