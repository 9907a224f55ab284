"""Every token on disk: append-only MessagePack segments under ``state/journal``.

A segment is a row of ``[crc32, bytes]`` pairs; the bytes are one MessagePack record (``Add``, ``Tokens``,
``Finish``, tagged arrays). A router that is killed leaves at most a torn last pair, which a streaming reader does not
yield; a pair whose checksum differs ends the reading of that segment and is reported. Each life of a router starts
its own segment, so nothing is ever written after a torn tail.

A new segment begins with all live requests, so that the oldest segments can be deleted at any time without losing
one; what is lost by the size cap is requests that have ended. Writes go to the page cache without fsync: they
survive the death of every process, not a power cut.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgpack
import msgspec

from belayer import clock

VERSION = 1
SUFFIX = ".mpk"


class Head(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First record of a segment."""

    version: int
    instance: str
    wall: float


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request as the engine gets it: ``frames`` are the encoded EngineCoreRequest. ``external_id`` is the
    client's own id, by which it may ask for the rest of its stream after a restart of the router."""

    request_id: str
    external_id: str
    frames: tuple[bytes, ...]
    wall: float


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tokens from position ``start``, made by one worker with one weight version. A block that starts below the
    end of what is known replaces it from there. ``logprobs``: encoded logprob rows, where they were kept."""

    request_id: str
    start: int
    tokens: tuple[int, ...]
    slot: str
    generation: int
    weight_version: str
    logprobs: bytes | None = None


class Finish(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The one end: vLLM's finish reason, "abort", or "error:<code>"; ``length`` tokens in all."""

    request_id: str
    reason: str
    length: int
    wall: float


Record = Head | Add | Tokens | Finish

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def _pair(record: Record) -> bytes:
    data = _encoder.encode(record)
    return _encoder.encode((zlib.crc32(data), data))


class Journal:
    """The writer of one router life.

    ``live``: the records that a new segment begins with. A write that fails (disk full) is counted and closes the
    segment; the next append tries a new one, so that streams never wait for a disk.
    """

    def __init__(self, folder: Path, instance: str, max_bytes: int, live: Callable[[], Iterable[Record]]) -> None:
        self._folder, self._instance, self._live = folder, instance, live
        self._max_bytes = max_bytes
        self._segment_bytes = max(max_bytes // 8, 4096)
        self._fd = -1
        self._size = 0
        self._number = 0
        self.failures = 0
        self.bytes_total = 0
        self.last_error = ""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def append(self, records: list[Record]) -> None:
        """Write all records with one system call. Never raises for a bad disk: see ``failures``."""
        if not records:
            return
        try:
            if self._fd < 0 or self._size >= self._segment_bytes:
                self._rotate()
            self._write(b"".join(map(_pair, records)))
        except OSError as why:
            self.failures += 1
            self.last_error = f"{self._folder}: {why.strerror}"
            self.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.write(self._fd, view)
            view = view[done:]
        self._size += len(data)
        self.bytes_total += len(data)

    def _rotate(self) -> None:
        self.close()
        self._number += 1
        name = f"{int(clock.wall() * 1e3):015d}-{self._instance}-{self._number:06d}{SUFFIX}"
        self._fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._size = 0
        head = Head(VERSION, self._instance, clock.wall())
        self._write(b"".join(map(_pair, [head, *self._live()])))
        self._trim(keep=name)

    def _trim(self, keep: str) -> None:
        """Delete the oldest segments until the rest and one full new segment fit under the cap."""
        rows = [(path, path.stat().st_size) for path in segments(self._folder) if path.name != keep]
        total = sum(size for _, size in rows) + max(self._segment_bytes, self._size)
        for path, size in rows:
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Story(msgspec.Struct):
    """What the journal knows of one request. ``reason`` "" while it had no end."""

    request_id: str
    external_id: str
    frames: tuple[bytes, ...]
    added: float
    tokens: list[int]
    spans: list[tuple[int, str, int, str]]
    reason: str = ""


class Reading(msgspec.Struct):
    """All stories in order of their first record; ``damage`` names each segment that broke off and where."""

    stories: dict[str, Story]
    damage: list[str]


def segments(folder: Path) -> list[Path]:
    """Oldest first: names begin with the wall-clock time of their creation."""
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)


def records(path: Path, damage: list[str] | None = None) -> Iterator[Record]:
    """The whole records of one segment. A torn tail is left out in silence, a damaged pair is appended to
    ``damage`` and ends the segment."""
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, raw=True, max_buffer_size=1 << 30)
        while True:
            try:
                pair = next(unpacker, None)
                if pair is None:
                    return
                yield _checked(pair)
            except (ValueError, msgpack.UnpackException, msgspec.DecodeError) as why:
                if damage is not None:
                    damage.append(f"{path.name} near byte {unpacker.tell()}: {why or type(why).__name__}")
                return


def _checked(pair: object) -> Record:
    match pair:
        case [int(crc), bytes(data)] if zlib.crc32(data) == crc:
            return _decoder.decode(data)
    raise ValueError("checksum differs")


def read(folder: Path) -> Reading:
    """Put the segments of a folder together. A later record of a request wins over an earlier one."""
    reading = Reading(stories={}, damage=[])
    for path in segments(folder):
        for record in records(path, reading.damage):
            _tell(reading.stories, record)
    return reading


def _tell(stories: dict[str, Story], record: Record) -> None:
    if isinstance(record, Add):
        stories[record.request_id] = Story(
            request_id=record.request_id,
            external_id=record.external_id,
            frames=record.frames,
            added=record.wall,
            tokens=[],
            spans=[],
        )
    elif isinstance(record, Tokens) and (story := stories.get(record.request_id)) is not None:
        if record.start > len(story.tokens):
            return  # a block before it was lost with a trimmed or damaged segment: never splice
        del story.tokens[record.start :]
        story.tokens.extend(record.tokens)
        story.spans = [span for span in story.spans if span[0] < record.start]
        maker = (record.slot, record.generation, record.weight_version)
        if not story.spans or story.spans[-1][1:] != maker:
            story.spans.append((record.start, *maker))
    elif isinstance(record, Finish) and (story := stories.get(record.request_id)) is not None:
        story.reason = record.reason
