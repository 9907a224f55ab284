"""States of weights and KV arenas: two total tables and one gate.

Pure: no I/O, clock or descriptors. Each (state, event) pair has a cell that lists the states it may lead
to; what is ignored and what is refused is written down, never implied. The shell (``vault``) holds the
descriptors and asks here before it acts.

Invariant R1: an arena has at most one holder; a new one is let in only from FREE, and FREE is reached
from LEASED only through FENCING with the old holder's process seen dead. Invariant R4: weights are
readable only while the bytes of their last sealed version are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from belayer.errors import BelayerError, Fenced, LeaseRefused, Refused, WeightsTorn


class ArenaState(StrEnum):
    FREE = "free"
    LEASED = "leased"
    FENCING = "fencing"
    QUARANTINED = "quarantined"


class WeightsState(StrEnum):
    BUILDING = "building"
    SEALED = "sealed"
    UPDATING = "updating"
    TORN = "torn"


@dataclass(frozen=True)
class Stamp:
    """What a mutating message claims to know: the life of the owner, and the epoch (arena) or version (weights)."""

    owner: int
    count: int


@dataclass(frozen=True)
class Acquire:
    """A worker on connection ``peer`` asks for the lease of the stamp's epoch."""

    stamp: Stamp
    peer: int
    who: str


@dataclass(frozen=True)
class Reclaimed:
    """A worker says on a new connection that it holds the lease; ``same`` is what its pid and start time say."""

    stamp: Stamp
    peer: int
    same: bool


@dataclass(frozen=True)
class HolderDied:
    """The connection ``peer`` ended or its process died; comes for every peer, holder or not. None: a holder died
    that has not reclaimed since an adoption."""

    peer: int | None


@dataclass(frozen=True)
class FenceBegun:
    stamp: Stamp


@dataclass(frozen=True)
class FenceEnded:
    """The supervisor saw the old tree dead; ``holder_alive`` is what the owner's own pidfd says."""

    stamp: Stamp
    holder_alive: bool


@dataclass(frozen=True)
class Quarantined:
    stamp: Stamp
    reason: str


@dataclass(frozen=True)
class Restored:
    stamp: Stamp
    holder_alive: bool


@dataclass(frozen=True)
class ArenaAdopted:
    """A new life of the owner, ``owner``, took the memory over and looked for the holder."""

    owner: int
    holder_alive: bool


ArenaEvent = Acquire | Reclaimed | HolderDied | FenceBegun | FenceEnded | Quarantined | Restored | ArenaAdopted


@dataclass(frozen=True)
class Built:
    """All bytes are written, hashed and sealed as ``version``."""

    version: int


@dataclass(frozen=True)
class BuildFailed:
    reason: str


@dataclass(frozen=True)
class UpdateBegun:
    """Connection ``peer`` will make the version after the stamp's. ``in_place``: over the bytes of the last one.
    ``rewrite``: it promises to write every byte, which is what TORN weights need."""

    stamp: Stamp
    peer: int
    in_place: bool
    rewrite: bool


@dataclass(frozen=True)
class CommitAsked:
    """The writer is done; from here on its death changes nothing. The stamp carries the version being made."""

    stamp: Stamp
    peer: int


@dataclass(frozen=True)
class Committed:
    """The owner hashed the new bytes and they are what the writer said."""

    version: int


@dataclass(frozen=True)
class Mismatched:
    """The owner hashed the new bytes and they are not what the writer said."""

    reason: str


@dataclass(frozen=True)
class Aborted:
    """The writer gives up; ``touched`` tells whether a byte of the last version may differ."""

    stamp: Stamp
    peer: int
    touched: bool


@dataclass(frozen=True)
class WriterDied:
    peer: int


@dataclass(frozen=True)
class RebuildBegun:
    stamp: Stamp


