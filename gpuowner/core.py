"""States of weights and KV arenas: two total tables and one gate.

Pure: no I/O, clock or descriptors. Each (state, event) pair has a cell that lists the states it may lead
to; what is ignored and what is refused is written down, never implied. The shell (``vault``) holds the
descriptors and asks here before it acts.

Invariant R1: an arena has at most one holder; a new one is let in only from FREE, and FREE is reached
from LEASED only through FENCING with the old holder's process seen dead. Invariant R4: weights are
readable only in SEALED.
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
class Acquire:
    """A worker on connection ``peer`` asks for the lease of ``epoch``."""

    epoch: int
    peer: int
    who: str


@dataclass(frozen=True)
class HolderDied:
    """The connection ``peer`` ended or its process died; comes for every peer, holder or not."""

    peer: int


@dataclass(frozen=True)
class FenceBegun:
    epoch: int


@dataclass(frozen=True)
class FenceEnded:
    """The supervisor saw the old tree dead; ``holder_alive`` is what the owner's own pidfd says."""

    epoch: int
    holder_alive: bool


@dataclass(frozen=True)
class Quarantined:
    epoch: int
    reason: str


@dataclass(frozen=True)
class Restored:
    epoch: int
    holder_alive: bool


ArenaEvent = Acquire | HolderDied | FenceBegun | FenceEnded | Quarantined | Restored


@dataclass(frozen=True)
class Built:
    """All bytes are written, hashed and sealed as ``version``."""

    version: int


@dataclass(frozen=True)
class BuildFailed:
    reason: str


@dataclass(frozen=True)
class UpdateBegun:
    """One writer (connection ``peer``) may change the bytes; ``version`` is the one it will make."""

    version: int
    peer: int


@dataclass(frozen=True)
class Committed:
    version: int
    peer: int


@dataclass(frozen=True)
class Aborted:
    """The writer gives up; ``touched`` tells whether a byte of the mapping may differ from the sealed
    version."""

    peer: int
    touched: bool


@dataclass(frozen=True)
class WriterDied:
    peer: int


@dataclass(frozen=True)
class RebuildBegun:
    pass


WeightsEvent = Built | BuildFailed | UpdateBegun | Committed | Aborted | WriterDied | RebuildBegun


@dataclass(frozen=True)
class Arena:
    """One slot's KV arena. ``peer``/``who`` name the holder, or in FENCING and QUARANTINED the last one."""

    slot: str
    nbytes: int
    state: ArenaState = ArenaState.FREE
    epoch: int = 0
    peer: int | None = None
    who: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Weights:
    """One model's weights. ``version`` is the sealed one, or the last sealed one while UPDATING or TORN."""

    model: str
    nbytes: int
    state: WeightsState = WeightsState.BUILDING
    version: int = 0
    peer: int | None = None
    reason: str = ""


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
    (_A.FREE, HolderDied): _to(_A.FREE),
    (_A.FREE, FenceBegun): _no("there is no holder to fence"),
    (_A.FREE, FenceEnded): _no("no fence has begun"),
    (_A.FREE, Quarantined): _to(_A.QUARANTINED),
    (_A.FREE, Restored): _no("the arena is not quarantined"),
    (_A.LEASED, Acquire): _no("it has a holder"),
    (_A.LEASED, HolderDied): _to(_A.FENCING, _A.LEASED),
    (_A.LEASED, FenceBegun): _to(_A.FENCING),
    (_A.LEASED, FenceEnded): _no("no fence has begun"),
    (_A.LEASED, Quarantined): _no("its holder may still write: begin a fence first"),
    (_A.LEASED, Restored): _no("the arena is not quarantined"),
    (_A.FENCING, Acquire): _no("its last holder has not been seen dead"),
    (_A.FENCING, HolderDied): _to(_A.FENCING),
    (_A.FENCING, FenceBegun): _to(_A.FENCING),
    (_A.FENCING, FenceEnded): _to(_A.FREE),
    (_A.FENCING, Quarantined): _to(_A.QUARANTINED),
    (_A.FENCING, Restored): _no("the arena is not quarantined"),
    (_A.QUARANTINED, Acquire): _no("it is quarantined"),
    (_A.QUARANTINED, HolderDied): _to(_A.QUARANTINED),
    (_A.QUARANTINED, FenceBegun): _no("it is quarantined"),
    (_A.QUARANTINED, FenceEnded): _no("it is quarantined"),
    (_A.QUARANTINED, Quarantined): _to(_A.QUARANTINED),
    (_A.QUARANTINED, Restored): _to(_A.FREE),
}

