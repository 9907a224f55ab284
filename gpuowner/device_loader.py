"""Bringing a model from disk into GPU memory: read on the host in windows, copied by a child that ends.

The host never holds more than two windows of the model: while one is copied the next one is read. A window begins and
ends at a border of chunks that no job crosses, so its sums are those of whole chunks and are taken of what was read
from the files, before it is on the device. Sealed is only what sums to the same there.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from belayer.clock import Stopwatch
from belayer.errors import BelayerError, WeightsBroken
from gpuowner.backends.device_memory import DeviceMemory
from gpuowner.backends.memfd import Memfd
from gpuowner.backends.sums import WORD, ChunkSum, chunk_sums, first_difference, packed
from gpuowner.backends.upload import Upload
from gpuowner.copying import FdSink, Files, Job, Progress, file_jobs, run_jobs
from gpuowner.digest import CHUNK, default_threads, root_digest
from gpuowner.loader import Loaded, lay_out, room_or_refuse

WINDOW = 4 * CHUNK  # bytes, at least; so small that two of them are nothing beside an engine


@dataclass(frozen=True)
class Window:
    """Bytes [``start``, ``end``) of the memory, and what fills them."""

    start: int
    end: int
    jobs: tuple[Job, ...]

    def room(self) -> int:
        """Bytes of whole words: a tail of single bytes is followed by zeroes, as on the device."""
        return -(-(self.end - self.start) // WORD) * WORD


def windows(jobs: Iterable[Job], nbytes: int, least: int = WINDOW) -> list[Window]:
    """[0, ``nbytes``) in pieces of at least ``least`` bytes (the last one may be shorter). One that holds a strided
    part of a large tensor is as large as that tensor."""
    out: list[Window] = []
    mine: list[Job] = []
    start = reach = 0
    for job in sorted(jobs, key=lambda job: job.start):
        border = job.start // CHUNK * CHUNK
        if reach <= border and border - start >= least:
            out.append(Window(start, border, tuple(mine)))
            start, mine = border, []
        mine.append(job)
        reach = max(reach, job.end)
    return [*out, Window(start, nbytes, tuple(mine))]


class _Shifted:
    """A sink whose first byte is that of a window."""

    def __init__(self, fd: int, by: int) -> None:
        self._inner, self._by = FdSink(fd), by

    def write(self, offset: int, data: memoryview) -> None:
        self._inner.write(offset + self._by, data)


def load_to_device(
    model: str,
    folder: Path,
    dtype: str,
    progress: Progress,
    *,
    driver: str,
    device: int = 0,
    kept: Path | None = None,
    threads: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    least: int = WINDOW,
) -> Loaded:
    """As ``loader.load``, into memory of ``device`` over ``driver``; the digests are sums. Raises WeightsBroken,
    Refused (no room on the device), HostUnfit or OSError with nothing held."""
    watch = Stopwatch()
    tensors, layout, nbytes = lay_out(model, folder, dtype, kept, rank, ranks)
    files = Files()
    try:
        cut = windows(file_jobs(layout, tensors, files), nbytes, least)
        half = -(-max(window.room() for window in cut) // mmap.PAGESIZE) * mmap.PAGESIZE
        room_or_refuse(model, 2 * half)
        memory = DeviceMemory.create(driver, device, nbytes)
        begun = watch.ms()
        try:
            sums = _fill(memory, cut, Memfd(f"staging-{model}", 2 * half), progress, threads or default_threads())
        except (OSError, BelayerError):
            memory.close()
            raise
    finally:
        files.close()
    chunks = packed(sums)
    return Loaded(
        memory=memory,
        mapping=None,
        layout=layout,
        chunks=chunks,
        digest=root_digest(chunks, memory.nbytes),
        load_ms=watch.ms(),
        mb_per_s=nbytes / 1e6 / max((watch.ms() - begun) / 1e3, 1e-9),
    )


def _fill(
    memory: DeviceMemory, cut: list[Window], staging: Memfd, progress: Progress, threads: int
) -> tuple[ChunkSum, ...]:
    """All windows; returns the sums of what was read. Takes ``staging``. Raises WeightsBroken when the device has
    others."""
    half, mapping, sums = staging.nbytes // 2, staging.map_writable(), list[ChunkSum]()
    total, watch = sum(job.nbytes for window in cut for job in window.jobs), Stopwatch()
    try:
        with Upload(memory.spec, memory.device, memory.fd, memory.nbytes, staging.fd, half) as upload:
            done = 0
            for index, window in enumerate(cut):
                at = index % 2 * half
                upload.free(index % 2)
                ctypes.memset(mapping.address + at, 0, window.room())  # between tensors, and where no file has a byte
                run_jobs(window.jobs, _Shifted(staging.fd, at - window.start), threads, _quiet, None, ())
                sums += _sums(mapping.buffer_from(at), window.room(), threads)
                upload.put(index % 2, window.start, window.room())
                done += sum(job.nbytes for job in window.jobs)
                progress(done, total, done / 1e3 / max(watch.ms(), 1e-3))
            found = upload.finish()
    finally:
        mapping.close()
        staging.close()
    bad = first_difference(found, tuple(sums))
    if bad is not None:
        raise WeightsBroken(
            f"chunk {bad} is not on the device what was read from the files",
            kept="nothing was sealed",
            remedy="the device or the way to it is suspect: load again, then take it out",
        )
    return found


def _sums(buffer: ctypes.Array[ctypes.c_ubyte], nbytes: int, threads: int) -> list[ChunkSum]:
    view = memoryview(buffer).cast("B")[:nbytes]
    parts = [view[at : at + CHUNK] for at in range(0, nbytes, CHUNK)]
    with ThreadPoolExecutor(threads) as pool:
        return [one for (one,) in pool.map(chunk_sums, parts)]


def _quiet(done: int, total: int, rate: float) -> None:
    """A window is said as a whole."""
