"""What this host makes of its peers: (event, now) -> what the router's core is told. Pure.

A peer that answers has slots; those that fit are registered, each link with an epoch of its own, so that nothing of an
earlier link can be taken for a later one's. A peer that is silent, older than it was, or serves something else has
none: its requests go on elsewhere with the tokens that came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from belayer.messages.fleet import Life, RemoteSlot, Slots
from belayerd.router import events as ev
from belayerd.router.attention import Attention
from belayerd.router.records import SlotState

_HINT_S = 15.0  # what was wrong with the way to a peer; older, it may be wrong no more
_ANSWERS_AWAITED = 64  # questions remembered; an answer to an older one is too late for any deadline


class PeerState(StrEnum):
    """SILENT: no answer within the bound (yet). UP: may be given requests. SLOW: keeps those that it has. FENCED: it
    answers, and is an earlier life of that host, or names itself otherwise: nothing is taken from it."""

    SILENT = "silent"
    UP = "up"
    SLOW = "slow"
    FENCED = "fenced"


PEER_NEXT: dict[PeerState, frozenset[PeerState]] = {
    PeerState.SILENT: frozenset({PeerState.UP, PeerState.SLOW, PeerState.FENCED}),
    PeerState.UP: frozenset({PeerState.SLOW, PeerState.SILENT, PeerState.FENCED}),
    PeerState.SLOW: frozenset({PeerState.UP, PeerState.SILENT, PeerState.FENCED}),
    PeerState.FENCED: frozenset({PeerState.UP, PeerState.SLOW, PeerState.SILENT}),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds by this host's monotonic clock. ``slow_s``: an answer later than that, or owed for that long, stops new
    requests; ``lost_s``: no answer for that long, and the peer is given up. ``gap_s``: how much of the time between two
    looks counts, since a host that stood still heard nobody."""

    slow_s: float = 1.0
    lost_s: float = 5.0
    gap_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Fit:
    """What a slot must be to continue our requests: the same model in the same form, with no smaller context."""

    model: str
    fingerprint: str
    max_model_len: int


@dataclass(slots=True)
class Peer:
    host: str
    address: str
    state: PeerState = PeerState.SILENT
    why: str = "never heard"
    where: str = ""  # the address that its name led to
    hint: tuple[str, float] = ("", 0.0)  # what keeps questions from it, and when that was seen
    life: Life | None = None
    heard_at: float | None = None
    answer_s: float = -1.0
    asked: dict[int, float] = field(default_factory=dict)  # number -> when; the oldest first
    number: int = 0
    slots: dict[str, RemoteSlot] = field(default_factory=dict)
    linked: dict[str, int] = field(default_factory=dict)  # slot -> epoch of its link

    def move(self, to: PeerState, why: str = "") -> None:
        if to is not self.state and to not in PEER_NEXT[self.state]:
            raise AssertionError(f"peer {self.host}: no way from {self.state} to {to}")
        self.state, self.why = to, why


Told = list[ev.Event]


