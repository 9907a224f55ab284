"""The fleet's port: who may come in, and what it may say. A ROUTER socket with CURVE; to each peer it is the workers.

Identities are given by ZeroMQ, one per connection, and the host behind one is known by its key: a peer can neither
speak for another nor take its place. What is not let in, or cannot be read, is counted and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
import zmq.utils.monitor
from zmq.auth.asyncio import AsyncioAuthenticator

from belayer import fleet_keys
from belayer.errors import ConfigInvalid, HostUnfit
from belayerd.router.fleet_link import HANDSHAKE_MS

Hear = Callable[[str, bytes, Sequence[Any]], None]  # host, route, frames

_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broken_handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "not_our_protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused_handshake",
}


class Door:
    """Binds on construction (HostUnfit when it cannot); ``serve`` until cancelled. ``dropped``: by reason."""

    def __init__(self, listen: str, keys: Path, pair: fleet_keys.Pair, max_bytes: int, lost_s: float, log: Any) -> None:
        self.dropped: Counter[str] = Counter()
        self._keys, self._log = keys, log
        self._sends: set[asyncio.Future[Any]] = set()
        self._context = zmq.asyncio.Context()
        self._zap = AsyncioAuthenticator(self._context)
        self._zap.start()
        self._zap.configure_curve_callback(credentials_provider=self)
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(sum(_FAILED))
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_PUBLICKEY, pair.public)
        self._socket.set(zmq.CURVE_SECRETKEY, pair.secret)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)  # what is queued is bounded: a silent peer's links end after orphan_s
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, max_bytes)
        self._socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.set(zmq.HEARTBEAT_IVL, max(1, int(lost_s * 250)))
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, max(1, int(lost_s * 1000)))
        self._socket.set(zmq.IPV6, int("[" in listen))
        try:
            self._socket.bind(f"tcp://{listen}")
        except zmq.ZMQError as why:
            self.close()
            raise HostUnfit(f"fleet.listen {listen} cannot be bound: {why.strerror}") from why

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP asks whether the holder of this key may come in. The folder is read anew: a key that was added or taken
        away counts from the next connection on."""
        host = self._host_of(key)
        if host is None:
            self.dropped["unknown_key"] += 1
            self._log.warning("fleet_key_unknown", key=key.decode())
        return host is not None

    def _host_of(self, key: bytes) -> str | None:
        try:
            return fleet_keys.admitted(self._keys).get(key.decode())
        except ConfigInvalid as why:
            self.dropped["keys_unreadable"] += 1
            self._log.error("fleet_keys_unreadable", why=str(why))
            return None

    async def serve(self, hear: Hear) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(hear))
            group.create_task(self._watch())

    async def _read(self, hear: Hear) -> None:
        known: dict[str, str] = {}
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            key = str(frames[0].get("User-Id")) if len(frames) > 1 else ""
            # A hello asks anew who the key belongs to, so that a host that was taken off the list is deaf at once.
            if len(frames) > 1 and (key not in known or frames[1].bytes in (b"hello", b"beat")):
                host = self._host_of(key.encode())
                if host is None:
                    known.pop(key, None)
                else:
                    known[key] = host
            if key not in known:
                self.dropped["unknown_key" if key else "empty_message"] += 1
                continue
            hear(known[key], frames[0].bytes, [frame.bytes for frame in frames[1:]])

    async def _watch(self) -> None:
        while True:
            said = await zmq.utils.monitor.recv_monitor_message(self._monitor)
            self.dropped[_FAILED[zmq.Event(said["event"])]] += 1

    def send(self, frames: Sequence[Any]) -> None:
        """Queue a message; the first frame is its route. One whose peer has gone is dropped, which the peer's counts
        tell it."""
        sent = asyncio.ensure_future(self._socket.send_multipart(frames))
        if not sent.done():
            self._sends.add(sent)
            sent.add_done_callback(self._sends.discard)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._zap.stop()
        self._socket.close()
        self._context.destroy(linger=0)
