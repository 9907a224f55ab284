"""Moving a model's tensors from its files into memory, on several threads, hashing what is complete.

The bytes go through a small buffer by ``preadv`` and ``pwrite`` and not by a copy into a mapping: a page that is
written whole by write(2) is neither zeroed nor faulted in first, which is worth almost half of the time (measured in
benchmarks/owner.py). Both calls, and sha256, let go of the interpreter lock. bf16 and fp16 become float32 exactly:
float32 has all their values.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from belayer.clock import Stopwatch
from belayer.errors import WeightsBroken
from belayer.messages.owner import TensorSpec
from gpuowner import hugepages
from gpuowner.digest import CHUNK, chunk_count, chunk_digest
from gpuowner.recipe import c_strides
from gpuowner.safetensors_file import ITEM_BYTES, RawTensor, elements
from gpuowner.vmem import Mapping

BLOCK = 1 << 20  # bytes read at once; stays in the cache between read and write
_REPORT_EVERY = 256 << 20
_KIND = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}

Progress = Callable[[int, int, float], None]  # bytes done, bytes in all, MB/s


class Sink(Protocol):
    """Where bytes of the mapping are put; called from several threads."""

    def write(self, offset: int, data: memoryview) -> None: ...


class FdSink:
    """By pwrite(2) on a descriptor of a memfd."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, offset: int, data: memoryview) -> None:
        while data:
            done = os.pwrite(self._fd, data, offset)
            offset, data = offset + done, data[done:]


class MapSink:
    """By a copy into a writable mapping, where write(2) is not offered (huge pages of hugetlbfs)."""

    def __init__(self, buffer: Any) -> None:
        self._view = memoryview(buffer).cast("B")

    def write(self, offset: int, data: memoryview) -> None:
        self._view[offset : offset + len(data)] = data


def sink_for(fd: int, writable: Callable[[], Mapping], huge_pages: str = "off") -> Sink:
    """Huge pages come only through a mapping: hugetlbfs has no write(2), and THP looks at the mapping's advice."""
    hugetlb = os.fstat(fd).st_blksize >= hugepages.SIZE
    return MapSink(writable().buffer()) if hugetlb or huge_pages != "off" else FdSink(fd)


