"""Digests of sealed bytes: sha256 of each 64 MiB chunk, and one over all of them.

Chunks let a check start before all is read, run on several cores (hashlib lets go of the interpreter lock), and name
the place that differs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CHUNK = 64 << 20

Told = Callable[[int, int], None]  # bytes done, of how many


def default_threads() -> int:
    """Reading, converting and hashing each take a core; more than eight readers only fight for the disk."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def chunk_count(nbytes: int) -> int:
    return -(-nbytes // CHUNK)


def chunk_digest(view: memoryview, index: int) -> bytes:
    """sha256 of chunk ``index`` of a byte view; the last chunk may be short."""
    return hashlib.sha256(view[index * CHUNK : (index + 1) * CHUNK]).digest()


def chunk_digests(buffer: Any, threads: int = 1) -> Iterator[bytes]:
    """sha256 of each chunk of a bytes-like object, in order."""
    view = memoryview(buffer).cast("B")
    return digests_of(view, range(chunk_count(len(view))), threads)


def digests_of(view: memoryview, chunks: Iterable[int], threads: int = 1) -> Iterator[bytes]:
    """Digests of the chunks named, in that order."""
    if threads <= 1:
        yield from (chunk_digest(view, index) for index in chunks)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda index: chunk_digest(view, index), chunks)


def root_digest(chunks: tuple[bytes, ...], nbytes: int) -> str:
    """Hex digest over the chunk digests and the length."""
    whole = hashlib.sha256(nbytes.to_bytes(8, "little"))
    for chunk in chunks:
        whole.update(chunk)
    return whole.hexdigest()


def nobody(done: int, of: int) -> None:
    """Nobody wants to hear how far it is."""


def first_difference(buffer: Any, expected: tuple[bytes, ...], threads: int = 1, told: Told = nobody) -> int | None:
    """Index of the first chunk whose digest differs from ``expected``, or None when all are equal. ``told`` hears, in
    the caller's own thread, how many bytes of how many are equal so far."""
    nbytes = memoryview(buffer).nbytes
    count = 0
    for index, digest in enumerate(chunk_digests(buffer, threads)):
        if index >= len(expected) or digest != expected[index]:
            return index
        count = index + 1
        told(min(count * CHUNK, nbytes), nbytes)
    return None if count == len(expected) else count
