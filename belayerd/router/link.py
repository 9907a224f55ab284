"""One worker's data-plane socket, from the front's side: a DEALER that greets, sends and is read by one task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from belayer.errors import BadMessage, WorkerGone
from belayer.messages.worker import Stamp
from belayerd.router.events import Item

_stamp: msgspec.msgpack.Decoder[Stamp] = msgspec.msgpack.Decoder(Stamp)

OnOutput = Callable[["Link", Stamp, Sequence[Any]], None]
OnTorn = Callable[["Link", BadMessage], None]
OnBeat = Callable[["Link", "Standing"], None]
Extra = Callable[["Link", Sequence[Any]], None]


class Standing(msgspec.Struct, frozen=True):
    """What a worker says about itself and this front when it is greeted: the number of its next message, the weight
    version that it serves and the digest of its bytes, and how many messages of this link it got, of how many that the
    hello told (-1: it does not count). Less: a request or an abort was lost on the way to it, which nothing else would
    show."""

    seq: int
    weight_version: str = ""
    weights_digest: str = ""
    got: int = -1
    told: int = -1


_standing: msgspec.msgpack.Decoder[Standing] = msgspec.msgpack.Decoder(Standing)


class Link:
    """Connects on construction; ``greet()`` once, then ``read()`` in a task of its own until ``close()``.

    ``token`` names this link among all that this front ever made. A hello with a new token makes the worker drop what
    it runs for earlier ones, so that all that comes after its answer belongs to this link; a hello with the same token
    is only a question whether the link still stands.

    No high-water mark: what is queued is bounded by the live requests, and a dropped message would be a lost token.
    """

    def __init__(
        self, context: zmq.asyncio.Context, slot: str, worker_id: str, endpoint: str, front: int, token: bytes
    ) -> None:
        self.slot, self.worker_id, self._token = slot, worker_id, token
        self.silence_s: float | None = None  # without an answer, until it is given up at once; None: as the shell says
        self.extra: dict[bytes, Extra] = {}  # readers of other kinds of messages
        self._context, self._endpoint, self._front = context, endpoint, front
        self._socket = self._connected()
        self._reader: asyncio.Task[None] | None = None
        self._sends: set[Awaitable[Any]] = set()
        self._said = 0  # messages to the worker, hellos apart
        self.asked = 0  # hellos without an answer
        self.renewed = 0  # sockets since the last answer
        self.calls: dict[int, float] = {}  # admin calls under way -> until when their silence is legal

    def _connected(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        self._dress(socket)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.connect(self._endpoint)
        return socket

    def _dress(self, socket: zmq.asyncio.Socket) -> None:
        socket.set(zmq.ROUTING_ID, self._front.to_bytes(2, "little"))

    def renew(self) -> None:
        """Take our place at the worker's socket again: ZeroMQ tells nobody that another peer took it. What was under
        way in either direction may be lost by this, and shows in the counts. ``read()`` is to be started again."""
        if self._reader is not None:
            self._reader.cancel()
        self._socket.close()
        self._socket = self._connected()
        self.asked = 0
        self.renewed += 1

    async def greet(self, timeout_s: float) -> tuple[bytes, Standing | None]:
        """The worker's ready info (MessagePack of vLLM's ready response), and where its count is (None from a worker
        that does not say). What it sent before to another life of this front is passed over. Raises WorkerGone or
        BadMessage."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart(self._hello())
                while True:
                    frames = await self._socket.recv_multipart()
                    if frames[0] == b"refused" and len(frames) == 2:
                        raise BadMessage(f"{self.worker_id} refuses the link: {frames[1].decode(errors='replace')}")
                    if frames[0] != b"out" and frames[2:3] in ([], [self._token]):
                        break
        except TimeoutError as why:
            raise WorkerGone(f"worker {self.worker_id} did not answer the hello in {timeout_s:g} s") from why
        if len(frames) < 2 or frames[0] != b"ready":
            raise BadMessage(f"worker {self.worker_id} answered the hello with {frames[0][:16]!r}")
        return frames[1], self._standing(frames)

    def call(self, call_id: int, frames: Sequence[Any], now: float, within_s: float) -> None:
        """Send an encoded admin call. The worker runs calls one after the other in its loop, and answers nothing
        meanwhile."""
        self.calls[call_id] = max(now, *self.calls.values()) + within_s if self.calls else now + within_s
        self.send([b"util", *frames])

    def may_be_silent(self, now: float) -> bool:
        return any(until > now for until in self.calls.values())

    def ask(self) -> None:
        """Whether the worker still answers here; the answer comes to ``read``."""
        self.asked += 1
        self._queue(self._hello())

    def _hello(self) -> list[bytes]:
        return [b"hello", self._token, msgspec.msgpack.encode(self._said)]

    def _standing(self, frames: Sequence[Any]) -> Standing | None:
        if len(frames) < 4:
            return None
        try:
            return _standing.decode(frames[3])
        except msgspec.DecodeError as why:
            raise BadMessage(f"worker {self.worker_id} said of itself what cannot be read: {why}") from why

    def add(self, prefix: bytes, frames: Sequence[Any], on_death: str, prefix_version: str, prefix_digest: str) -> None:
        """Give it a request. All behind ``frames`` is for those that decide about deaths themselves."""
        self.send([b"add", prefix, *frames])

    def made(self, stamp: Stamp) -> tuple[str, int]:
        """The slot and generation that made the tokens of a message."""
        return stamp.slot, stamp.generation

    def placed(self, stamp: Stamp, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """The items, with their positions where the other side says them. Raises BadMessage."""
        return items

    def send(self, frames: Sequence[Any]) -> None:
        """Queue a message; order is kept. Without a high-water mark this never waits."""
        self._said += 1
        self._queue(frames)

    def _queue(self, frames: Sequence[Any]) -> None:
        sent = asyncio.ensure_future(self._socket.send_multipart(frames))
        if not sent.done():
            self._sends.add(sent)
            sent.add_done_callback(self._sends.discard)

    async def read(self, on_output: OnOutput, on_torn: OnTorn, on_beat: OnBeat) -> None:
        """One long-lived receiver: a cancelled receive may lose a message, so it is only cancelled to close."""
        self._reader = asyncio.current_task()
        while not self._socket.closed:
            frames = await self._socket.recv_multipart(copy=False)
            kind = frames[0].bytes
            try:
                if kind == b"ready":
                    self.asked = self.renewed = 0
                    standing = self._standing([frame.bytes for frame in frames])
                    if standing is not None:
                        if standing.got != standing.told:
                            raise BadMessage(f"worker {self.worker_id} got {standing.got} of {standing.told} messages")
                        on_beat(self, standing)
                    continue
                if kind in self.extra:
                    self.extra[kind](self, frames)
                    continue
                stamp = self._check(kind, frames)
            except BadMessage as why:
                on_torn(self, why)
                return
            on_output(self, stamp, frames[2:])
            # What waits unread is there at once, without a turn of the loop: nobody else would have one, and who writes
            # to the clients has it before the next message is looked for.
            await asyncio.sleep(0)

    def _check(self, kind: bytes, frames: Sequence[Any]) -> Stamp:
        if kind != b"out" or len(frames) < 3:
            raise BadMessage(f"worker {self.worker_id} sent {len(frames)} frames of kind {kind[:16]!r}")
        try:
            return self._stamps().decode(frames[1].buffer)
        except msgspec.DecodeError as why:
            raise BadMessage(f"worker {self.worker_id} sent a message without a stamp: {why}") from why

    def _stamps(self) -> msgspec.msgpack.Decoder[Any]:
        return _stamp

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._socket.close()
