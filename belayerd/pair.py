"""The words of a slot: its joint states main x shadow, what can happen to it, what it can ask for. Data only.

belayerd.pair_table decides; the shell performs. Effects are performed in order, and each ``Perform`` or ``Spawn``
ends in exactly one event.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from belayer.messages.worker import Oracle
from belayerd.handover import Action


class State(StrEnum):
    """Joint states; in brackets (main, shadow)."""

    EMPTY = "empty"  # (none, none)
    ARMING = "arming"  # (none, starting): no main serves; a worker is on its way
    HANDOVER = "handover"  # (none or fenced, promoting): the steps run
    EXPOSED = "exposed"  # (serving, none)
    REARMING = "rearming"  # (serving, starting)
    PROTECTED = "protected"  # (serving, ready)
    FENCING = "fencing"  # (lost, none or starting): main lost and no shadow ready; the fence runs first
    RESERVE = "reserve"  # (none, ready): a spare slot; its worker takes the place of a quarantined slot when called
    QUARANTINED = "quarantined"  # (none, none): the device is excluded until an operator restores it


class Cause(StrEnum):
    START = "start"
    DEATH = "death"
    HANG = "hang"
    STUCK = "stuck"
    WEIGHTS = "weights"  # it could not be brought to the sealed weights, which says nothing about the device
    OPERATOR = "operator"


class Ref(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process. Pid and start time together name it."""

    worker_id: str
    pid: int
    start_time: int


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    action: Action
    ms: float
    detail: str = ""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A handover under way: ``done`` actions of ``plan`` are complete. ``old`` is None for a first main.
    ``detected_at``: monotonic. ``serial`` counts the actions begun, so that the end of an abandoned one is stale.
    ``waits``: the action has failed and is begun again after a Wait."""

    incident_id: str
    cause: Cause
    detail: str
    plan: tuple[Action, ...]
    done: int
    old: Ref | None
    detected_at: float
    serial: int = 0
    waits: bool = False
    timings: tuple[Timing, ...] = ()

    @property
    def action(self) -> Action | None:
        return self.plan[self.done] if self.done < len(self.plan) else None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """All that must survive belayerd. ``generation``: of the last main. ``failed_starts``: in a row.
    ``last_failover``: monotonic time of the last handover that a failure caused (same boot only). ``spare``: not called
    yet, so no main is made of a ready worker."""

    slot: str
    state: State = State.EMPTY
    generation: int = 0
    main: Ref | None = None
    shadow: Ref | None = None
    oracle: Oracle | None = None
    running: Running | None = None
    handovers: int = 0
    failed_starts: int = 0
    last_failover: float | None = None
    reason: str = ""
    boot_id: str = ""
    spare: bool = False

    @property
    def protected(self) -> bool:
        return self.state is State.PROTECTED


# --- events -----------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """``worker_id`` fences: an event about a worker that the pair no longer has is stale and ignored."""


class Wanted(Event, frozen=True, kw_only=True):
    """The slot should run (daemon start)."""


class Spawned(Event, frozen=True, kw_only=True):
    worker: Ref


class SpawnFailed(Event, frozen=True, kw_only=True):
    reason: str


class StandbyReady(Event, frozen=True, kw_only=True):
    worker_id: str
    oracle: Oracle


class WorkerLost(Event, frozen=True, kw_only=True):
    """Death (pidfd) or hang (heartbeat): a hung worker is as good as dead, and is made so by the fence."""

    worker_id: str
    cause: Cause
    detail: str
    incident_id: str


class ActionDone(Event, frozen=True, kw_only=True):
    action: Action
    serial: int
    ms: float
    detail: str = ""
    oracle: Oracle | None = None


class ActionFailed(Event, frozen=True, kw_only=True):
    """``worker_gone``: the candidate died under the action, which says nothing about the device. ``not_yet``: what it
    needs is being made (weights that are being written), which says nothing about the device either."""

    action: Action
    serial: int
    reason: str
    worker_gone: bool = False
    not_yet: bool = False


class HandoverAsked(Event, frozen=True, kw_only=True):
    reason: str
    incident_id: str


class RestoreAsked(Event, frozen=True, kw_only=True):
    """The operator says that the device is good again."""


class BackoffOver(Event, frozen=True, kw_only=True):
    """The wait before another start, or before a RETRY action, is over."""


class RouterBack(Event, frozen=True, kw_only=True):
    """The router is another instance than before: it must be told again who serves."""


class ArenaGone(Event, frozen=True, kw_only=True):
    """The kv owner is another life and does not hold the arena that the ready shadow maps."""


class Called(Event, frozen=True, kw_only=True):
    """A slot of the same model was quarantined: this spare takes its place."""


class Followed(Event, frozen=True, kw_only=True):
    """``worker_id`` computes with another weight version now, and this is its oracle."""

    worker_id: str
    oracle: Oracle


# --- effects ----------------------------------------------------------------------------------------------------


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Save(Effect, frozen=True, kw_only=True):
    pass


class Spawn(Effect, frozen=True, kw_only=True):
    """Ends in Spawned, later StandbyReady or WorkerLost; or SpawnFailed. ``yielding``: interrupted requests come
    first; the start waits (bounded) until the router has seen a token of one, since a starting engine takes a core."""

    yielding: bool = False


class Perform(Effect, frozen=True, kw_only=True):
    """Ends in ActionDone or ActionFailed. ``generation``: the one being made; the old main has the one before."""

    action: Action
    serial: int
    worker: Ref | None
    old: Ref | None
    generation: int


class Kill(Effect, frozen=True, kw_only=True):
    """Kill a tree that holds nothing (a shadow, or a candidate that failed the gate). Ends in no event."""

    worker: Ref


class Withdraw(Effect, frozen=True, kw_only=True):
    """Tell the router that the slot is gone, so that its requests move. Ends in no event."""

    generation: int
    reason: str


class Announce(Effect, frozen=True, kw_only=True):
    """Tell the router again who serves (idempotent). Ends in no event."""

    worker: Ref
    generation: int


class QuarantineArena(Effect, frozen=True, kw_only=True):
    reason: str


class RestoreArena(Effect, frozen=True, kw_only=True):
    pass


class Wait(Effect, frozen=True, kw_only=True):
    """Ends in BackoffOver after ``seconds``."""

    seconds: float


class Record(Effect, frozen=True, kw_only=True):
    """Write the incident as it stands; ``outcome`` "open" until it ends."""

    running: Running
    outcome: str


class Alert(Effect, frozen=True, kw_only=True):
    reason: str


class Refuse(Exception):
    """The event is an operator's wish that this state cannot grant; nothing changes."""


EVENTS: tuple[type[Event], ...] = (
    Wanted,
    Spawned,
    SpawnFailed,
    StandbyReady,
    WorkerLost,
    ActionDone,
    ActionFailed,
    HandoverAsked,
    RestoreAsked,
    BackoffOver,
    RouterBack,
    ArenaGone,
    Called,
    Followed,
)