class FleetCore:
    """All peers of this host. ``standing``, an argument: the state of each slot in the router's core."""

    def __init__(self, peers: Mapping[str, str], fit: Fit, bounds: Bounds) -> None:
        self.peers = {host: Peer(host, address) for host, address in peers.items()}
        self._fit, self._bounds = fit, bounds
        self._attention = Attention(bounds.gap_s)
        self._epochs: dict[str, int] = {}
        self.stale = 0  # answers that came after their deadline, or from an earlier life

    def ask(self, host: str, now: float) -> int:
        """The number of the question that is asked now."""
        peer = self.peers[host]
        peer.number += 1
        peer.asked[peer.number] = now
        while len(peer.asked) > _ANSWERS_AWAITED:
            del peer.asked[next(iter(peer.asked))]
        return peer.number

    def hint(self, host: str, why: str, now: float) -> None:
        """Why no question gets to the peer: what the way to it shows while it is silent."""
        self.peers[host].hint = (why, now)

    def _look(self, now: float) -> None:
        """Silence counts while we listened. The age of what an answer says counts in any case: see ``answered``."""
        if missed := self._attention.missed(now):
            for peer in self.peers.values():
                if peer.heard_at is not None:
                    peer.heard_at += missed

    def tick(self, now: float, standing: Mapping[str, SlotState]) -> Told:
        self._look(now)
        told: Told = []
        for peer in self.peers.values():
            if peer.state in (PeerState.UP, PeerState.SLOW) and peer.heard_at is not None:
                silent = now - peer.heard_at
                if silent >= self._bounds.lost_s:
                    peer.move(PeerState.SILENT, f"no answer for {silent:.1f} s")
                    told += self._let_go(peer, standing)
                elif peer.state is PeerState.UP and silent >= self._bounds.slow_s:
                    peer.move(PeerState.SLOW, f"no answer for {silent:.1f} s")
                    told += self._offers(peer)
        return told

    def answered(self, host: str, said: Slots, now: float, standing: Mapping[str, SlotState]) -> Told:
        self._look(now)
        peer = self.peers[host]
        asked_at = peer.asked.get(said.number)
        if asked_at is None or now - asked_at >= self._bounds.lost_s:
            self.stale += 1  # by our clock it says what was true too long ago
            return []
        for number in [one for one in peer.asked if one <= said.number]:
            del peer.asked[number]
        if (why := self._wrong(peer, said)) is not None:
            self.stale += 1
            peer.move(PeerState.FENCED, why)
            return self._let_go(peer, standing)
        told: Told = []
        if peer.life != said.life:
            told += self._let_go(peer, standing)
            peer.slots = {}
        slow = now - asked_at >= self._bounds.slow_s
        peer.hint = ("", 0.0)
        peer.life, peer.heard_at, peer.answer_s = said.life, now, now - asked_at
        peer.move(PeerState.SLOW if slow else PeerState.UP, f"answered after {peer.answer_s:.1f} s" if slow else "")
        told += self._compare(peer, {slot.slot: slot for slot in said.slots}, standing)
        return told + self._offers(peer)

    @staticmethod
    def _wrong(peer: Peer, said: Slots) -> str | None:
        if said.host != peer.host:
            return f"it calls itself {said.host}"
        if peer.life is None or said.life == peer.life or said.life.number > peer.life.number:
            return None
        return f"it is life {said.life.number}, and life {peer.life.number} of that host was heard; restart its router"

    def why(self, peer: Peer, now: float) -> str:
        """Why the peer is not up, or what of it is not used. A silence grows."""
        hint, seen_at = peer.hint
        if peer.state is PeerState.SILENT and hint and now - seen_at < _HINT_S:
            return hint
        if peer.state in (PeerState.SILENT, PeerState.SLOW) and peer.heard_at is not None:
            silent = now - peer.heard_at
            if peer.state is PeerState.SILENT or silent >= self._bounds.slow_s:
                return f"no answer for {silent:.1f} s"
        return peer.why

    def unfit(self, peer: Peer, slot: RemoteSlot) -> str:
        """Why requests of this host cannot go on there, or ""."""
        before = peer.slots.get(slot.slot)
        if before is not None and slot.generation < before.generation:
            return f"generation {slot.generation} is behind {before.generation}"
        if slot.model != self._fit.model:
            return f"serves {slot.model}"
        if slot.fingerprint != self._fit.fingerprint:
            return "has other files of the model, or another vLLM"
        if slot.max_model_len < self._fit.max_model_len:
            return f"takes {slot.max_model_len} tokens"
        return ""

    def _compare(self, peer: Peer, said: dict[str, RemoteSlot], standing: Mapping[str, SlotState]) -> Told:
        told: Told = []
        refused = {name: why for name, slot in said.items() if (why := self.unfit(peer, slot))}
        for name in list(peer.linked):
            slot = said.get(name)
            if slot is None or name in refused or slot.state == SlotState.REMOVED:
                told += self._drop(peer, name, standing)
        for name, slot in said.items():
            if name in refused:
                continue
            peer.slots[name] = slot
            broken = standing.get(full_name(peer.host, name)) not in (SlotState.CONNECTING, SlotState.SERVING)
            if slot.state == SlotState.SERVING and (name not in peer.linked or broken):
                told.append(self._link(peer, slot))
        for name in [one for one in peer.slots if one not in said]:
            del peer.slots[name]
        if refused:
            peer.why = "; ".join(f"{name} {why}" for name, why in refused.items())
        return told

    def _link(self, peer: Peer, slot: RemoteSlot) -> ev.Register:
        name = full_name(peer.host, slot.slot)
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        peer.linked[slot.slot] = epoch
        return ev.Register(
            name,
            epoch,
            f"{name}#{epoch}",
            f"tcp://{peer.where or peer.address}",
            slot.weight_version,
            slot.model,
            remote=True,
            weights_digest=slot.weights_digest,
        )

    def _let_go(self, peer: Peer, standing: Mapping[str, SlotState]) -> Told:
        return [event for name in list(peer.linked) for event in self._drop(peer, name, standing)]

    @staticmethod
    def _drop(peer: Peer, name: str, standing: Mapping[str, SlotState]) -> Told:
        epoch = peer.linked.pop(name)
        full = full_name(peer.host, name)
        if full not in standing:
            return []
        return [ev.Unregister(full, epoch, ev.Cause.HOST_LOST, removed=True)]

    @staticmethod
    def _offers(peer: Peer) -> Told:
        up = peer.state is PeerState.UP
        return [
            ev.Offer(
                full_name(peer.host, name), up and slot.state == SlotState.SERVING, slot.load, slot.capacity,
                slot.weight_version, slot.weights_digest,
            )
            for name in peer.linked
            if (slot := peer.slots.get(name)) is not None
        ]  # fmt: skip


def full_name(host: str, slot: str) -> str:
    """The name of a remote slot on this host. No local slot has a "/" in its name."""
    return f"{host}/{slot}"
