"""The control plane's only zmq import: ROUTER server and DEALER client over ipc://, typed MessagePack.

One long-lived receive task per socket (a cancelled ``recv`` can, rarely, lose a message: pyzmq issue 1925), call ids
so that several calls may be in flight, a deadline on every call. Bytes that are no message are answered by an error
when they have a call id and dropped when not: a peer's garbage costs the peer, not the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from belayer import wire
from belayer.clock import monotonic
from belayer.errors import BadMessage, BelayerError, DaemonUnreachable, Refused, from_code
from belayer.messages.common import ErrorReply

Handler = Callable[[Any], Awaitable[msgspec.Struct]]
R = TypeVar("R", bound=msgspec.Struct)

_GLANCE_S = 1.0  # how often a long wait looks whether its daemon still lives
_HWM = 10_000  # messages; finite, so that a stuck peer cannot eat the daemon's memory


def to_reply(error: BelayerError) -> ErrorReply:
    return ErrorReply(code=str(error.code), message=error.message, kept=error.kept, remedy=error.remedy)


def raise_if_error(reply: Any) -> Any:
    if isinstance(reply, ErrorReply):
        raise from_code(reply.code, reply.message, reply.kept, reply.remedy)
    return reply


def _packed(message: msgspec.Struct, path: Path) -> bytes:
    """The server's socket would end the connection over more, and nobody would ever answer. Raises Refused."""
    data = wire.encode(message)
    if len(data) > wire.MAX_MESSAGE:
        raise Refused(
            f"{type(message).__name__} of {len(data)} bytes is over the {wire.MAX_MESSAGE} that {path} takes",
            kept="it was not sent",
            remedy="send less at once; large data goes in files",
        )
    return data


class Server:
    """Answers ``union`` requests with ``handler``; a BelayerError becomes an ErrorReply, any other exception is a
    broken invariant and ends the daemon (the task group sees it)."""

    def __init__(self, path: Path, union: Any, handler: Handler) -> None:
        self._path, self._handler = path, handler
        self._decoder: wire.Decoder[Any] = wire.Decoder(union)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, _HWM)
        self._socket.set(zmq.RCVHWM, _HWM)
        self._socket.set(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        path.unlink(missing_ok=True)  # a socket file of a killed life; liveness is the lock's business, not its
        old = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{path}")
        finally:
            os.umask(old)

    async def serve(self) -> None:
        """Run until cancelled; each request is its own task, so a slow one holds nobody up."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    frames = await self._socket.recv_multipart()
                    if len(frames) == 3:  # identity, call id, message
                        group.create_task(self._answer(frames[0], frames[1], frames[2]))
        finally:
            self.close()

    async def _answer(self, peer: bytes, call: bytes, data: bytes) -> None:
        try:
            reply = await self._handler(self._decoder.decode(data))
        except BelayerError as error:
            reply = to_reply(error)
        with contextlib.suppress(zmq.ZMQError):  # the peer has left: nobody waits for this answer
            await self._socket.send_multipart([peer, call, wire.encode(reply)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)


class Client:
    """Calls one server. Usable from one event loop; ``close()`` when done."""

    def __init__(self, path: Path, context: zmq.asyncio.Context | None = None) -> None:
        self._path = path
        # Belongs to who gave it, or is a view of this process's own: neither is ended here.
        self._context = context or zmq.asyncio.Context.shadow(_context())
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, _HWM)
        self._socket.set(zmq.RECONNECT_IVL, 20)
        self._socket.set(zmq.IMMEDIATE, 1)  # a call to a daemon that is down must not arrive when it is back
        self._socket.connect(f"ipc://{path}")
        self._next = 0
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(self, message: msgspec.Struct, reply: type[R], timeout: float = 10.0) -> R:  # noqa: ASYNC109
        """The reply, as ``reply``. Raises the peer's error by its code, DaemonUnreachable after ``timeout``
        seconds, BadMessage when the answer is of another type."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._receive())
        self._next += 1
        call, sent = self._next.to_bytes(8, "little"), _packed(message, self._path)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call] = future
        try:
            async with asyncio.timeout(timeout):
                await self._socket.send_multipart([call, sent])
                data = await future
        except TimeoutError as why:
            raise DaemonUnreachable(
                f"no answer from {self._path} to {type(message).__name__} in {timeout:g} s",
                remedy="is the daemon running?",
            ) from why
        finally:
            self._waiting.pop(call, None)
        return decode_reply(data, reply)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            future = self._waiting.get(frames[0]) if len(frames) == 2 else None
            if future is not None and not future.done():
                future.set_result(frames[1])

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._socket.close()