@dataclass(frozen=True)
class Job:
    """One run on one thread: ``run(sink)`` writes within [``start``, ``end``) of the mapping, ``nbytes`` in all."""

    start: int
    end: int
    nbytes: int
    run: Callable[[Sink], None]

    def chunks(self) -> range:
        return range(self.start // CHUNK, (max(self.end, self.start + 1) - 1) // CHUNK + 1)


class Files:
    """Open descriptors and mappings of a model's files; one each."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}

    def fd(self, path: Path) -> int:
        if path not in self._fds:
            try:
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as why:
                raise WeightsBroken(f"model file {path}: it cannot be read: {why.strerror}") from why
        return self._fds[path]

    def bytes(self, raw: RawTensor) -> NDArray[np.uint8]:
        fd = self.fd(raw.path)
        if raw.path not in self._maps:
            self._maps[raw.path] = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._maps[raw.path], dtype=np.uint8)[raw.start : raw.end]

    def close(self) -> None:
        self._maps.clear()  # unmapped with the last array that points into them
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def file_jobs(specs: Sequence[TensorSpec], tensors: dict[str, RawTensor], files: Files) -> Iterator[Job]:
    """Jobs that fill every part of ``specs`` from the files. Raises WeightsBroken when a file cannot be opened."""
    for spec in specs:
        if spec.source and spec.nbytes:
            raw = tensors[spec.source]
            if spec.strides or spec.source_strides:
                array = files.bytes(raw)
                yield array_job(spec, typed(array, raw.dtype), raw.dtype)
            else:
                yield from _stream_jobs(spec, raw, files.fd(raw.path))


def _stream_jobs(spec: TensorSpec, raw: RawTensor, fd: int) -> Iterator[Job]:
    """Contiguous on both sides: cut at chunk borders of the mapping, so that chunks complete early."""
    grow = ITEM_BYTES[spec.dtype] // ITEM_BYTES[raw.dtype]
    base = raw.start + spec.source_offset * ITEM_BYTES[raw.dtype]
    at, end = spec.offset, spec.offset + spec.nbytes
    while at < end:
        upto = min(end, at + 16 * BLOCK, (at // CHUNK + 1) * CHUNK)
        first = base + (at - spec.offset) // grow

        def run(sink: Sink, at: int = at, upto: int = upto, first: int = first) -> None:
            _stream(sink, fd, raw, spec.dtype, at, upto, first)

        yield Job(at, upto, upto - at, run)
        at = upto


def _stream(sink: Sink, fd: int, raw: RawTensor, dtype: str, at: int, upto: int, first: int) -> None:
    buffer = memoryview(bytearray(BLOCK))
    grow = ITEM_BYTES[dtype] // ITEM_BYTES[raw.dtype]
    while at < upto:
        want = min(BLOCK, (upto - at) // grow)
        got = 0
        while got < want:
            n = os.preadv(fd, [buffer[got:want]], first + got)
            if n == 0:
                raise WeightsBroken(
                    f"model file {raw.path}: it ends inside {raw.name} while it is read",
                    kept="nothing was sealed",
                    remedy="fetch the file again; nothing may write to it meanwhile",
                )
            got += n
        if dtype == raw.dtype:
            sink.write(at, buffer[:want])
        else:
            sink.write(at, _bytes_of(widened(typed(buffer[:want], raw.dtype), raw.dtype, dtype)))
        at, first = at + want * grow, first + want


def typed(data: Any, dtype: str) -> NDArray[Any]:
    """Bytes as a flat array of unsigned integers of the item's size."""
    return np.frombuffer(data, dtype=_KIND[ITEM_BYTES[dtype]])


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def widened(source: NDArray[Any], stored: str, to: str) -> NDArray[Any]:
    """A contiguous array of the bits of ``source`` in dtype ``to``. Raises WeightsBroken unless that is exact."""
    if stored == to:
        return np.ascontiguousarray(source)
    if (stored, to) == ("BF16", "F32"):
        wide: NDArray[Any] = source.astype(np.uint32, order="C")
        wide <<= np.uint32(16)
        return wide
    if (stored, to) == ("F16", "F32"):
        return np.ascontiguousarray(source).view("<f2").astype("<f4").view("<u4")
    raise WeightsBroken(f"no exact conversion from {stored} to {to}")


def array_jobs(spec: TensorSpec, flat: NDArray[Any], stored: str) -> Iterator[Job]:
    """Jobs that fill a part from memory; ``flat``: all items of the source tensor in C order, as ``typed`` gives."""
    if spec.strides or spec.source_strides:
        yield array_job(spec, flat, stored)
        return
    item, at, end = ITEM_BYTES[spec.dtype], spec.offset, spec.offset + spec.nbytes
    while at < end:
        upto = min(end, at + 16 * BLOCK, (at // CHUNK + 1) * CHUNK)
        first = spec.source_offset + (at - spec.offset) // item
        part = flat[first : first + (upto - at) // item]

        def run(sink: Sink, at: int = at, part: NDArray[Any] = part) -> None:
            for start in range(0, part.size, BLOCK):
                block = widened(part[start : start + BLOCK], stored, spec.dtype)
                sink.write(at + start * item, _bytes_of(block))

        yield Job(at, upto, upto - at, run)
        at = upto


def array_job(spec: TensorSpec, flat: NDArray[Any], stored: str) -> Job:
    """``flat``: all items of the source tensor, in C order, as ``typed`` gives them."""
    item = ITEM_BYTES[spec.dtype]
    strides = spec.strides or c_strides(spec.shape)
    span = sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) + 1
    source_strides = spec.source_strides or c_strides(spec.shape)

    def run(sink: Sink) -> None:
        size = flat.itemsize
        source = np.lib.stride_tricks.as_strided(
            flat[spec.source_offset :], spec.shape, [n * size for n in source_strides], writeable=False
        )
        _write_blocks(sink, spec, source, stored, strides)

    return Job(spec.offset, spec.offset + span * item, spec.nbytes, run)


def _write_blocks(sink: Sink, spec: TensorSpec, source: NDArray[Any], stored: str, strides: tuple[int, ...]) -> None:
    """One write per largest part that is contiguous in the mapping, and of at most some MiB."""
    item, inner = ITEM_BYTES[spec.dtype], len(spec.shape)
    while inner and strides[inner - 1] == elements(spec.shape[inner:]):
        inner -= 1
    while inner < len(spec.shape) - 1 and elements(spec.shape[inner:]) * item > 4 * BLOCK:
        inner += 1
    for index in np.ndindex(*spec.shape[:inner]):
        at = spec.offset + item * sum(n * s for n, s in zip(index, strides[:inner], strict=True))
        sink.write(at, _bytes_of(widened(source[index], stored, spec.dtype)))


def base_jobs(ranges: Sequence[tuple[int, int]], base: Mapping) -> list[Job]:
    """Jobs that copy byte ranges of ``base`` to the same places."""
    view = memoryview(base.buffer()).cast("B")
    jobs = []
    for start, end in ranges:
        for at in range(start, end, 16 * BLOCK):
            upto = min(end, at + 16 * BLOCK)

            def run(sink: Sink, at: int = at, upto: int = upto) -> None:
                sink.write(at, view[at:upto])

            jobs.append(Job(at, upto, upto - at, run))
    return jobs


def run_jobs(
    jobs: Sequence[Job], sink: Sink, threads: int, progress: Progress, view: memoryview | None, todo: Sequence[int]
) -> dict[int, bytes]:
    """Run all jobs; returns the digests of the chunks of ``todo``, each hashed as soon as its last job is done.

    ``view``: the memory that is written, to be hashed; None: no digests. The first error ends it: jobs that have not
    begun are dropped, and the error is raised.
    """
    left = dict.fromkeys(todo, 0)
    for job in jobs:
        for chunk in job.chunks():
            if chunk in left:
                left[chunk] += 1
    total, done, reported, watch, lock = sum(job.nbytes for job in jobs), 0, 0, Stopwatch(), threading.Lock()
    digests: dict[int, Future[bytes]] = {}
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="weights") as pool:

        def hash_chunk(index: int) -> None:
            if view is not None:
                digests[index] = pool.submit(chunk_digest, view, index)

        def one(job: Job) -> int:
            job.run(sink)
            with lock:
                for chunk in job.chunks():
                    if chunk in left:
                        left[chunk] -= 1
                        if left[chunk] == 0:
                            hash_chunk(chunk)
            return job.nbytes

        with lock:
            for chunk in [chunk for chunk, count in left.items() if count == 0]:
                hash_chunk(chunk)
        futures = [pool.submit(one, job) for job in jobs]
        try:
            for future in as_completed(futures):
                done += future.result()
                if done - reported >= _REPORT_EVERY or done == total:
                    reported = done
                    progress(done, total, done / 1e3 / max(watch.ms(), 1e-3))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return {index: future.result() for index, future in digests.items()}


def all_chunks(nbytes: int) -> range:
    return range(chunk_count(nbytes))