@dataclass(frozen=True)
class WeightsAdopted:
    """A new life of the owner, ``owner``, took the memory over; ``intact``: it hashes to the recorded digests."""

    owner: int
    intact: bool
    why: str = ""


@dataclass(frozen=True)
class SiblingTorn:
    """Another part of the model (its tensor-parallel ranks have one each) is torn or of another version: the model is
    torn as a whole, under ``version``, the highest of its parts."""

    version: int
    reason: str


WeightsEvent = (
    Built
    | BuildFailed
    | UpdateBegun
    | CommitAsked
    | Committed
    | Mismatched
    | Aborted
    | WriterDied
    | RebuildBegun
    | WeightsAdopted
    | SiblingTorn
)


@dataclass(frozen=True)
class Arena:
    """One slot's KV arena. ``peer``/``who`` name the holder, or in FENCING and QUARANTINED the last one; in LEASED
    ``peer`` is None from an adoption until the holder has reclaimed. ``owner``: the owner's generation."""

    slot: str
    nbytes: int
    state: ArenaState = ArenaState.FREE
    epoch: int = 0
    peer: int | None = None
    who: str = ""
    reason: str = ""
    owner: int = 1


@dataclass(frozen=True)
class Weights:
    """One model's weights. ``version`` is the last sealed one; ``whole``: its bytes are still those that were
    sealed. ``in_place``, ``peer``: of the update under way; ``peer`` is None once its commit was asked for."""

    model: str
    nbytes: int
    state: WeightsState = WeightsState.BUILDING
    version: int = 0
    whole: bool = False
    in_place: bool = False
    peer: int | None = None
    reason: str = ""
    owner: int = 1


@dataclass(frozen=True)
class Cell:
    """``to``: the states that the event may lead to. Empty: refused, with ``why``."""

    to: frozenset[StrEnum]
    why: str = ""


def _to(*states: StrEnum) -> Cell:
    return Cell(frozenset(states))


def _no(why: str) -> Cell:
    return Cell(frozenset(), why)


_A = ArenaState
ARENA_TABLE: Mapping[tuple[ArenaState, type], Cell] = {
    (_A.FREE, Acquire): _to(_A.LEASED),
    (_A.FREE, Reclaimed): _no("nobody holds it: ask for a lease"),
    (_A.FREE, HolderDied): _to(_A.FREE),
    (_A.FREE, FenceBegun): _no("there is no holder to fence"),
    (_A.FREE, FenceEnded): _no("no fence has begun"),
    (_A.FREE, Quarantined): _to(_A.QUARANTINED),
    (_A.FREE, Restored): _no("the arena is not quarantined"),
    (_A.FREE, ArenaAdopted): _to(_A.FREE),
    (_A.LEASED, Acquire): _no("it has a holder"),
    (_A.LEASED, Reclaimed): _to(_A.LEASED),
    (_A.LEASED, HolderDied): _to(_A.FENCING, _A.LEASED),
    (_A.LEASED, FenceBegun): _to(_A.FENCING),
    (_A.LEASED, FenceEnded): _no("no fence has begun"),
    (_A.LEASED, Quarantined): _no("its holder may still write: begin a fence first"),
    (_A.LEASED, Restored): _no("the arena is not quarantined"),
    (_A.LEASED, ArenaAdopted): _to(_A.LEASED, _A.FENCING),
    (_A.FENCING, Acquire): _no("its last holder has not been seen dead"),
    (_A.FENCING, Reclaimed): _no("its holder is being fenced"),
    (_A.FENCING, HolderDied): _to(_A.FENCING),
    (_A.FENCING, FenceBegun): _to(_A.FENCING),
    (_A.FENCING, FenceEnded): _to(_A.FREE),
    (_A.FENCING, Quarantined): _to(_A.QUARANTINED),
    (_A.FENCING, Restored): _no("the arena is not quarantined"),
    (_A.FENCING, ArenaAdopted): _to(_A.FENCING),
    (_A.QUARANTINED, Acquire): _no("it is quarantined"),
    (_A.QUARANTINED, Reclaimed): _no("it is quarantined"),
    (_A.QUARANTINED, HolderDied): _to(_A.QUARANTINED),
    (_A.QUARANTINED, FenceBegun): _no("it is quarantined"),
    (_A.QUARANTINED, FenceEnded): _no("it is quarantined"),
    (_A.QUARANTINED, Quarantined): _to(_A.QUARANTINED),
    (_A.QUARANTINED, Restored): _to(_A.FREE),
    (_A.QUARANTINED, ArenaAdopted): _to(_A.QUARANTINED),
}

