"""The fleet of a router: its port, the questions to its peers, and what it tells the core of them. A thin shell."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from belayer import clock, fleet_keys
from belayer.config import Config, Model, Router
from belayer.errors import BadMessage, BelayerError
from belayer.messages.fleet import Beat, FleetStamp, FleetStatusReply, Life, PeerView, Slots
from belayerd.router import events as ev
from belayerd.router.fleet_core import Bounds, Fit, FleetCore, Peer, PeerState, full_name
from belayerd.router.fleet_door import Door
from belayerd.router.fleet_guests import Guests
from belayerd.router.fleet_host import Both, HostSide, code_of, own_slots
from belayerd.router.fleet_link import FleetLink, Road, backs, dress
from belayerd.router.fleet_way import Way
from belayerd.router.link import Link
from belayerd.router.records import SlotState
from belayerd.router.shell import Shell, Sink

_stamp: msgspec.msgpack.Decoder[FleetStamp] = msgspec.msgpack.Decoder(FleetStamp)
_MARGIN = 16 << 20  # bytes of a message beyond the largest body that a client may send
_QUESTIONS = 4  # that wait in a socket; more would only be late
_BEATS_AT_ONCE = 2  # of our own; where more is missing between two looks, we stood still


def fingerprint(model: Model, router: Router, version: str) -> str:
    """Of what must be equal for a request to go on elsewhere: configuration and tokenizer byte for byte, the weights'
    files by name and size, the form that is computed in, what thinking is, and vLLM. Weights themselves have
    versions."""
    folder = Path(model.path)
    thinking = router.reasoning_parser, router.reasoning_start, router.reasoning_end
    digest = hashlib.blake2b(f"{model.dtype} {version} {thinking}".encode(), digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json" or path.name.startswith(("tokenizer", "chat_template", "vocab", "merges")):
            digest.update(path.name.encode() + hashlib.blake2b(path.read_bytes()).digest())
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()


class Fleet:
    """Make it inside the running event loop; ``attach`` the shell; ``serve`` until cancelled; ``close``."""

    def __init__(
        self,
        config: Config,
        pair: fleet_keys.Pair,
        life: Life,
        model: Model,
        mark: str,
        codec: Any,
        full: Callable[[], bool],
        log: Any,
    ) -> None:
        """``mark``: the fingerprint of the model; ``full``: whether as many requests are live here as may be."""
        self._config, self._fleet, self._pair, self._life, self._log = config, config.fleet, pair, life, log
        self._model, self._mark = model, mark
        self._length = min(slot.max_model_len for slot in config.slot)
        self._capacity = {slot.name: slot.max_num_seqs for slot in config.slot}
        self._max_bytes = (config.router.max_body_mb << 20) + _MARGIN
        gap_s = _BEATS_AT_ONCE * self._fleet.beat_s
        self.core = FleetCore(
            {peer.name: peer.address for peer in config.peer},
            Fit(model.name, mark, self._length),
            Bounds(self._fleet.slow_s, self._fleet.lost_s, gap_s),
        )
        folder = Path(self._fleet.keys)
        self._servers = {peer.name: fleet_keys.key_of(folder, peer.name) for peer in config.peer}
        self.door = Door(self._fleet.listen, folder, pair, self._max_bytes, self._fleet.lost_s, log)
        self.host = HostSide(self.door, Guests(self._fleet.orphan_s, gap_s), codec, self._slots, mark, full, log)
        self._context = zmq.asyncio.Context()
        self._ways = {name: self._way(name) for name in self.core.peers}
        self._shell: Shell

    def sink(self, front: Sink) -> Sink:
        return Both(front, self.host)

    def attach(self, shell: Shell) -> None:
        self._shell = shell
        self.host.attach(shell)
        shell.make_remote = self._make_link

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.door.serve(self.host.hear))
            group.create_task(self._beat())
            for name in self.core.peers:
                group.create_task(self._answers(name))
                group.create_task(self._ways[name].keep())

    def close(self) -> None:
        """After the shell: its links are of this context."""
        for way in self._ways.values():
            way.close()
        self.door.close()
        self._context.destroy(linger=100)

    # -- as a host --------------------------------------------------------------------------------------------

    def _slots(self, number: int) -> Slots:
        own = own_slots(self._shell, self._model.name, self._mark, self._length, self._capacity)
        return Slots(host=self._config.host.name, life=self._life, number=number, slots=tuple(own))

    # -- as a peer of others ----------------------------------------------------------------------------------

    def _way(self, name: str) -> Way:
        peer = self.core.peers[name]
        socket = self._context.socket(zmq.DEALER)
        dress(socket, self._pair, self._servers[name], self._fleet.lost_s)
        socket.set(zmq.IMMEDIATE, 1)  # a question is not kept for a peer that is away
        socket.set(zmq.SNDHWM, _QUESTIONS)
        socket.set(zmq.MAXMSGSIZE, self._max_bytes)
        return Way(
            name, peer.address, socket, lambda: peer.state is PeerState.SILENT,
            lambda why: self.core.hint(name, why, clock.monotonic()),
        )  # fmt: skip

    def _standing(self) -> dict[str, SlotState]:
        return {name: slot.state for name, slot in self._shell.core.slots.items() if slot.remote}

    async def _beat(self) -> None:
        while True:
            now = clock.monotonic()
            for name, way in self._ways.items():
                beat = Beat(life=self._life, number=self.core.ask(name, now))
                # Never waited for: one peer that is away, or owes several answers, must not keep this from the others.
                with contextlib.suppress(zmq.Again):
                    await way.socket.send_multipart([b"beat", msgspec.msgpack.encode(beat)], flags=zmq.NOBLOCK)
            self._tell(self.core.tick(now, self._standing()))
            self.host.tick()
            await asyncio.sleep(self._fleet.beat_s)

    async def _answers(self, name: str) -> None:
        """One receiver per peer for the life of the router: a cancelled receive may lose a message."""
        way = self._ways[name]
        while True:
            frames = await way.socket.recv_multipart()
            try:
                if len(frames) != 2 or frames[0] != b"slots":
                    raise BadMessage(f"peer {name} answered {frames[0][:16]!r}: {b' '.join(frames[1:])[:200]!r}")
                said = msgspec.msgpack.decode(frames[1], type=Slots)
            except (BadMessage, msgspec.MsgspecError, UnicodeDecodeError) as why:
                self.door.dropped["bad_answer"] += 1
                self._log.warning("fleet_answer_unreadable", peer=name, why=str(why))
                continue
            before = self.core.peers[name].state
            self.core.peers[name].where = way.where
            self._tell(self.core.answered(name, said, clock.monotonic(), self._standing()))
            if (peer := self.core.peers[name]).state is not before:
                self._log.info("fleet_peer", peer=name, state=peer.state, why=peer.why)

    def _tell(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            try:
                self._shell.tell(event)
            except BelayerError as why:  # fenced by the core: the next answer is looked at anew
                self._log.warning("fleet_event_refused", told=type(event).__name__, why=str(why))

    def _make_link(self, effect: ev.Connect, front: int, token: bytes) -> Link:
        host = effect.slot.partition("/")[0]
        road = Road(self._pair, self._servers[host], self._life, self._mark, self._fleet.lost_s, self._max_bytes)
        link = FleetLink(self._context, effect, front, token, road)
        link.extra[b"back"] = self._on_back
        return link

    def _on_back(self, link: Link, frames: Sequence[Any]) -> None:
        """Raises BadMessage, as a reader of a link does: nothing more from it is believed then."""
        try:
            stamp, back = _stamp.decode(frames[1].buffer), backs.decode(frames[2].buffer)
        except (msgspec.MsgspecError, IndexError) as why:
            raise BadMessage(f"{link.worker_id} handed back what cannot be read: {why}") from why
        self._shell.tell(
            ev.HandedBack(
                stamp.slot,
                stamp.generation,
                stamp.worker_id,
                stamp.seq,
                back.request_id,
                code_of(back.code),
                back.message,
                back.remedy,
            )
        )

    # -- status -----------------------------------------------------------------------------------------------

    def status(self) -> FleetStatusReply:
        now = clock.monotonic()
        return FleetStatusReply(
            host=self._config.host.name,
            listen=self._fleet.listen,
            life=self._life.number,
            peers=tuple(self._view(peer, now) for peer in self.core.peers.values()),
            own=self._slots(0).slots,
            serving=self.host.guests.by_host(),
            dropped=dict(self.door.dropped),
        )

    def _view(self, peer: Peer, now: float) -> PeerView:
        slots = self._shell.core.slots
        mine = [slots[full_name(peer.host, name)] for name in peer.slots if full_name(peer.host, name) in slots]
        return PeerView(
            host=peer.host,
            address=peer.address,
            state=peer.state.value,
            why=self.core.why(peer, now),
            life=peer.life.number if peer.life else 0,
            heard_s=-1.0 if peer.heard_at is None else now - peer.heard_at,
            answer_ms=-1.0 if peer.answer_s < 0 else peer.answer_s * 1e3,
            forwarded=sum(len(slot.running) for slot in mine),
            slots=tuple(peer.slots.values()),
            unused={name: why for name in peer.slots if (why := self._shell.core.unused(full_name(peer.host, name)))},
        )
