"""What a front in a process of its own and the router say to each other: ipc ZeroMQ below run/, MessagePack frames.

front -> router   hello | serving | add, Add | abort, ids, left | ask, number, Question, frames.. | heard, bytes |
                  count, {declined}, {mistakes} | aborted, number, how many | leave, place
router -> front   welcome, ready info | ready, ready info | out, (slot, generation), outputs.. | replay, Replay |
                  cut, reader | fail, Failed | answer, number, value, frames.. | sorry, number, ErrorReply |
                  beat, bytes | abort, number, names

Order is kept in each direction. ``beat`` carries how many bytes the router has sent, ``heard`` gives them back: what
lies between is what a front has not read yet.
"""

from __future__ import annotations

from typing import Any

import msgspec

from belayer.errors import BelayerError, from_code
from belayerd.router import events as ev
from belayerd.router.records import Span

pack = msgspec.msgpack.encode


class Question(msgspec.Struct, frozen=True, tag=True):
    """Answered by one value, or an error by its code."""


class Full(Question, frozen=True, tag=True):
    pass


class Admit(Question, frozen=True, tag=True):
    place: str
    count: int


class KnownId(Question, frozen=True, tag=True):
    names: tuple[str, ...]


class Serving(Question, frozen=True, tag=True):
    slot: str


class Slots(Question, frozen=True, tag=True):
    within_s: float
    slot: str


class Call(Question, frozen=True, tag=True):
    """Its frames follow; the answer's frames are EngineCoreOutputs with the utility output."""

    slot: str
    call_id: int
    within_s: float = 0.0


class Pausing(Question, frozen=True, tag=True):
    slots: tuple[str, ...]
    paused: bool


class Scrape(Question, frozen=True, tag=True):
    """The router's own metrics, as text."""


class AbortElsewhere(Question, frozen=True, tag=True):
    """End requests at all other fronts, by the ids of their clients (None: all). Answered by how many, once done."""

    names: tuple[str, ...] | None


class Failed(msgspec.Struct, frozen=True):
    """``refused``: it was never taken."""

    reader: str
    code: str
    message: str
    kept: str = ""
    remedy: str = ""
    refused: bool = False

    @classmethod
    def of(cls, reader: str, error: BelayerError, refused: bool) -> Failed:
        return cls(reader, str(error.code), error.message, error.kept, error.remedy, refused)

    def error(self) -> BelayerError:
        return from_code(self.code, self.message, self.kept, self.remedy)


questions: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Full | Admit | KnownId | Serving | Slots | Call | Pausing | Scrape | AbortElsewhere
)
_adds: msgspec.msgpack.Decoder[ev.Add] = msgspec.msgpack.Decoder(ev.Add)
_replays: msgspec.msgpack.Decoder[ev.Replay] = msgspec.msgpack.Decoder(ev.Replay)
failures: msgspec.msgpack.Decoder[Failed] = msgspec.msgpack.Decoder(Failed)
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError, IndexError)


def read_add(data: bytes) -> ev.Add:
    return _adds.decode(data)


def read_replay(data: bytes) -> ev.Replay:
    told = _replays.decode(data)
    return msgspec.structs.replace(told, spans=tuple(Span(*span) for span in told.spans))