_W = WeightsState
WEIGHTS_TABLE: Mapping[tuple[WeightsState, type], Cell] = {
    (_W.BUILDING, Built): _to(_W.SEALED),
    (_W.BUILDING, BuildFailed): _to(_W.TORN),
    (_W.BUILDING, UpdateBegun): _no("they are still being loaded"),
    (_W.BUILDING, CommitAsked): _no("no update has begun"),
    (_W.BUILDING, Committed): _no("no update has begun"),
    (_W.BUILDING, Mismatched): _no("no update has begun"),
    (_W.BUILDING, Aborted): _no("no update has begun"),
    (_W.BUILDING, WriterDied): _to(_W.BUILDING),
    (_W.BUILDING, RebuildBegun): _no("they are already being loaded"),
    (_W.BUILDING, WeightsAdopted): _to(_W.TORN),
    (_W.BUILDING, SiblingTorn): _no("they are still being loaded"),
    (_W.SEALED, Built): _no("they are sealed"),
    (_W.SEALED, BuildFailed): _no("they are sealed"),
    (_W.SEALED, UpdateBegun): _to(_W.UPDATING),
    (_W.SEALED, CommitAsked): _no("no update has begun"),
    (_W.SEALED, Committed): _no("no update has begun"),
    (_W.SEALED, Mismatched): _no("no update has begun"),
    (_W.SEALED, Aborted): _no("no update has begun"),
    (_W.SEALED, WriterDied): _to(_W.SEALED),
    (_W.SEALED, RebuildBegun): _no("they are sealed: begin an update instead"),
    (_W.SEALED, WeightsAdopted): _to(_W.SEALED, _W.TORN),
    (_W.SEALED, SiblingTorn): _to(_W.TORN),
    (_W.UPDATING, Built): _no("an update is under way"),
    (_W.UPDATING, BuildFailed): _no("an update is under way"),
    (_W.UPDATING, UpdateBegun): _no("another update is under way"),
    (_W.UPDATING, CommitAsked): _to(_W.UPDATING),
    (_W.UPDATING, Committed): _to(_W.SEALED),
    (_W.UPDATING, Mismatched): _to(_W.SEALED, _W.TORN),
    (_W.UPDATING, Aborted): _to(_W.SEALED, _W.TORN),
    (_W.UPDATING, WriterDied): _to(_W.TORN, _W.SEALED, _W.UPDATING),
    (_W.UPDATING, RebuildBegun): _no("an update is under way"),
    (_W.UPDATING, WeightsAdopted): _to(_W.SEALED, _W.TORN),
    (_W.UPDATING, SiblingTorn): _no("an update is under way, and ends for all parts"),
    (_W.TORN, Built): _no("no build has begun"),
    (_W.TORN, BuildFailed): _no("no build has begun"),
    (_W.TORN, UpdateBegun): _to(_W.UPDATING),
    (_W.TORN, CommitAsked): _no("no update has begun"),
    (_W.TORN, Committed): _no("no update has begun"),
    (_W.TORN, Mismatched): _no("no update has begun"),
    (_W.TORN, Aborted): _no("no update has begun"),
    (_W.TORN, WriterDied): _to(_W.TORN),
    (_W.TORN, RebuildBegun): _to(_W.BUILDING),
    (_W.TORN, WeightsAdopted): _to(_W.TORN),
    (_W.TORN, SiblingTorn): _to(_W.TORN),
}


