"""Reading the journal back: whole records of each segment, put together to one story per request."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import msgpack
import msgspec

from belayerd.router.events import OnDeath, Stop
from belayerd.router.journal import VERSION, Add, Finish, Head, Record, Tokens, segments
from belayerd.router.records import Past, Span, cost

_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class Story(msgspec.Struct):
    """What the journal knows of one request. ``reason`` "" while it had no end; ``spans`` as ``records.Span``."""

    request_id: str
    external_id: str
    frames: tuple[bytes, ...]
    added: float
    name: str = ""
    digest: bytes = b""
    eager: bool = False
    on_death: str = ""
    tokens: list[int] = []
    rows: list[tuple[int, bytes]] = []
    spans: list[tuple[int, str, int, str, str]] = []
    reason: str = ""
    stop: Stop = None

    def past(self) -> Past:
        return Past(
            request_id=self.request_id,
            external_id=self.external_id,
            name=self.name,
            digest=self.digest,
            frames=self.frames,
            tokens=tuple(self.tokens),
            rows=tuple(self.rows),
            spans=tuple(Span(*span) for span in self.spans),
            reason=self.reason,
            stop=self.stop,
            eager=self.eager,
            on_death=OnDeath(self.on_death) if self.on_death else None,
        )

    def size(self) -> int:
        """About what it costs to keep."""
        return cost(self.tokens, self.rows, self.frames)


class Reading(msgspec.Struct):
    """All stories, in the order in which they ended (the live ones last); ``damage`` names each segment that broke off
    and where."""

    stories: dict[str, Story]
    damage: list[str]


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
            record = _decoder.decode(data)
            if isinstance(record, Head) and record.version != VERSION:
                raise ValueError(f"written in form {record.version}, this router reads {VERSION}")
            return record
    raise ValueError("checksum differs")


def read(folder: Path, named_only: bool = False, keep_bytes: int | None = None) -> Reading:
    """Put the segments of a folder together. A later record of a request wins over an earlier one. Bounds on memory at
    start: ``named_only`` forgets ended requests that nobody can ask for as soon as their end is read; ``keep_bytes``
    the first of those that have ended, when all of them would be more than may be kept (``Archive``)."""
    reading = Reading(stories={}, damage=[])
    if not folder.is_dir():
        return reading
    live: dict[str, Story] = {}
    ended = Ended(keep_bytes)
    for path in segments(folder):
        for record in records(path, reading.damage):
            _tell(live, ended, record, named_only)
    reading.stories = ended.stories | live
    return reading


class Ended:
    """Stories in the order of their ends, of at most so many bytes (None: all)."""

    def __init__(self, keep_bytes: int | None) -> None:
        self.stories: dict[str, Story] = {}
        self._keep_bytes, self._bytes = keep_bytes, 0

    def put(self, story: Story) -> None:
        self.take(story.request_id)
        self.stories[story.request_id] = story
        self._bytes += story.size()
        while self._keep_bytes is not None and self._bytes > self._keep_bytes:
            self.take(next(iter(self.stories)))

    def take(self, request_id: str) -> None:
        story = self.stories.pop(request_id, None)
        if story is not None:
            self._bytes -= story.size()


def _tell(live: dict[str, Story], ended: Ended, record: Record, named_only: bool) -> None:
    if isinstance(record, Add):
        ended.take(record.request_id)
        if record.request_id in live:
            return  # told again where a segment begins: should that beginning be torn, what is known stays known
        live[record.request_id] = Story(
            request_id=record.request_id,
            external_id=record.external_id,
            frames=record.frames,
            added=record.wall,
            name=record.name,
            digest=record.digest,
            eager=record.eager,
            on_death=record.on_death,
        )
    elif isinstance(record, Tokens) and (story := live.get(record.request_id)) is not None:
        _put(story, record)
    elif isinstance(record, Finish) and (story := live.pop(record.request_id, None)) is not None:
        story.reason, story.stop = record.reason, record.stop
        if record.length != len(story.tokens):
            story.reason = "error:incomplete"  # a block of it was lost: it may be continued, not told again
        if story.name or not named_only:
            ended.put(story)


def _put(story: Story, record: Tokens) -> None:
    if record.start > len(story.tokens):
        return  # a block before it was lost with a trimmed or damaged segment: never splice
    if story.tokens[record.start : record.start + len(record.tokens)] == list(record.tokens):
        return  # told again where a segment begins
    del story.tokens[record.start :]
    story.tokens.extend(record.tokens)
    story.rows = [row for row in story.rows if row[0] < record.start] + list(record.rows)
    story.spans = [span for span in story.spans if span[0] < record.start]
    maker = (record.slot, record.generation, record.weight_version, record.weights_digest)
    if not story.spans or story.spans[-1][1:] != maker:
        story.spans.append((record.start, *maker))
