"""Which blocks of the arena hold finished KV, written down beside them, so that the next main can go on with them.

A table of 64-byte entries lies behind the KV in the same arena: it outlives a killed main as the KV does, and it is
mapped shared by the lease holder only. Two rules make it true at every instant at which a main may be killed:

* an entry is published only after the step that wrote its block has returned,
* it is invalidated, by one store, before its block may be written again.

An entry that was cut in the middle of its writing has no valid mark or a wrong checksum and does not count. The header
carries the epoch of the lease that kept the table and a fingerprint of everything the bytes depend on. Only the lease
that follows immediately may believe it: a main that did not keep the table leaves an old epoch behind.

What this cannot see is a main that wrote wrong numbers before it died (no checksum covers the KV itself), which is why
reuse is off unless a slot asks for it (``kv_reuse``); the paper flushes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from belayer.errors import Refused

ENTRY, HEADER = 64, 4096  # bytes
_MAGIC = b"BLKLOG01"
_HEAD = struct.Struct("<8sQ32s")  # magic, epoch, fingerprint
_MARK = struct.Struct("<I")  # 1: the rest of the entry counts
_BODY = struct.Struct("<QIH42s")  # weights stamp, tokens up to the end of this block, length of the key, key
_CRC = struct.Struct("<I")
_AT_BODY, _AT_CRC = _MARK.size, _MARK.size + _BODY.size
MAX_KEY = 42  # sha256 and vLLM's four bytes of group id are 36


@dataclass(frozen=True)
class Entry:
    """Block ``block`` holds the KV of the prefix that ends after ``tokens`` tokens and hashes to ``key``."""

    block: int
    key: bytes
    tokens: int


def room(kv_bytes: int) -> int:
    """Bytes of the arena behind ``kv_bytes`` of KV; untouched pages of it cost nothing. A block of KV below 8 KiB
    would not fit, and ``BlockLog`` refuses it."""
    return HEADER + kv_bytes // 128


class BlockLog:
    """``view``: the writable bytes behind the KV. Nothing is read or written before ``open``."""

    def __init__(self, view: Any, blocks: int, fingerprint: bytes) -> None:
        self._view = memoryview(view).cast("B")
        if HEADER + blocks * ENTRY > len(self._view):
            raise Refused(
                f"{blocks} blocks of KV need {HEADER + blocks * ENTRY} bytes of log, there are {len(self._view)}",
                remedy="a larger block_size, or kv_reuse = false for this slot",
            )
        self._blocks, self._fingerprint = blocks, fingerprint
        self.active = False

    def open(self, epoch: int, weights: int) -> list[Entry]:
        """What the lease before ``epoch`` left of the weights ``weights`` (64 bits that name version and digest), as
        far as it may be believed; from now on the log is ours.

        Everything else is cleared before the header says so: killed in between, the next lease finds an epoch that
        is not its predecessor's and believes nothing.
        """
        magic, kept_by, fingerprint = _HEAD.unpack_from(self._view)
        believed = (magic, kept_by, fingerprint) == (_MAGIC, epoch - 1, self._fingerprint)
        found = [entry for entry in map(self._read, range(self._blocks)) if entry is not None] if believed else []
        entries = [entry for entry, of in found if of == weights]
        wanted = {entry.block for entry in entries}
        for block in range(self._blocks):
            if block not in wanted:
                self.invalidate(block)
        _HEAD.pack_into(self._view, 0, _MAGIC, epoch, self._fingerprint)
        self.active = True
        return entries

    def publish(self, entry: Entry, weights: int) -> None:
        """After the step that wrote the block; a key that is too long is left out."""
        if len(entry.key) > MAX_KEY:
            return
        at = HEADER + entry.block * ENTRY
        self.invalidate(entry.block)
        body = _BODY.pack(weights, entry.tokens, len(entry.key), entry.key)
        self._view[at + _AT_BODY : at + _AT_CRC] = body
        _CRC.pack_into(self._view, at + _AT_CRC, crc32(body))
        _MARK.pack_into(self._view, at, 1)

    def invalidate(self, block: int) -> None:
        """Before the block is written again."""
        _MARK.pack_into(self._view, HEADER + block * ENTRY, 0)

    def clear(self) -> None:
        for block in range(self._blocks):
            self.invalidate(block)

    def _read(self, block: int) -> tuple[Entry, int] | None:
        at = HEADER + block * ENTRY
        if _MARK.unpack_from(self._view, at)[0] != 1:
            return None
        body = bytes(self._view[at + _AT_BODY : at + _AT_CRC])
        if crc32(body) != _CRC.unpack_from(self._view, at + _AT_CRC)[0]:
            return None
        weights, tokens, length, key = _BODY.unpack(body)
        return Entry(block, key[:length], tokens), weights