def gate(what: str, holds: Stamp, carried: Stamp) -> None:
    """The one gate of mutating messages: another owner generation, epoch or version than the one that holds is
    Fenced, whatever the state. Its sender decided on what is no longer so."""
    if carried != holds:
        raise Fenced(
            f"{what} is at {holds.count} in owner generation {holds.owner}, "
            f"the message carries {carried.count} and {carried.owner}",
            kept=f"{what} as it is",
            remedy="ask for the owner's status and begin again from there",
        )


def arena_step(arena: Arena, event: ArenaEvent) -> Arena:
    """The arena after ``event``. Raises Fenced (stale stamp), LeaseRefused (Acquire, Reclaimed) or Refused, state
    unchanged."""
    if not isinstance(event, HolderDied | ArenaAdopted):
        gate(f"epoch of arena {arena.slot}", Stamp(arena.owner, arena.epoch), event.stamp)
    cell = ARENA_TABLE[arena.state, type(event)]
    if not cell.to:
        kind = LeaseRefused if isinstance(event, Acquire | Reclaimed) else Refused
        raise kind(f"arena {arena.slot} is {arena.state.value} at epoch {arena.epoch}: {cell.why}")
    after = _arena_after(arena, event)
    if after.state not in cell.to:
        raise BelayerError(f"arena table broken: {arena.state} + {type(event).__name__} -> {after.state}")
    return after


def _arena_after(arena: Arena, event: ArenaEvent) -> Arena:
    match event:
        case Acquire():
            return replace(arena, state=_A.LEASED, peer=event.peer, who=event.who)
        case Reclaimed():
            if not event.same:
                raise LeaseRefused(f"arena {arena.slot} is leased to {arena.who}, which is another process")
            return replace(arena, peer=event.peer)
        case HolderDied():
            if arena.state is _A.LEASED and event.peer == arena.peer:
                return replace(arena, state=_A.FENCING)
            return arena
        case FenceBegun():
            return replace(arena, state=_A.FENCING)
        case FenceEnded():
            _dead_or_refuse(arena, event.holder_alive)
            return _freed(arena)
        case Quarantined():
            return replace(arena, state=_A.QUARANTINED, reason=event.reason)
        case Restored():
            _dead_or_refuse(arena, event.holder_alive)
            return _freed(arena)
        case ArenaAdopted():
            lost = arena.state is _A.LEASED and not event.holder_alive
            return replace(arena, owner=event.owner, peer=None, state=_A.FENCING if lost else arena.state)


def _freed(arena: Arena) -> Arena:
    return replace(arena, state=_A.FREE, epoch=arena.epoch + 1, peer=None, who="", reason="")


def _dead_or_refuse(arena: Arena, alive: bool) -> None:
    if alive:
        raise Refused(
            f"arena {arena.slot}: its last holder {arena.who} is still alive by its pidfd",
            kept=f"the arena stays {arena.state.value} at epoch {arena.epoch}",
            remedy="kill the whole tree of the holder and wait for it",
        )


def weights_step(weights: Weights, event: WeightsEvent) -> Weights:
    """The weights after ``event``. Raises Fenced (stale stamp or another writer), WeightsTorn or Refused, state
    unchanged."""
    if isinstance(event, UpdateBegun | RebuildBegun):
        gate(f"version of {weights.model}", Stamp(weights.owner, weights.version), event.stamp)
    elif isinstance(event, CommitAsked | Aborted):
        gate(f"next version of {weights.model}", Stamp(weights.owner, weights.version + 1), event.stamp)
    cell = WEIGHTS_TABLE[weights.state, type(event)]
    if not cell.to:
        kind = WeightsTorn if weights.state is _W.TORN else Refused
        raise kind(f"weights of {weights.model} are {weights.state.value}: {cell.why}")
    after = _weights_after(weights, event)
    if after.state not in cell.to:
        raise BelayerError(f"weights table broken: {weights.state} + {type(event).__name__} -> {after.state}")
    return after


