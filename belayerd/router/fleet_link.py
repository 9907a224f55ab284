"""The link to a slot of another host: as to a worker, by CURVE, with positions on what comes and requests that may be
handed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from belayer import fleet_keys
from belayer.errors import BadMessage
from belayer.messages.fleet import FleetStamp, Greeting, HandedBack, Life, Wish
from belayer.messages.worker import Stamp
from belayerd.router import events as ev
from belayerd.router.link import Link

_stamps: msgspec.msgpack.Decoder[FleetStamp] = msgspec.msgpack.Decoder(FleetStamp)
backs: msgspec.msgpack.Decoder[HandedBack] = msgspec.msgpack.Decoder(HandedBack)

LINGER_MS = 500  # a goodbye is worth a moment, never a wait
HANDSHAKE_MS = 5000
RECONNECT_MS, RECONNECT_MAX_MS = 50, 500


def dress(socket: zmq.asyncio.Socket, pair: fleet_keys.Pair, server: bytes, silence_s: float) -> None:
    """A client's side of CURVE. A connection that is cut, and says so to nobody, is given up and made anew."""
    socket.set(zmq.CURVE_PUBLICKEY, pair.public)
    socket.set(zmq.CURVE_SECRETKEY, pair.secret)
    socket.set(zmq.CURVE_SERVERKEY, server)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.CONNECT_TIMEOUT, max(1, int(silence_s * 500)))
    socket.set(zmq.HEARTBEAT_IVL, max(1, int(silence_s * 250)))
    socket.set(zmq.HEARTBEAT_TIMEOUT, max(1, int(silence_s * 1000)))
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)


@dataclass(frozen=True)
class Road:
    """What every link to one peer has in common."""

    pair: fleet_keys.Pair
    server: bytes
    life: Life
    fingerprint: str
    silence_s: float
    max_bytes: int


class FleetLink(Link):
    def __init__(self, context: zmq.asyncio.Context, effect: ev.Connect, front: int, token: bytes, road: Road) -> None:
        self._road = road
        self._greeting = msgspec.msgpack.encode(
            Greeting(
                slot=effect.slot.partition("/")[2],
                life=road.life,
                front=front,
                stamp=effect.slot,
                worker_id=effect.worker_id,
                epoch=effect.generation,
                fingerprint=road.fingerprint,
            )
        )
        super().__init__(context, effect.slot, effect.worker_id, effect.endpoint, front, token)
        self.silence_s = road.silence_s

    def _dress(self, socket: zmq.asyncio.Socket) -> None:
        """No identity of our choice: the other side knows us by our key, and a name could be another's."""
        dress(socket, self._road.pair, self._road.server, self._road.silence_s)
        socket.set(zmq.IPV6, int("[" in self._endpoint))
        socket.set(zmq.MAXMSGSIZE, self._road.max_bytes)

    def _hello(self) -> list[bytes]:
        return [*super()._hello(), self._greeting]

    def add(self, prefix: bytes, frames: Sequence[Any], on_death: str, prefix_version: str, prefix_digest: str) -> None:
        wish = Wish(on_death=on_death, prefix_version=prefix_version, prefix_digest=prefix_digest)
        self.send([b"add", prefix, msgspec.msgpack.encode(wish), *frames])

    def _stamps(self) -> msgspec.msgpack.Decoder[Any]:
        return _stamps

    def made(self, stamp: Stamp) -> tuple[str, int]:
        assert isinstance(stamp, FleetStamp)
        return stamp.made_by, stamp.made_in

    def placed(self, stamp: Stamp, items: tuple[ev.Item, ...]) -> tuple[ev.Item, ...]:
        assert isinstance(stamp, FleetStamp)
        if len(stamp.starts) != len(items):
            raise BadMessage(f"{self.worker_id} placed {len(stamp.starts)} of {len(items)} outputs")
        return tuple(
            msgspec.structs.replace(item, start=start) for item, start in zip(items, stamp.starts, strict=True)
        )

    def close(self) -> None:
        """Say so, as far as that goes: what runs there for us need not run until its bound."""
        if not self._socket.closed:
            self._queue([b"bye", self._token])
        super().close()