def decode_reply(data: bytes, reply: type[R]) -> R:
    answer = raise_if_error(wire.Decoder[Any](reply | ErrorReply).decode(data))
    if not isinstance(answer, reply):
        raise BadMessage(f"expected {reply.__name__}, got {type(answer).__name__}")
    return answer


_contexts: dict[int, zmq.Context[Any]] = {}  # by process; a parent's is kept, since a child must not end it
_MAX_SOCKETS = 65_535  # zmq's own default of 1,023 would bound the sandboxes that one process can hold


def _context() -> zmq.Context[Any]:
    """This process's own. One per client would be ended by whoever collects a client that nobody closed, and that end
    waits for ever for its socket, which the same collection has made unreachable."""
    made = _contexts.get(os.getpid())
    if made is None:
        made = zmq.Context()
        made.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        made = _contexts.setdefault(os.getpid(), made)
    return made


class SyncClient:
    """Blocking calls, for scripts and the client library; one thread at a time, since a zmq socket has no lock of its
    own and two threads in one would wait for ever. A call beside another is refused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = _context().socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.connect(f"ipc://{path}")
        self._next = 0
        self._used = threading.Lock()

    def call(
        self,
        message: msgspec.Struct,
        reply: type[R],
        timeout: float = 10.0,
        same_life: Callable[[], bool] | None = None,
    ) -> R:
        """As Client.call. ``same_life``, asked while the answer is long in coming, ends the wait when it says that the
        daemon that took the call is no more: nobody will answer it. Raises Refused while another call runs."""
        with self._alone(type(message).__name__):
            return self._call(message, reply, timeout, same_life)

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._used.acquire(blocking=False):
            raise Refused(
                f"{what}: this connection to {self._path} is inside a call of another thread",
                kept="that call goes on, this one was not sent",
                remedy="use one instance per thread",
            )
        try:
            yield
        finally:
            self._used.release()

    def _call(self, message: msgspec.Struct, reply: type[R], timeout: float, same_life: Callable[[], bool] | None) -> R:
        if self._socket.closed:
            raise DaemonUnreachable(f"this connection to {self._path} was closed", remedy="attach or create anew")
        deadline, sent = monotonic() + timeout, _packed(message, self._path)
        self._next += 1
        call = self._next.to_bytes(8, "little")
        if self._socket.poll(int(timeout * 1000), zmq.POLLOUT):
            self._socket.send_multipart([call, sent])
            while (left := deadline - monotonic()) > 0:
                if not self._socket.poll(int(min(left, _GLANCE_S) * 1000) + 1):
                    if same_life is not None and not same_life():
                        raise DaemonUnreachable(f"the daemon at {self._path} ended before it answered")
                    continue
                frames = self._socket.recv_multipart()
                # Late answers of earlier, timed-out calls carry their own call id and are passed over.
                if len(frames) == 2 and frames[0] == call:
                    return decode_reply(frames[1], reply)
        raise DaemonUnreachable(
            f"no answer from {self._path} to {type(message).__name__} in {timeout:g} s",
            remedy="is the daemon running?",
        )

    def close(self) -> None:
        with self._alone("close"):
            self._socket.close()


def call_sync(path: Path, message: msgspec.Struct, reply: type[R], timeout: float = 10.0) -> R:
    """One call on a fresh connection. A socket file that does not exist is DaemonUnreachable at once."""
    if not path.exists():
        raise DaemonUnreachable(f"no socket at {path}", remedy="start the daemon, or set BELAYER_ROOT")
    client = SyncClient(path)
    try:
        return client.call(message, reply, timeout)
    finally:
        client.close()
