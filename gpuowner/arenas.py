"""KV arenas: their memory, their holder's process, and the states of ``core``. It decides nothing itself.

Every change is persisted before it is told: the memory is in the store before the ledger names it, and the ledger
says LEASED before a worker has the descriptor. A method that hands out a descriptor hands out a new one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from belayer import procs
from belayer.errors import Refused, SlotUnknown, WorkerGone
from belayer.ids import is_name
from belayer.messages.owner import ArenaInfo
from gpuowner import core, ranks
from gpuowner.backends.port import Allocation, Maker
from gpuowner.keeping import Caller, Keeping, Key, resident
from gpuowner.ledger import ArenaRow

# Epochs of one life of the owner: where nothing of an earlier one was found, this one begins above all of its epochs,
# so that no stale epoch fits again.
EPOCHS_PER_LIFE = 1 << 20

# vLLM asks for less than the configured bytes (whole blocks); an absurd request is a bug or an attack.
MAX_ARENA = 1 << 42
MAX_RANKS = 64


@dataclass
class ArenaEntry:
    """``holder_pidfd``: of the holder, kept past its connection until the arena is FREE again, or -1."""

    arena: core.Arena
    rank: int
    memory: Allocation
    name: str
    holder_pidfd: int = -1
    pid: int = 0
    start_time: int = 0

    def holder_alive(self) -> bool:
        return self.holder_pidfd >= 0 and not procs.is_dead(self.holder_pidfd)

    def info(self) -> ArenaInfo:
        arena = self.arena
        return ArenaInfo(
            slot=arena.slot,
            state=arena.state.value,
            epoch=arena.epoch,
            nbytes=arena.nbytes,
            owner_generation=arena.owner,
            holder=arena.who,
            holder_pid=self.pid,
            holder_alive=self.holder_alive(),
            connected=arena.peer is not None,
            resident=resident(self.memory),
            reason=arena.reason,
            rank=self.rank,
        )

    def row(self) -> ArenaRow:
        arena = self.arena
        return ArenaRow(
            slot=arena.slot,
            rank=self.rank,
            nbytes=arena.nbytes,
            memory=self.name,
            state=arena.state,
            epoch=arena.epoch,
            who=arena.who,
            pid=self.pid,
            start_time=self.start_time,
            reason=arena.reason,
        )


class Arenas:
    def __init__(self, keeping: Keeping, maker: Maker, slots: frozenset[str] | None = None) -> None:
        self._keeping, self._maker, self._slots = keeping, maker, slots
        self.entries: dict[Key, ArenaEntry] = {}

    def open(self, slot: str, rank: int, nbytes: int) -> tuple[ArenaEntry, int]:
        """The arena (made FREE the first time, at epoch 0 in the owner's first life) and a read-only descriptor."""
        entry = self.entries.get((slot, rank))
        if entry is None:
            entry = self._make(slot, rank, nbytes)
        if entry.arena.nbytes != nbytes:
            raise Refused(
                f"arena {slot} has {entry.arena.nbytes} bytes, {nbytes} were asked for",
                kept="the arena as it is",
                remedy="a changed kv_bytes needs a restart of the slot and of gpuowner",
            )
        return entry, entry.memory.reader_fd()

    def _make(self, slot: str, rank: int, nbytes: int) -> ArenaEntry:
        if not is_name(slot) or not 0 <= rank < MAX_RANKS:
            raise Refused(f"no arena can be named {slot[:64]!r} rank {rank}")
        if self._slots is not None and slot not in self._slots:
            raise SlotUnknown(f"no slot {slot!r} is configured here", remedy=f"one of {sorted(self._slots)}")
        if not 0 < nbytes <= MAX_ARENA:
            raise Refused(f"arena of {nbytes} bytes for slot {slot}", remedy="set kv_bytes of the slot")
        owner = self._keeping.generation
        memory = self._maker.create(f"kv-{slot}-{rank}", nbytes)
        try:
            name = self._keeping.keep(f"kv.{slot}.{rank}", memory.fd)
        except OSError:
            memory.close()
            raise
        fresh = core.Arena(slot, nbytes, epoch=(owner - 1) * EPOCHS_PER_LIFE, owner=owner)
        arena = ranks.epoch_of(fresh, (other.arena for other in self._siblings(slot, rank)))
        entry = self.entries[slot, rank] = ArenaEntry(arena, rank, memory, name)
        self._keeping.save()
        return entry

    def entry(self, slot: str, rank: int) -> ArenaEntry:
        if (slot, rank) not in self.entries:
            known = sorted({name for name, _ in self.entries})
            raise SlotUnknown(f"no arena of slot {slot[:64]!r} rank {rank} here", remedy=f"one of {known}")
        return self.entries[slot, rank]

    def acquire(self, slot: str, rank: int, stamp: core.Stamp, by: Caller) -> int:
        """The lease: a read-write descriptor for the one holder. Raises Fenced or LeaseRefused."""
        entry = self.entry(slot, rank)
        before = entry.arena
        after = core.arena_step(before, core.Acquire(stamp=stamp, peer=by.peer, who=by.who))
        ranks.lease_or_refuse(before, (other.arena for other in self._siblings(slot, rank)), by.who)
        fd = os.dup(entry.memory.fd)
        try:
            self._hold(entry, os.dup(by.pidfd), by.pid, procs.start_time(by.pid))
            self._become(entry, after)
        except OSError:  # it was not written down, so it is not told: nobody holds the lease
            os.close(fd)
            self._hold(entry, -1, 0, 0)
            entry.arena = before
            raise
        return fd

    def reclaim(self, slot: str, rank: int, stamp: core.Stamp, by: Caller) -> ArenaEntry:
        """The connection of a holder that this life has only known by its process. Raises Fenced or LeaseRefused."""
        entry = self.entry(slot, rank)
        same = by.pid == entry.pid and procs.start_time(by.pid) == entry.start_time and entry.holder_alive()
        entry.arena = core.arena_step(entry.arena, core.Reclaimed(stamp=stamp, peer=by.peer, same=same))
        return entry  # nothing durable changed: the next life will know the process again, not the connection

    def fence(self, slot: str, rank: int, event: core.ArenaEvent) -> ArenaEntry:
        """Apply an event of the supervisor; the holder is forgotten when the arena is FREE again."""
        entry = self.entry(slot, rank)
        after = core.arena_step(entry.arena, event)
        if after.state is core.ArenaState.FREE:
            siblings = self._siblings(slot, rank)
            after = ranks.epoch_of(after, (other.arena for other in siblings))
            for other in siblings:
                other.arena = ranks.lifted(other.arena, after)
        self._become(entry, after)
        return entry

    def _siblings(self, slot: str, rank: int) -> list[ArenaEntry]:
        """The arenas of the slot's other ranks."""
        return [row for (name, other), row in self.entries.items() if name == slot and other != rank]

    def peer_gone(self, peer: int) -> list[ArenaEntry]:
        """A connection ended: its leases go to FENCING at once. Returns the arenas that changed."""
        changed = []
        for entry in self.entries.values():
            after = core.arena_step(entry.arena, core.HolderDied(peer=peer))
            if after is not entry.arena:
                entry.arena = after
                self._keeping.note()
                changed.append(entry)
        return changed

    def process_gone(self, entry: ArenaEntry) -> bool:
        """The process of a holder that has not reclaimed yet has ended. True when that changed the arena."""
        after = core.arena_step(entry.arena, core.HolderDied(peer=None))
        changed = after is not entry.arena
        if changed:
            entry.arena = after
            self._keeping.note()
        return changed

    def adopt(self, row: ArenaRow, fd: int) -> ArenaEntry:
        """An arena of the last life. Raises OSError when the descriptor is not that memory. Not persisted yet."""
        memory = self._maker.adopt(fd, row.nbytes)
        before = core.Arena(row.slot, row.nbytes, row.state, row.epoch, who=row.who, reason=row.reason)
        entry = ArenaEntry(before, row.rank, memory, row.memory)
        if row.pid:
            try:
                self._hold(entry, procs.open_pidfd(row.pid, row.start_time), row.pid, row.start_time)
            except WorkerGone:
                self._hold(entry, -1, row.pid, row.start_time)
        event = core.ArenaAdopted(owner=self._keeping.generation, holder_alive=entry.holder_alive())
        entry.arena = core.arena_step(before, event)
        self.entries[row.slot, row.rank] = entry
        return entry

    def _become(self, entry: ArenaEntry, after: core.Arena) -> None:
        entry.arena = after
        if after.state is core.ArenaState.FREE:
            self._hold(entry, -1, 0, 0)
        self._keeping.save()

    @staticmethod
    def _hold(entry: ArenaEntry, pidfd: int, pid: int, start_time: int) -> None:
        if entry.holder_pidfd >= 0:
            os.close(entry.holder_pidfd)
        entry.holder_pidfd, entry.pid, entry.start_time = pidfd, pid, start_time
