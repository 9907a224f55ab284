"""Sums of memory that a GPU can take at the speed of its memory, and their NumPy twin.

Per 64 MiB chunk, over little-endian 64-bit words and modulo 2**64: the sum of all words, and the sum of each word times
its position counted from 1. The first sees any changed word, the second also words that changed places. They find
corruption, not malice; sha256 (gpuowner.digest) stays what is published for bytes that the CPU can read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from belayer.errors import WeightsBroken

CHUNK = 64 << 20  # bytes
WORD = 8
_MASK = (1 << 64) - 1
_PACKED = struct.Struct("<2Q")
_BLOCK = 1 << 16  # words per step: the products stay in the cache


class ChunkSum(NamedTuple):
    plain: int
    weighted: int


def words_of(nbytes: int) -> int:
    """Whole words of a chunk. Raises ValueError: a tail of single bytes would go unseen on a GPU."""
    if nbytes <= 0 or nbytes % WORD:
        raise ValueError(f"sums are over whole {WORD}-byte words, not over {nbytes} bytes")
    return nbytes // WORD


def chunk_sums(buffer: Any) -> tuple[ChunkSum, ...]:
    """The twin: sums of a bytes-like object whose length is a multiple of 8."""
    raw = memoryview(buffer).cast("B")
    words_of(len(raw))
    return tuple(_sums(np.frombuffer(raw[at : at + CHUNK], dtype="<u8")) for at in range(0, len(raw), CHUNK))


def _sums(words: Any) -> ChunkSum:
    plain = weighted = 0
    index = np.arange(1, _BLOCK + 1, dtype=np.uint64)
    for at in range(0, len(words), _BLOCK):
        part = words[at : at + _BLOCK]
        total = int(part.sum(dtype=np.uint64))
        plain += total
        # sum(w * (at + i)) = at * sum(w) + sum(w * i): the index array is made once.
        weighted += at * total + int((part * index[: len(part)]).sum(dtype=np.uint64))
    return ChunkSum(plain & _MASK, weighted & _MASK)


def first_difference(found: tuple[ChunkSum, ...], expected: tuple[ChunkSum, ...]) -> int | None:
    """Index of the first chunk that differs or is missing on one side, or None."""
    for index in range(max(len(found), len(expected))):
        if found[index : index + 1] != expected[index : index + 1]:
            return index
    return None


def packed(sums: Iterable[ChunkSum]) -> tuple[bytes, ...]:
    """As grants, commits and the ledger carry them in the place of sha256: 16 bytes for each chunk."""
    return tuple(_PACKED.pack(*one) for one in sums)


def unpacked(chunks: Iterable[bytes]) -> tuple[ChunkSum, ...]:
    """Raises WeightsBroken for digests of another kind: they were taken of memory that the CPU reads."""
    held = tuple(chunks)
    if any(len(one) != _PACKED.size for one in held):
        raise WeightsBroken("the digests are not sums of GPU memory", kept="nothing was compared")
    return tuple(ChunkSum(*_PACKED.unpack(one)) for one in held)