def _weights_after(weights: Weights, event: WeightsEvent) -> Weights:
    match event:
        case Built():
            return _sealed(weights, event.version)
        case BuildFailed():
            return replace(weights, state=_W.TORN, whole=False, peer=None, reason=event.reason)
        case UpdateBegun():
            return _updating(weights, event)
        case CommitAsked():
            _writer_or_refuse(weights, event.peer)
            return replace(weights, peer=None)
        case Committed():
            if weights.peer is not None or event.version != weights.version + 1:
                raise BelayerError(f"commit of {weights.model} v{event.version} that nobody asked for")
            return _sealed(weights, event.version)
        case Mismatched():
            return _given_up(weights, event.reason)
        case Aborted():
            _writer_or_refuse(weights, event.peer)
            untouched = weights.in_place and not event.touched
            return _given_up(replace(weights, whole=weights.whole or untouched), "update aborted")
        case WriterDied():
            if weights.state is _W.UPDATING and event.peer == weights.peer:
                return _given_up(weights, "the writer died inside an update")
            return weights
        case RebuildBegun():
            return replace(weights, state=_W.BUILDING, reason="")
        case WeightsAdopted():
            return _adopted(weights, event)
        case SiblingTorn():
            reason = weights.reason if weights.state is _W.TORN else event.reason
            return replace(weights, state=_W.TORN, version=event.version, whole=False, reason=reason)


def _sealed(weights: Weights, version: int) -> Weights:
    return replace(weights, state=_W.SEALED, version=version, whole=True, in_place=False, peer=None, reason="")


def _updating(weights: Weights, event: UpdateBegun) -> Weights:
    if weights.state is _W.TORN and not event.rewrite:
        raise WeightsTorn(
            f"weights of {weights.model} are torn: an update of a part cannot make them whole",
            remedy="publish them whole: an update that writes every byte, or a republish from their files",
        )
    # From here on a byte of the last version may differ, and nobody is told when: not whole before the first write.
    whole = weights.whole and not event.in_place
    return replace(weights, state=_W.UPDATING, peer=event.peer, in_place=event.in_place, whole=whole, reason="")


def _given_up(weights: Weights, reason: str) -> Weights:
    """Back to the last version where its bytes are whole, else TORN."""
    if weights.whole:
        return replace(weights, state=_W.SEALED, peer=None, in_place=False, reason="")
    return replace(weights, state=_W.TORN, peer=None, in_place=False, reason=reason)


def _adopted(weights: Weights, event: WeightsAdopted) -> Weights:
    mine = replace(weights, owner=event.owner, peer=None)
    if weights.state is _W.TORN:
        return mine
    if weights.state is _W.BUILDING:
        return replace(mine, state=_W.TORN, whole=False, reason="the owner died while it loaded them")
    if weights.whole and not event.intact:
        why = event.why or "their bytes differ from their digests"
        return replace(mine, state=_W.TORN, whole=False, in_place=False, reason=why)
    return _given_up(mine, "the owner died inside an update")


def _writer_or_refuse(weights: Weights, peer: int) -> None:
    if weights.state is _W.UPDATING and peer != weights.peer:
        raise Fenced(f"the update of {weights.model} belongs to another writer, or its commit is under way")


def readable(weights: Weights) -> None:
    """Raise WeightsTorn unless the bytes of the last version are whole (promise R4). While the next version is
    written beside it, the last one still is."""
    if not weights.whole or weights.state not in (_W.SEALED, _W.UPDATING):
        raise WeightsTorn(
            f"weights of {weights.model} are {weights.state.value}, last whole version {weights.version}"
            + (f": {weights.reason}" if weights.reason else ""),
            remedy="publish a whole version first",
        )
