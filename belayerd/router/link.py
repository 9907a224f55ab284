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

_stamp: msgspec.msgpack.Decoder[Stamp] = msgspec.msgpack.Decoder(Stamp)

OnOutput = Callable[["Link", Stamp, Sequence[Any]], None]
OnTorn = Callable[["Link", BadMessage], None]


class Link:
    """Connects on construction; ``greet()`` once, then ``read()`` in a task of its own until ``close()``.

    No high-water mark: what is queued is bounded by the live requests, and a dropped message would be a lost token.
    """

    def __init__(self, context: zmq.asyncio.Context, slot: str, worker_id: str, endpoint: str, front: int) -> None:
        self.slot, self.worker_id = slot, worker_id
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, front.to_bytes(2, "little"))
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        self._reader: asyncio.Task[None] | None = None
        self._sends: set[Awaitable[Any]] = set()

    async def greet(self, timeout_s: float) -> bytes:
        """The worker's ready info (MessagePack of vLLM's ready response). Raises WorkerGone or BadMessage."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart([b"hello"])
                frames = await self._socket.recv_multipart()
        except TimeoutError as why:
            raise WorkerGone(f"worker {self.worker_id} did not answer the hello in {timeout_s:g} s") from why
        if len(frames) != 2 or frames[0] != b"ready":
            raise BadMessage(f"worker {self.worker_id} answered the hello with {frames[0][:16]!r}")
        ready: bytes = frames[1]
        return ready

    def send(self, frames: Sequence[Any]) -> None:
        """Queue a message; order is kept. Without a high-water mark this never waits."""
        sent = asyncio.ensure_future(self._socket.send_multipart(frames))
        if not sent.done():
            self._sends.add(sent)
            sent.add_done_callback(self._sends.discard)

    async def read(self, on_output: OnOutput, on_torn: OnTorn) -> None:
        """One long-lived receiver: a cancelled receive may lose a message, so it is only cancelled to close."""
        self._reader = asyncio.current_task()
        while not self._socket.closed:
            frames = await self._socket.recv_multipart(copy=False)
            kind = frames[0].bytes
            if kind == b"ready":
                continue  # the answer to a hello that was sent twice
            try:
                stamp = self._check(kind, frames)
            except BadMessage as why:
                on_torn(self, why)
                return
            on_output(self, stamp, frames[2:])

    def _check(self, kind: bytes, frames: Sequence[Any]) -> Stamp:
        if kind != b"out" or len(frames) < 3:
            raise BadMessage(f"worker {self.worker_id} sent {len(frames)} frames of kind {kind[:16]!r}")
        try:
            return _stamp.decode(frames[1].buffer)
        except msgspec.DecodeError as why:
            raise BadMessage(f"worker {self.worker_id} sent a message without a stamp: {why}") from why

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._socket.close()
