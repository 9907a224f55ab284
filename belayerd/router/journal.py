"""Every token on disk: append-only MessagePack segments under ``state/journal``.

A segment is a row of ``[crc32, bytes]`` pairs; the bytes are one MessagePack record (``Add``, ``Tokens``,
``Finish``, tagged arrays). A router that is killed leaves at most a torn last pair, which a streaming reader does not
yield; a pair whose checksum differs ends the reading of that segment and is reported. Each life of a router starts
its own segment, so nothing is ever written after a torn tail.

A new segment begins with all live requests, so that the oldest segments can be deleted at any time without losing
one; what is lost by the size cap is requests that have ended. Without fsync, writes survive the death of every
process, not a power cut; ``sync`` says when the disk is waited for.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from belayer import clock
from belayerd.router.events import Rows, Stop

VERSION = 2
SUFFIX = ".mpk"
MOST_SEGMENTS = 512  # eight or so in a life; more are of many short lives, and all are read at the next start


class Head(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First record of a segment."""

    version: int
    instance: str
    wall: float


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request as the engine gets it: ``frames`` are the encoded EngineCoreRequest. ``external_id`` is the
    front end's word for it. ``name``: the client's own id, by which it may ask for the rest of its stream ("": it gave
    none); ``digest`` is over what decides the answer."""

    request_id: str
    external_id: str
    frames: tuple[bytes, ...]
    wall: float
    name: str = ""
    digest: bytes = b""
    eager: bool = False
    on_death: str = ""


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tokens from position ``start``, made by one worker with one weight version. A block that starts below the
    end of what is known replaces it from there. ``rows``: (position, encoded output) of what is more than tokens.
    ``weights_digest``: of the bytes of that version, "" when that was not known."""

    request_id: str
    start: int
    tokens: tuple[int, ...]
    slot: str
    generation: int
    weight_version: str
    rows: Rows = ()
    weights_digest: str = ""


class Finish(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The one end: vLLM's finish reason, "left", "stop_string", "cut", or "error:<code>"; ``length`` tokens in all."""

    request_id: str
    reason: str
    length: int
    wall: float
    stop: Stop = None


Record = Head | Add | Tokens | Finish
Sync = Literal["never", "finish", "always"]

_encoder = msgspec.msgpack.Encoder()


def _pair(record: Record) -> bytes:
    data = _encoder.encode(record)
    return _encoder.encode((zlib.crc32(data), data))


class Journal:
    """The writer of one router life.

    ``live``: the records that a new segment begins with; however many they are, a segment takes as much again as its
    share of ``max_bytes`` before the next one. A write that fails (disk full) is counted and taken back; the next
    append tells all live requests again in the same segment, so that streams never end for a disk, and a full one does
    not fill with segments. ``sync``: "finish" waits for the disk before a finish is told, "always" before anything is.
    """

    def __init__(
        self,
        folder: Path,
        instance: str,
        max_bytes: int,
        live: Callable[[], Iterable[Record]],
        sync: Sync = "never",
    ) -> None:
        self._folder, self._instance, self._live, self._sync = folder, instance, live, sync
        self._max_bytes = max_bytes
        self._segment_bytes = max(max_bytes // 8, 4096)
        self._fd = -1
        self._behind = False  # the open segment lacks something of a live request
        self._size = self._head = 0  # bytes of the open segment, and of the live requests at its beginning
        self._number = 0
        self.failures = 0
        self.syncs = 0
        self.bytes_total = 0
        self.last_error = ""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._stamp = 1 + max(map(_stamp_of, segments(folder)), default=-1)

    def append(self, records: list[Record]) -> None:
        """Write all records with one system call. Never raises for a bad disk: see ``failures``."""
        if not records:
            return
        try:
            if self._fd < 0 or self._size - self._head >= self._segment_bytes:
                self._rotate()
            self._write(records)
            if self._sync == "always" or (self._sync == "finish" and any(isinstance(r, Finish) for r in records)):
                self._wait()
        except OSError as why:
            self.failures += 1
            self.last_error = f"{self._folder}: {why.strerror}"
            self._behind = True

    def _write(self, records: Iterable[Record]) -> None:
        """All of them or, when the disk does not take it all, nothing."""
        again = self._live() if self._behind else ()
        start = self._size
        try:
            self._put([*again, *records])
        except OSError:
            self._cut(start)
            raise
        self._behind = False

    def _wait(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError:
            self.close()  # nobody knows what of it is on the disk: the next append begins a new one
            raise
        self.syncs += 1

    def _put(self, records: Iterable[Record]) -> None:
        view = memoryview(b"".join(map(_pair, records)))
        size = len(view)
        while view:
            done = os.write(self._fd, view)
            view = view[done:]
        self._size += size
        self.bytes_total += size

    def _cut(self, size: int) -> None:
        """Take back what was written in part: nothing may follow a torn record."""
        try:
            os.ftruncate(self._fd, size)
        except OSError:
            self.close()

    def _rotate(self) -> None:
        self.close()
        self._number += 1
        self._stamp = max(self._stamp, int(clock.wall() * 1e3))  # a clock that was set back must not reorder segments
        path = self._folder / f"{self._stamp:015d}-{self._instance}-{self._number:06d}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd, self._size = os.open(path, flags, 0o600), 0
        head = Head(VERSION, self._instance, clock.wall())
        try:
            self._put([head, *self._live()])
        except OSError:
            self.close()
            path.unlink()  # the next append tries again: a full disk must not fill with beginnings
            raise
        self._head, self._behind = self._size, False  # all that is live has been told
        self._trim(keep=path.name)

    def _trim(self, keep: str) -> None:
        """Delete the oldest segments until the rest and one full new segment fit under the caps."""
        rows = [(path, path.stat().st_size) for path in segments(self._folder) if path.name != keep]
        total = sum(size for _, size in rows) + self._head + self._segment_bytes
        for at, (path, size) in enumerate(rows):
            if total <= self._max_bytes and len(rows) - at < MOST_SEGMENTS:
                return
            path.unlink(missing_ok=True)
            total -= size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _stamp_of(path: Path) -> int:
    stamp = path.name.partition("-")[0]
    return int(stamp) if stamp.isdecimal() else -1


def segments(folder: Path) -> list[Path]:
    """Oldest first: names begin with the wall-clock time of their creation, and never with less than those before."""
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
