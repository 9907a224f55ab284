"""Which checkpoints go when (garbage collection). Pure: entries, time and limits in, an ordered plan out.

Never: a claimed checkpoint, and READY of a living sandbox. Forks share the bytes of one checkpoint (hard links): they
are counted once and freed with the last of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One complete checkpoint in one sandbox's store. ``ready``: READY names it. ``live``: its sandbox exists (also
    lost: it waits for a restore). ``claimed``: a restore is using it. ``checkpoint_id`` is also the key of its bytes:
    forks hold the same one."""

    sandbox_id: str
    checkpoint_id: str
    nbytes: int
    made_at: float
    ready: bool
    live: bool
    claimed: bool

    @property
    def kept(self) -> bool:
        return self.claimed or (self.ready and self.live)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and seconds; 0 switches a limit off. Above ``high`` room is made down to ``low``. ``keep``: checkpoints
    per sandbox, READY among them, at least 1."""

    high: int = 0
    low: int = 0
    ttl_s: float = 0.0
    keep: int = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """``delete`` in this order. ``used``: bytes afterwards, without what is coming. ``fits``: what is coming may."""

    delete: tuple[Entry, ...]
    used: int
    fits: bool


def plan(entries: Iterable[Entry], now: float, limits: Limits, incoming: int = 0) -> Plan:
    """``incoming``: bytes of the checkpoint that waits to be published."""
    ordered = sorted(entries, key=lambda e: (e.made_at, e.sandbox_id, e.checkpoint_id))
    books = _Books(ordered)
    for entry in _expired(ordered, now, limits.ttl_s):
        books.drop(entry)
    for entry in _beyond_keep(books.left(), limits.keep):
        books.drop(entry)
    if limits.high and books.used + incoming > limits.high:
        # Older states of a sandbox before the last state of one that ended; each kind by age.
        spare = [e for e in books.left() if not e.kept]
        for entry in [e for e in spare if not e.ready] + [e for e in spare if e.ready]:
            if books.used + incoming <= limits.low:
                break
            books.drop(entry)
    fits = not limits.high or books.used + incoming <= limits.high
    return Plan(tuple(books.dropped), books.used, fits)


def _expired(ordered: list[Entry], now: float, ttl_s: float) -> list[Entry]:
    return [e for e in ordered if ttl_s and now - e.made_at > ttl_s and not e.kept]


def _beyond_keep(ordered: list[Entry], keep: int) -> list[Entry]:
    """Oldest of each sandbox beyond ``keep``; READY is counted and stays, also when it is not the newest (a rewind)."""
    count = Counter(e.sandbox_id for e in ordered)
    out = []
    for entry in ordered:
        if count[entry.sandbox_id] > keep and not entry.kept and not entry.ready:
            count[entry.sandbox_id] -= 1
            out.append(entry)
    return out


class _Books:
    """Bytes in use, each blob once."""

    def __init__(self, ordered: list[Entry]) -> None:
        self.dropped: list[Entry] = []
        self._ordered = ordered
        self._holders = Counter(e.checkpoint_id for e in ordered)
        self._size = {e.checkpoint_id: e.nbytes for e in ordered}
        self.used = sum(self._size.values())

    def left(self) -> list[Entry]:
        gone = set(map(id, self.dropped))
        return [e for e in self._ordered if id(e) not in gone]

    def drop(self, entry: Entry) -> None:
        self.dropped.append(entry)
        self._holders[entry.checkpoint_id] -= 1
        if not self._holders[entry.checkpoint_id]:
            self.used -= self._size[entry.checkpoint_id]
