"""Where the fronts of this router are heard and told: one ROUTER socket, each front's readers, each front's backlog.

A front that is stopped or too slow holds nobody else: what it has not read is counted, and one that leaves too much
unread, or does not answer for too long, is to be killed. Its readers are lost then, like those of any dead front.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from belayer.clock import Stopwatch
from belayer.errors import BelayerError, Refused
from belayer.lastwords import words_of
from belayer.rpc import to_reply
from belayerd.router import events as ev
from belayerd.router import front_wire as fw
from belayerd.router.front_lives import LetGo
from belayerd.router.local_heart import LocalHeart

BEAT_S = 0.5
START_S = 300.0  # from its fork until a front serves: a second or two, over 70 where a host is ten times too busy
MOST_UNREAD = 256 << 20  # bytes; beyond what keep_finished_mb may make one answer big
_words: msgspec.msgpack.Decoder[tuple[str, ...]] = msgspec.msgpack.Decoder(tuple[str, ...])
_numbers: msgspec.msgpack.Decoder[int] = msgspec.msgpack.Decoder(int)
_reasons: msgspec.msgpack.Decoder[dict[str, int]] = msgspec.msgpack.Decoder(dict[str, int])
_statuses: msgspec.msgpack.Decoder[dict[int, int]] = msgspec.msgpack.Decoder(dict[int, int])


@dataclass
class Side:
    """One life of one front. ``sent``, ``read``: bytes. ``beats``: without an answer, or since its birth until it
    serves. They are counted, not timed: a router that stood still itself must not blame its fronts."""

    number: int
    pid: int = 0  # until the zygote has said it
    sent: int = 0
    read: int = 0
    beats: int = 0
    serving: bool = False
    added: int = 0
    given_up: bool = False
    why: str = ""  # it was given up
    places: set[str] = field(default_factory=set)  # kept for requests that it has let in and not given yet
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    aborting: dict[int, asyncio.Future[int]] = field(default_factory=dict)  # how many it has ended, by question


class FrontDoor:
    """Make it inside the running event loop; ``serve`` until cancelled, then ``close``. ``serves`` is called with the
    identity of a front once it answers, ``give_up`` with that of one that is to be killed, once; ``scrape`` gives the
    router's own metrics."""

    def __init__(
        self, path: Path, heart: LocalHeart, codec: Any, silence_s: float, log: Any, most_unread: int = MOST_UNREAD
    ) -> None:
        self._heart, self._codec, self._silence_s, self._log = heart, codec, silence_s, log
        self._most_unread = most_unread
        self.sides: dict[bytes, Side] = {}
        self._readers: dict[str, bytes] = {}  # reader -> identity of its front
        self.changed = asyncio.Event()  # a front serves
        self.serves: Callable[[bytes], None] = lambda identity: None
        self.give_up: Callable[[bytes], None] = lambda identity: None
        self.scrape: Callable[[], bytes] = lambda: b""
        self._number = 0
        self._sends: set[Awaitable[Any]] = set()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)  # bounded by what is unread, which zmq does not tell
        self._socket.set(zmq.RCVHWM, 0)
        self._path = path
        path.unlink(missing_ok=True)
        old = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{path}")
        finally:
            os.umask(old)

    def expect(self, identity: bytes, number: int) -> Side:
        """A life of a front begins; what others say is dropped."""
        side = self.sides[identity] = Side(number)
        return side

    def streams(self) -> Counter[bytes]:
        """How many requests each front hears."""
        return Counter(self._readers.values())

    def lost(self, identity: bytes) -> LetGo:
        """It has been seen dead."""
        side, watch, ended = self.sides.pop(identity), Stopwatch(), 0
        for task in side.tasks:
            task.cancel()
        for future in side.aborting.values():
            if not future.done():
                future.set_result(0)
        for place in side.places:
            self._heart.leave(place)
        readers = [reader for reader, front in self._readers.items() if front == identity]
        for reader in readers:
            del self._readers[reader]
        if readers:
            self._log.warning("front_readers_lost", front=side.number, pid=side.pid, requests=len(readers))
            ended = self._heart.front_lost(readers)
        return LetGo(len(readers), ended, watch.ms())

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            while True:
                identity, *frames = await self._socket.recv_multipart()
                side = self.sides.get(identity)
                if side is None or side.given_up or not frames:
                    continue  # a dead life, whose readers are lost already
                try:
                    self._hear(identity, side, frames[0], frames[1:])
                except fw.UNREADABLE as why:
                    self._give_up(identity, side, f"it sent a message {frames[0][:16]!r} that cannot be read: {why}")

    def close(self) -> None:
        for side in self.sides.values():
            for task in side.tasks:
                task.cancel()
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)

    # -- from fronts ------------------------------------------------------------------------------------------

    def _hear(self, identity: bytes, side: Side, kind: bytes, rest: Sequence[bytes]) -> None:
        match kind:
            case b"add":
                self._add(identity, side, fw.read_add(rest[0]))
            case b"abort":
                left = bool(msgspec.msgpack.decode(rest[1], type=bool))
                ids = [reader for reader in _words.decode(rest[0]) if self._readers.get(reader) == identity]
                for reader in ids:
                    del self._readers[reader]
                self._heart.abort(ids, left)
            case b"ask":
                question = fw.questions.decode(rest[1])
                self._run(identity, side, self._answer(identity, rest[0], question, rest[2:]))
            case b"heard":
                side.read, side.beats = _numbers.decode(rest[0]), 0
            case b"count":
                self._heart.declined.update(_reasons.decode(rest[0]))
                self._heart.mistakes.update(_statuses.decode(rest[1]))
            case b"leave":
                place = rest[0].decode()
                side.places.discard(place)
                self._heart.leave(place)
            case b"aborted":
                future = side.aborting.get(_numbers.decode(rest[0]))
                if future is not None and not future.done():
                    future.set_result(_numbers.decode(rest[1]))
            case b"hello":
                ready = self._heart.first_ready
                self._send(identity, [b"welcome", *([] if ready is None else [ready])])
            case b"serving":
                side.serving, side.beats = True, 0
                self._log.info("front_serves", front=side.number, pid=side.pid)
                self.serves(identity)
                self.changed.set()
            case _:
                raise ValueError("no such kind")

    def _add(self, identity: bytes, side: Side, event: ev.Add) -> None:
        if event.request_id in self._readers:  # vLLM's random suffix has met itself: the other one is not disturbed
            error = Refused(f"request {event.request_id} is already running", remedy="send it again")
            self._send(identity, [b"fail", fw.pack(fw.Failed.of(event.request_id, error, True))])
            return
        side.added += 1
        self._readers[event.request_id] = identity
        self._heart.add(event)
        if not self._heart.holds(event.place):
            side.places.discard(event.place)

    def _run(self, identity: bytes, side: Side, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        side.tasks.add(task)
        task.add_done_callback(lambda done: self._answered(identity, side, done))

    def _answered(self, identity: bytes, side: Side, task: asyncio.Task[None]) -> None:
        """A front waits for its answer without a deadline, so one that cannot be given must not be passed over."""
        side.tasks.discard(task)
        why = None if task.cancelled() else task.exception()
        if why is not None and not side.given_up:
            self._give_up(identity, side, f"its question could not be answered: {words_of(why)}")

    async def _answer(self, identity: bytes, number: bytes, question: Any, frames: Sequence[bytes]) -> None:
        more: Sequence[bytes] = ()
        try:
            value = await self._value(identity, question, frames)
        except BelayerError as error:
            self._send(identity, [b"sorry", number, fw.pack(to_reply(error))])
            return
        if isinstance(question, fw.Call):
            value, more = None, self._codec.encode(self._codec.utility(value))
        self._send(identity, [b"answer", number, fw.pack(value), *more])

    async def _value(self, identity: bytes, question: Any, frames: Sequence[bytes]) -> Any:
        match question:
            case fw.Full():
                return await self._heart.full()
            case fw.Admit():
                return await self._admit(identity, question)
            case fw.KnownId():
                return await self._heart.known(question.names)
            case fw.Serving():
                return await self._heart.serving(question.slot)
            case fw.Slots():
                return await self._heart.slots(question.within_s, question.slot)
            case fw.Call():
                return await self._heart.call(question.slot, question.call_id, frames, question.within_s)
            case fw.Pausing():
                return await self._heart.pausing(question.slots, question.paused)
            case fw.Scrape():
                return self.scrape()
            case fw.AbortElsewhere():
                return await self._abort_elsewhere(identity, question.names)

    async def _admit(self, identity: bytes, asked: fw.Admit) -> bool:
        if identity not in self.sides or not await self._heart.admit(asked.place, asked.count):
            return False
        self.sides[identity].places.add(asked.place)  # nothing has run between: a local heart does not wait
        return True

    async def _abort_elsewhere(self, asking: bytes, names: Sequence[str] | None) -> int:
        """A front that dies meanwhile has ended all of its own; see ``lost``."""
        others = [one for one, side in self.sides.items() if one != asking and side.serving and not side.given_up]
        self._number += 1
        number = self._number
        waiting = []
        for identity in others:
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self.sides[identity].aborting[number] = future
            waiting.append(future)
            self._send(identity, [b"abort", fw.pack(number), fw.pack(names)])
        try:
            return sum(await asyncio.gather(*waiting))
        finally:
            for identity in others:
                if identity in self.sides:
                    del self.sides[identity].aborting[number]

    # -- to fronts --------------------------------------------------------------------------------------------

    def deliver(self, slot: str, generation: int, outputs: Any) -> None:
        """Each front gets the rows of its readers; statistics of the engine go to one front, or their sum over all
        would count them several times."""
        rows: dict[bytes, list[Any]] = {}
        for row in outputs.outputs:
            front = self._readers.get(row.request_id)
            if front is None:
                continue
            if row.finish_reason is not None:
                del self._readers[row.request_id]
            rows.setdefault(front, []).append(row)
        counts = self._counting() if outputs.scheduler_stats is not None else None
        if counts is not None:
            rows.setdefault(counts, [])
        head = fw.pack((slot, generation))
        for front, mine in rows.items():
            part = copy.copy(outputs)
            part.outputs = mine
            part.scheduler_stats = outputs.scheduler_stats if front == counts else None
            self._send(front, [b"out", head, *self._codec.encode(part)])

    def _counting(self) -> bytes | None:
        serving = [(side.number, one) for one, side in self.sides.items() if side.serving and not side.given_up]
        return min(serving)[1] if serving else None

    def _to_reader(self, reader: str, frames: Sequence[bytes], ends: bool) -> None:
        front = self._readers.get(reader)
        if front is None:
            return
        if ends:
            del self._readers[reader]
        self._send(front, frames)

    def replay(self, told: ev.Replay) -> None:
        self._to_reader(told.reader, [b"replay", fw.pack(told)], bool(told.finish))

    def cut(self, reader: str) -> None:
        self._to_reader(reader, [b"cut", reader.encode()], True)

    def fail(self, reader: str, error: BelayerError) -> None:
        self._to_reader(reader, [b"fail", fw.pack(fw.Failed.of(reader, error, False))], True)

    def refuse(self, reader: str, error: BelayerError) -> None:
        self._to_reader(reader, [b"fail", fw.pack(fw.Failed.of(reader, error, True))], True)

    def ready(self, payload: bytes) -> None:
        self._codec.check_ready(payload)
        for identity in list(self.sides):
            self._send(identity, [b"ready", payload])

    def _send(self, identity: bytes, frames: Sequence[bytes]) -> None:
        side = self.sides.get(identity)
        if side is None or side.given_up:
            return
        side.sent += sum(map(len, frames))
        sent = asyncio.ensure_future(self._socket.send_multipart([identity, *frames]))
        if not sent.done():
            self._sends.add(sent)
            sent.add_done_callback(self._sends.discard)
        if side.sent - side.read > self._most_unread:
            self._give_up(identity, side, f"it left {side.sent - side.read} bytes unread")

    # -- fronts that hear nothing -----------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            for identity, side in list(self.sides.items()):
                if side.given_up:
                    continue
                limit_s, what = (self._silence_s, "answer") if side.serving else (START_S, "serve")
                if side.beats * BEAT_S >= limit_s:
                    self._give_up(identity, side, f"it did not {what} for {limit_s:g} s")
                    continue
                side.beats += 1
                if side.serving:
                    self._send(identity, [b"beat", fw.pack(side.sent)])
            await asyncio.sleep(BEAT_S)

    def _give_up(self, identity: bytes, side: Side, why: str) -> None:
        side.given_up, side.why = True, why
        self._log.error("front_given_up", front=side.number, pid=side.pid, why=why)
        self.give_up(identity)
