"""The router's heart as a front in a process of its own sees it: one DEALER socket to the router's ``FrontDoor``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from belayer.errors import BadMessage, from_code
from belayer.messages.common import ErrorReply
from belayerd.router import events as ev
from belayerd.router import front_wire as fw
from belayerd.router.heart import Ears, Known

Abort = Callable[[Sequence[str] | None], Awaitable[int]]  # ends requests here; how many
K = TypeVar("K")
_sorry: msgspec.msgpack.Decoder[ErrorReply] = msgspec.msgpack.Decoder(ErrorReply)


class Told(Counter[K]):
    """A counter whose growth the router is told at once: it counts for all fronts."""

    def __init__(self, tell: Callable[[K, int], None]) -> None:
        super().__init__()
        self._tell: Callable[[K, int], None] = tell

    def __setitem__(self, key: K, value: int) -> None:
        grown = value - self[key]
        super().__setitem__(key, value)
        self._tell(key, grown)


class RemoteHeart:
    """Make it inside the running event loop; ``greet``, then ``read`` in a task of its own, and ``close``."""

    def __init__(self, path: Path, identity: bytes, codec: Any, ears: Ears, abort: Abort) -> None:
        self._codec, self._ears, self._abort = codec, ears, abort
        self.declined: Counter[str] = Told(lambda reason, grown: self._count({reason: grown}, {}))
        self.mistakes: Counter[int] = Told(lambda status, grown: self._count({}, {status: grown}))
        self._asked: dict[bytes, asyncio.Future[tuple[bytes, Sequence[Any]]]] = {}
        self._number = 0
        self._sends: set[Awaitable[Any]] = set()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # What is said last (aborts, at SIGTERM) still goes out; the router has died or reads on.
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.ROUTING_ID, identity)
        self._socket.connect(f"ipc://{path}")

    # -- the heart --------------------------------------------------------------------------------------------

    def add(self, event: ev.Add) -> None:
        self._send([b"add", fw.pack(event)])

    def abort(self, request_ids: Iterable[str], left: bool = True) -> None:
        self._send([b"abort", fw.pack(tuple(request_ids)), fw.pack(left)])

    async def full(self) -> bool:
        return bool((await self._ask(fw.Full()))[0])

    async def admit(self, place: str, count: int) -> bool:
        return bool((await self._ask(fw.Admit(place, count)))[0])

    def leave(self, place: str) -> None:
        self._send([b"leave", place.encode()])

    async def known(self, names: Sequence[str]) -> Known:
        return msgspec.convert((await self._ask(fw.KnownId(tuple(names))))[0], Known)

    async def serving(self, slot: str) -> bool:
        return bool((await self._ask(fw.Serving(slot)))[0])

    async def slots(self, within_s: float, slot: str) -> list[str]:
        return list((await self._ask(fw.Slots(within_s, slot)))[0])

    async def call(self, slot: str, call_id: int, frames: Sequence[bytes], within_s: float = 0.0) -> Any:
        _, answer = await self._ask(fw.Call(slot, call_id, within_s), frames)
        return self._codec.decode(answer).utility_output

    async def pausing(self, slots: Sequence[str], paused: bool) -> None:
        await self._ask(fw.Pausing(tuple(slots), paused))

    # -- only of several fronts -------------------------------------------------------------------------------

    async def scrape(self) -> bytes:
        """The router's own metrics, as text."""
        return bytes((await self._ask(fw.Scrape()))[0])

    async def abort_elsewhere(self, names: Sequence[str] | None) -> int:
        return int((await self._ask(fw.AbortElsewhere(None if names is None else tuple(names))))[0])

    def serves(self) -> None:
        """This front answers on its ports."""
        self._send([b"serving"])

    # -- the socket -------------------------------------------------------------------------------------------

    async def greet(self) -> None:
        """Wait for the router's word, and take what the first worker said of itself, if there was one."""
        self._send([b"hello"])
        kind, *rest = await self._socket.recv_multipart()
        if kind != b"welcome":
            raise BadMessage(f"the router answered the hello with {kind[:16]!r}")
        for ready in rest:
            self._ears.ready(ready)

    async def read(self) -> None:
        """Until cancelled. What the router says cannot be wrong while this front is whole: it raises BadMessage."""
        async with asyncio.TaskGroup() as group:  # an abort that breaks ends this front: another one waits for its word
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                kind, rest = frames[0].bytes, frames[1:]
                try:
                    self._hear(kind, rest, group)
                except fw.UNREADABLE as why:
                    raise BadMessage(f"the router sent a message {kind[:16]!r} that cannot be read: {why}") from why
                await asyncio.sleep(0)  # as a link does: who writes to the clients has its turn between two messages

    def _hear(self, kind: bytes, rest: Sequence[Any], group: asyncio.TaskGroup) -> None:
        match kind:
            case b"out":
                slot, generation = msgspec.msgpack.decode(rest[0].buffer, type=tuple[str, int])
                self._ears.deliver(slot, generation, self._codec.decode(rest[1:]))
            case b"answer" | b"sorry":
                future = self._asked.pop(rest[0].bytes, None)
                if future is not None and not future.done():
                    future.set_result((kind, rest[1:]))
            case b"beat":
                self._send([b"heard", rest[0].bytes])
            case b"replay":
                self._ears.replay(fw.read_replay(rest[0].buffer))
            case b"cut":
                self._ears.cut(rest[0].bytes.decode())
            case b"fail":
                failed = fw.failures.decode(rest[0].buffer)
                (self._ears.refuse if failed.refused else self._ears.fail)(failed.reader, failed.error())
            case b"ready":
                self._ears.ready(rest[0].bytes)
            case b"abort":
                names = msgspec.msgpack.decode(rest[1].buffer, type=tuple[str, ...] | None)
                group.create_task(self._end(rest[0].bytes, names))
            case _:
                raise ValueError("no such kind")

    async def _end(self, number: bytes, names: Sequence[str] | None) -> None:
        self._send([b"aborted", number, fw.pack(await self._abort(names))])

    async def _ask(self, question: fw.Question, frames: Sequence[bytes] = ()) -> tuple[Any, Sequence[Any]]:
        """No deadline: the router answers, or dies, and this process with it."""
        self._number += 1
        number = self._number.to_bytes(8, "little")
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send([b"ask", number, fw.pack(question), *frames])
        try:
            kind, rest = await future
        finally:
            self._asked.pop(number, None)
        if kind == b"sorry":
            said = _sorry.decode(rest[0].buffer)
            raise from_code(said.code, said.message, said.kept, said.remedy)
        return msgspec.msgpack.decode(rest[0].buffer), rest[1:]

    def _count(self, declined: dict[str, int], mistakes: dict[int, int]) -> None:
        self._send([b"count", fw.pack(declined), fw.pack(mistakes)])

    def _send(self, frames: Sequence[bytes]) -> None:
        sent = asyncio.ensure_future(self._socket.send_multipart(frames))
        if not sent.done():
            self._sends.add(sent)
            sent.add_done_callback(self._sends.discard)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
