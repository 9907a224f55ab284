"""What this host is to its peers: each of its slots, spoken to as a worker is. Shell around ``Guests``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from belayer import clock
from belayer.errors import BadMessage, BelayerError, ErrorCode, Refused
from belayer.messages.fleet import Beat, FleetStamp, Greeting, HandedBack, RemoteSlot, Slots, Wish
from belayerd.router import events as ev
from belayerd.router.fleet_door import Door
from belayerd.router.fleet_guests import GuestLink, Guests
from belayerd.router.shell import Shell, Sink

_prefix: msgspec.msgpack.Decoder[tuple[int, ...]] = msgspec.msgpack.Decoder(tuple[int, ...])
_ids: msgspec.msgpack.Decoder[tuple[str, ...]] = msgspec.msgpack.Decoder(tuple[str, ...])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, IndexError)


class HostSide:
    """Hears peers by the door, gives their requests to the shell, and is the sink of what comes out."""

    def __init__(
        self,
        door: Door,
        guests: Guests,
        codec: Any,
        slots: Callable[[int], Slots],
        mark: str,
        full: Callable[[], bool],
        log: Any,
    ) -> None:
        """``mark``: the fingerprint of this host's model; links for another are refused. ``full``: whether as many
        requests are live here as may be."""
        self.guests, self._mark = guests, mark
        self._door, self._codec, self._slots, self._full, self._log = door, codec, slots, full, log
        self._ready: dict[str, bytes] = {}  # slot -> what its last worker said when it was ready
        self._shell: Shell

    def attach(self, shell: Shell) -> None:
        self._shell = shell

    # -- from peers -------------------------------------------------------------------------------------------

    def hear(self, host: str, route: bytes, frames: Sequence[bytes]) -> None:
        """What a peer says concerns its own requests alone; what cannot be read is counted."""
        try:
            self._hear(host, route, frames[0], frames[1:])
        except _UNREADABLE as why:
            self._door.dropped["bad_message"] += 1
            self._log.warning("fleet_message_unreadable", host=host, why=str(why))
        except BelayerError as error:
            self._door.dropped[str(error.code)] += 1
            self._log.warning("fleet_refused", host=host, why=str(error))
            self._door.send([route, b"refused", str(error).encode()])

    def _hear(self, host: str, route: bytes, kind: bytes, rest: Sequence[bytes]) -> None:
        match kind:
            case b"beat":
                beat = msgspec.msgpack.decode(rest[0], type=Beat)
                self.guests.alive(host, beat.life)
                self._door.send([route, b"slots", msgspec.msgpack.encode(self._slots(beat.number))])
            case b"hello":
                self._hello(host, route, rest)
            case b"add" | b"abort" | b"bye":
                self._told(host, route, kind, rest)
            case _:
                raise ValueError(f"no message of a peer begins with {kind[:16]!r}")

    def _hello(self, host: str, route: bytes, rest: Sequence[bytes]) -> None:
        token, told, greeting = rest[0], rest[1], msgspec.msgpack.decode(rest[2], type=Greeting)
        if greeting.slot not in self._ready:
            raise Refused(f"slot {greeting.slot} has no worker yet")
        if greeting.fingerprint != self._mark:
            raise Refused(f"requests of {host} are for other files of the model, or another vLLM, than this host has")
        link, ended = self.guests.greet(host, greeting, token, route, clock.monotonic())
        self._end(ended)
        standing = {
            "seq": link.seq,
            "weight_version": self._shell.core.slots[greeting.slot].weight_version,
            "weights_digest": self._shell.core.slots[greeting.slot].weights_digest,
            "got": link.got,
            "told": msgspec.msgpack.decode(told, type=int),
        }
        ready = self._ready[greeting.slot]
        self._door.send([route, b"ready", ready, token, msgspec.msgpack.encode(standing)])

    def _told(self, host: str, route: bytes, kind: bytes, rest: Sequence[bytes]) -> None:
        link = self.guests.by_route(route)
        if link is None or link.host != host:
            self._door.dropped["no_link"] += 1  # its next hello shows it that this was lost
            return
        link.got += 1
        if kind == b"add":
            self._add(link, rest)
        elif kind == b"abort":
            self._end(self.guests.go(link, _ids.decode(rest[0])))
        elif rest[0] == link.token:
            self._end(self.guests.leave(link))

    def _add(self, link: GuestLink, rest: Sequence[bytes]) -> None:
        prefix = _prefix.decode(rest[0]) if rest[0] else ()
        wish = msgspec.msgpack.decode(rest[1], type=Wish)
        frames = tuple(rest[2:])
        request_id = _id_of(frames[0])
        try:
            if self.guests.come(link, request_id, len(prefix)):
                self._shell.abort([request_id])
            if self._full():
                raise Refused("router.max_requests are live on that host")
            self._shell.add(
                ev.Add(
                    request_id=request_id,
                    frames=frames,
                    external_id=f"{link.host}:{request_id}",
                    on_death=ev.OnDeath(wish.on_death) if wish.on_death else None,
                    pin=link.greeting.slot,
                    origin=link.host,
                    prefix=prefix,
                    prefix_version=wish.prefix_version,
                    prefix_digest=wish.prefix_digest,
                )
            )
        except BelayerError as error:
            self.fail(request_id, error)

    def _end(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self._shell.abort(request_ids)

    def tick(self) -> None:
        """Hosts that were silent for too long go on elsewhere: what runs here for them ends."""
        for link in self.guests.silent(clock.monotonic()):
            self._log.warning("fleet_link_orphaned", host=link.host, slot=link.greeting.slot, requests=len(link.live))
            self._end(self.guests.leave(link))

    # -- to peers ---------------------------------------------------------------------------------------------

    def welcome(self, slot: str, ready: bytes) -> None:
        self._ready[slot] = ready

    def outputs(self, slot: str, generation: int, rows: Sequence[Any], version: str | None) -> None:
        """Rows of one engine step; each link gets its own in one message."""
        by_link: dict[int, tuple[GuestLink, list[Any], list[int]]] = {}
        for row in rows:
            found = self.guests.took(row.request_id, len(row.new_token_ids))
            if found is None:
                continue
            link, start = found
            _, mine, starts = by_link.setdefault(id(link), (link, [], []))
            mine.append(row)
            starts.append(start)
            if row.finish_reason is not None:
                self.guests.end(row.request_id)
        for link, mine, starts in by_link.values():
            stamp = self._stamp(link, tuple(starts), slot, generation)
            self._door.send([link.route, b"out", stamp, *self._codec.encode(self._codec.message(mine, version))])

    def _stamp(self, link: GuestLink, starts: tuple[int, ...], slot: str, generation: int) -> bytes:
        seq, link.seq = link.seq, link.seq + 1
        peer_calls_us = link.greeting.stamp.partition("/")[0]
        return msgspec.msgpack.encode(
            FleetStamp(
                slot=link.greeting.stamp,
                generation=link.greeting.epoch,
                worker_id=link.greeting.worker_id,
                seq=seq,
                starts=starts,
                made_by=f"{peer_calls_us}/{slot}",
                made_in=generation,
            )
        )

    def cut(self, request_id: str) -> None:
        message = self._codec.aborted(request_id)
        link = self.guests.took(request_id, 0)
        if link is not None:
            slot = self._shell.core.slots[link[0].greeting.slot]
            self.outputs(slot.name, slot.generation, message.outputs, None)

    def fail(self, request_id: str, error: BelayerError) -> None:
        link = self.guests.end(request_id)
        if link is None:
            return
        back = HandedBack(
            request_id=request_id,
            code=str(error.code),
            message=error.message,
            kept=error.kept,
            remedy=error.remedy,
        )
        stamp = self._stamp(link, (), link.greeting.slot, 0)
        self._door.send([link.route, b"back", stamp, msgspec.msgpack.encode(back)])


class Both:
    """The shell's sink: what is for requests of other hosts goes to them, all else to this host's front end."""

    def __init__(self, front: Sink, host: HostSide) -> None:
        self._front, self._host = front, host

    def deliver(self, slot: str, generation: int, outputs: Any) -> None:
        guests = self._host.guests
        if len(guests):
            theirs = [row for row in outputs.outputs if row.request_id in guests]
            if theirs:
                outputs.outputs = [row for row in outputs.outputs if row.request_id not in guests]
                self._host.outputs(slot, generation, theirs, outputs.weight_version)
        self._front.deliver(slot, generation, outputs)

    def replay(self, told: ev.Replay) -> None:
        self._front.replay(told)

    def cut(self, reader: str) -> None:
        (self._host if reader in self._host.guests else self._front).cut(reader)

    def fail(self, request_id: str, error: BelayerError) -> None:
        (self._host if request_id in self._host.guests else self._front).fail(request_id, error)

    def welcome(self, slot: str, ready: bytes) -> Sequence[Sequence[Any]]:
        first = self._front.welcome(slot, ready)
        if "/" not in slot:
            self._host.welcome(slot, ready)
        return first

    def utility(self, slot: str, outputs: Any) -> None:
        self._front.utility(slot, outputs)

    def left(self, slot: str) -> None:
        self._front.left(slot)


def _id_of(frame: bytes) -> str:
    """Of an encoded request, whose first field it is."""
    row: list[Any] = msgspec.msgpack.decode(frame, type=list[Any])
    if not row or not isinstance(row[0], str):
        raise ValueError("a request begins with its id")
    return row[0]


def code_of(text: str) -> ErrorCode:
    """Raises BadMessage for a code that is none of ours."""
    try:
        return ErrorCode(text)
    except ValueError as why:
        raise BadMessage(f"a peer handed a request back with code {text[:32]!r}") from why


def own_slots(shell: Shell, model: str, fingerprint: str, max_len: int, capacity: dict[str, int]) -> list[RemoteSlot]:
    """This host's slots as its peers may use them."""
    waiting: dict[str, int] = {}
    core = shell.core
    for request in core.requests.values():
        home = request.slot or request.pin
        if home and request.request_id not in core.slots[home].running if home in core.slots else False:
            waiting[home] = waiting.get(home, 0) + 1
    return [
        RemoteSlot(
            slot=slot.name,
            generation=slot.generation,
            state=slot.state.value,
            model=model,
            fingerprint=fingerprint,
            weight_version=slot.weight_version,
            weights_digest=slot.weights_digest,
            max_model_len=max_len,
            load=len(slot.running) + waiting.get(slot.name, 0),
            capacity=capacity.get(slot.name, 0),
        )
        for slot in core.slots.values()
        if not slot.remote and slot.name in capacity
    ]
