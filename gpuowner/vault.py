"""What the owner holds: descriptors beside the states of ``core``. It decides nothing itself.

Every method that hands out a descriptor hands out a new one, which the caller closes after sending it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from belayer import procs
from belayer.errors import BelayerError, Refused, SlotUnknown, WeightsBroken
from belayer.messages.owner import ArenaInfo, WeightsGrant, WeightsInfo
from gpuowner import core
from gpuowner.backends.memfd import Memfd
from gpuowner.loader import Loaded, Progress, load

# Epochs of one life of the owner; a later life begins above all of an earlier one, so that no stale epoch fits again.
EPOCHS_PER_LIFE = 1 << 20

# vLLM asks for less than the configured bytes (whole blocks); an absurd request is a bug or an attack.
MAX_ARENA = 1 << 42


@dataclass
class ArenaEntry:
    """``holder_pidfd``: of the holder, kept past its connection until the arena is FREE again."""

    arena: core.Arena
    memory: Memfd
    holder_pidfd: int = -1

    def holder_alive(self) -> bool:
        return self.holder_pidfd >= 0 and not procs.is_dead(self.holder_pidfd)

    def info(self) -> ArenaInfo:
        arena = self.arena
        return ArenaInfo(
            slot=arena.slot,
            state=arena.state.value,
            epoch=arena.epoch,
            nbytes=arena.nbytes,
            holder=arena.who,
            holder_alive=self.holder_alive(),
        )


@dataclass
class WeightsEntry:
    """``readers``: connection -> who, for the status."""

    weights: core.Weights
    loaded: Loaded | None = None
    readers: dict[int, str] = field(default_factory=dict)

    def info(self) -> WeightsInfo:
        loaded = self.loaded
        return WeightsInfo(
            model=self.weights.model,
            state=self.weights.state.value,
            version=self.weights.version,
            nbytes=self.weights.nbytes,
            digest=loaded.digest if loaded else "",
            readers=tuple(sorted(self.readers.values())),
            load_ms=loaded.load_ms if loaded else 0.0,
            load_mb_s=loaded.mb_per_s if loaded else 0.0,
        )


class Vault:
    """Weights and arenas of one owner instance; ``generation`` is this life of the owner."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.weights: dict[str, WeightsEntry] = {}
        self.arenas: dict[str, ArenaEntry] = {}

    def load_weights(self, model: str, folder: Path, dtype: str, progress: Progress) -> WeightsEntry:
        """BUILDING to SEALED(1). Raises WeightsBroken with the model left TORN and nothing allocated."""
        entry = self.weights[model] = WeightsEntry(core.Weights(model=model, nbytes=0))
        try:
            loaded = load(model, folder, dtype, progress)
        except BelayerError as why:
            entry.weights = core.weights_step(entry.weights, core.BuildFailed(reason=why.message))
            raise
        entry.loaded = loaded
        sized = core.Weights(model=model, nbytes=loaded.memory.nbytes)
        entry.weights = core.weights_step(sized, core.Built(version=1))
        return entry

    def attach(self, model: str, peer: int, who: str) -> tuple[WeightsGrant, int]:
        """Grant and a read-only descriptor. Raises WeightsBroken (unknown model) or WeightsTorn."""
        entry = self.weights.get(model)
        if entry is None:
            raise WeightsBroken(f"no model named {model!r} here", remedy=f"one of {sorted(self.weights)}")
        core.readable(entry.weights)
        if entry.loaded is None:
            raise BelayerError(f"weights of {model} are sealed without memory")
        loaded = entry.loaded
        entry.readers[peer] = who
        grant = WeightsGrant(
            model=model,
            version=entry.weights.version,
            owner_generation=self.generation,
            nbytes=loaded.memory.nbytes,
            layout=loaded.layout,
            chunk_digests=loaded.chunks,
            digest=loaded.digest,
        )
        return grant, loaded.memory.reader_fd()

    def open_arena(self, slot: str, nbytes: int) -> tuple[ArenaEntry, int]:
        """The arena (made FREE the first time, at epoch 0 in the owner's first life) and a read-only descriptor."""
        entry = self.arenas.get(slot)
        if entry is None:
            if not 0 < nbytes <= MAX_ARENA:
                raise Refused(f"arena of {nbytes} bytes for slot {slot}", remedy="set kv_bytes of the slot")
            arena = core.Arena(slot, nbytes, epoch=(self.generation - 1) * EPOCHS_PER_LIFE)
            entry = self.arenas[slot] = ArenaEntry(arena, Memfd(f"kv-{slot}", nbytes))
        if entry.arena.nbytes != nbytes:
            raise Refused(
                f"arena {slot} has {entry.arena.nbytes} bytes, {nbytes} were asked for",
                kept="the arena as it is",
                remedy="a changed kv_bytes needs a restart of the slot and of gpuowner",
            )
        return entry, entry.memory.reader_fd()

    def entry(self, slot: str) -> ArenaEntry:
        if slot not in self.arenas:
            raise SlotUnknown(f"no arena of slot {slot!r} here", remedy=f"one of {sorted(self.arenas)}")
        return self.arenas[slot]

    def acquire(self, slot: str, epoch: int, peer: int, who: str, pidfd: int) -> int:
        """The lease: a read-write descriptor for the one holder. Raises Fenced or LeaseRefused."""
        entry = self.entry(slot)
        entry.arena = core.arena_step(entry.arena, core.Acquire(epoch=epoch, peer=peer, who=who))
        entry.holder_pidfd = os.dup(pidfd)
        return os.dup(entry.memory.fd)

    def fence(self, slot: str, event: core.ArenaEvent) -> ArenaEntry:
        """Apply an event of the supervisor; the holder's pidfd is dropped when the arena is FREE again."""
        entry = self.entry(slot)
        entry.arena = core.arena_step(entry.arena, event)
        if entry.arena.state is core.ArenaState.FREE and entry.holder_pidfd >= 0:
            os.close(entry.holder_pidfd)
            entry.holder_pidfd = -1
        return entry

    def peer_gone(self, peer: int) -> list[ArenaEntry]:
        """A connection ended: its leases go to FENCING at once. Returns the arenas that changed."""
        changed = []
        for entry in self.arenas.values():
            after = core.arena_step(entry.arena, core.HolderDied(peer=peer))
            if after is not entry.arena:
                entry.arena = after
                changed.append(entry)
        for weights in self.weights.values():
            weights.readers.pop(peer, None)
            weights.weights = core.weights_step(weights.weights, core.WriterDied(peer=peer))
        return changed