_W = WeightsState
WEIGHTS_TABLE: Mapping[tuple[WeightsState, type], Cell] = {
    (_W.BUILDING, Built): _to(_W.SEALED),
    (_W.BUILDING, BuildFailed): _to(_W.TORN),
    (_W.BUILDING, UpdateBegun): _no("they are still being loaded"),
    (_W.BUILDING, Committed): _no("no update has begun"),
    (_W.BUILDING, Aborted): _no("no update has begun"),
    (_W.BUILDING, WriterDied): _to(_W.BUILDING),
    (_W.BUILDING, RebuildBegun): _no("they are already being loaded"),
    (_W.SEALED, Built): _no("they are sealed"),
    (_W.SEALED, BuildFailed): _no("they are sealed"),
    (_W.SEALED, UpdateBegun): _to(_W.UPDATING),
    (_W.SEALED, Committed): _no("no update has begun"),
    (_W.SEALED, Aborted): _no("no update has begun"),
    (_W.SEALED, WriterDied): _to(_W.SEALED),
    (_W.SEALED, RebuildBegun): _no("they are sealed: begin an update instead"),
    (_W.UPDATING, Built): _no("an update is under way"),
    (_W.UPDATING, BuildFailed): _no("an update is under way"),
    (_W.UPDATING, UpdateBegun): _no("another update is under way"),
    (_W.UPDATING, Committed): _to(_W.SEALED),
    (_W.UPDATING, Aborted): _to(_W.SEALED, _W.TORN),
    (_W.UPDATING, WriterDied): _to(_W.TORN, _W.UPDATING),
    (_W.UPDATING, RebuildBegun): _no("an update is under way"),
    (_W.TORN, Built): _no("no build has begun"),
    (_W.TORN, BuildFailed): _no("no build has begun"),
    (_W.TORN, UpdateBegun): _no("they are torn: publish them whole again"),
    (_W.TORN, Committed): _no("no update has begun"),
    (_W.TORN, Aborted): _no("no update has begun"),
    (_W.TORN, WriterDied): _to(_W.TORN),
    (_W.TORN, RebuildBegun): _to(_W.BUILDING),
}


def gate(arena: Arena, epoch: int) -> None:
    """The one gate of arena messages: another epoch than the arena's is Fenced, whatever the state."""
    if epoch != arena.epoch:
        raise Fenced(
            f"arena {arena.slot} is at epoch {arena.epoch}, the message carries {epoch}",
            kept="the arena as it is",
            remedy="ask for the owner's status and begin again from there",
        )


def arena_step(arena: Arena, event: ArenaEvent) -> Arena:
    """The arena after ``event``. Raises Fenced (other epoch), LeaseRefused (Acquire) or Refused, state
    unchanged."""
    if not isinstance(event, HolderDied):
        gate(arena, event.epoch)
    cell = ARENA_TABLE[arena.state, type(event)]
    if not cell.to:
        kind = LeaseRefused if isinstance(event, Acquire) else Refused
        raise kind(f"arena {arena.slot} is {arena.state.value} at epoch {arena.epoch}: {cell.why}")
    after = _arena_after(arena, event)
    if after.state not in cell.to:
        raise BelayerError(f"arena table broken: {arena.state} + {type(event).__name__} -> {after.state}")
    return after


def _arena_after(arena: Arena, event: ArenaEvent) -> Arena:
    match event:
        case Acquire():
            return replace(arena, state=_A.LEASED, peer=event.peer, who=event.who)
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
    """The weights after ``event``. Raises Fenced (another writer or version) or Refused, state unchanged."""
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
            return replace(weights, state=_W.SEALED, version=event.version, peer=None, reason="")
        case BuildFailed():
            return replace(weights, state=_W.TORN, peer=None, reason=event.reason)
        case UpdateBegun():
            _next_version_or_refuse(weights, event.version)
            return replace(weights, state=_W.UPDATING, peer=event.peer)
        case Committed():
            _writer_or_refuse(weights, event.peer)
            _next_version_or_refuse(weights, event.version)
            return replace(weights, state=_W.SEALED, version=event.version, peer=None)
        case Aborted():
            _writer_or_refuse(weights, event.peer)
            state = _W.TORN if event.touched else _W.SEALED
            return replace(weights, state=state, peer=None, reason="update aborted" if event.touched else "")
        case WriterDied():
            if weights.state is _W.UPDATING and event.peer == weights.peer:
                return replace(weights, state=_W.TORN, peer=None, reason="the writer died inside an update")
            return weights
        case RebuildBegun():
            return replace(weights, state=_W.BUILDING, reason="")


def _next_version_or_refuse(weights: Weights, version: int) -> None:
    if version != weights.version + 1:
        raise Fenced(f"weights of {weights.model} are at version {weights.version}: {version} is not the next one")


def _writer_or_refuse(weights: Weights, peer: int) -> None:
    if peer != weights.peer:
        raise Fenced(f"the update of {weights.model} belongs to another writer")


def readable(weights: Weights) -> None:
    """Raise WeightsTorn unless the weights are SEALED (promise R4: only whole weights)."""
    if weights.state is not _W.SEALED:
        raise WeightsTorn(
            f"weights of {weights.model} are {weights.state.value}, last whole version {weights.version}"
            + (f": {weights.reason}" if weights.reason else ""),
            remedy="publish a whole version first",
        )
