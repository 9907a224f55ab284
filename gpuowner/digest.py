"""Digests of sealed bytes: sha256 of each 64 MiB chunk, and one over all of them.

Chunks let a check start before all is read, and name the place that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

CHUNK = 64 << 20


def chunk_digests(buffer: Any) -> Iterator[bytes]:
    """sha256 of each chunk of a bytes-like object, in order; the last chunk may be short."""
    view = memoryview(buffer).cast("B")
    for start in range(0, len(view), CHUNK):
        yield hashlib.sha256(view[start : start + CHUNK]).digest()


def root_digest(chunks: tuple[bytes, ...], nbytes: int) -> str:
    """Hex digest over the chunk digests and the length."""
    whole = hashlib.sha256(nbytes.to_bytes(8, "little"))
    for chunk in chunks:
        whole.update(chunk)
    return whole.hexdigest()


def first_difference(buffer: Any, expected: tuple[bytes, ...]) -> int | None:
    """Index of the first chunk whose digest differs from ``expected``, or None when all are equal."""
    count = 0
    for index, digest in enumerate(chunk_digests(buffer)):
        if index >= len(expected) or digest != expected[index]:
            return index
        count = index + 1
    return None if count == len(expected) else count
