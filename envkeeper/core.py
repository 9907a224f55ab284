"""The states of a sandbox: a total table. Pure: no I/O, clock, randomness or logging.

Every pair of state and event is written, also those that are refused or mean nothing; what is missing from the table is
a bug that the import finds. ``effects`` are what the shell does, in this order; where an order matters it says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from belayer.errors import ErrorCode


class State(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    ACTING = "acting"  # an action is in flight
    CAPTURING = "capturing"  # frozen or about to be; publishing a captured copy is no state: actions go on
    LOST = "lost"  # dead, or of unknown fate: only a restore leads on
    RESTORING = "restoring"
    DESTROYED = "destroyed"


class Event(StrEnum):
    CREATED = "created"
    CREATE_FAILED = "create_failed"
    ACT = "act"
    DECLINED = "declined"  # the agent took the action for impossible: nothing was begun
    COMMITTED = "committed"
    FATE_UNKNOWN = "fate_unknown"  # the action's end was not seen
    CAPTURE = "capture"
    CAPTURED = "captured"
    CAPTURE_FAILED = "capture_failed"
    DIED = "died"
    RESTORE = "restore"
    PROVED = "proved"
    RESTORE_FAILED = "restore_failed"
    DESTROY = "destroy"


class Effect(StrEnum):
    MAKE = "make"
    RECORD = "record"
    RUN = "run"
    RELEASE_OBSERVATION = "release_observation"
    FREEZE_AND_COPY = "freeze_and_copy"
    PUBLISH = "publish"
    DISCARD = "discard"
    TAKE_CLAIM = "take_claim"
    FENCE = "fence"
    BRING_BACK = "bring_back"
    RELEASE_CLAIM = "release_claim"
    TELL_LOST = "tell_lost"
    SERVE = "serve"
    REMOVE_CONTAINER = "remove_container"
    REMOVE_CHECKPOINTS = "remove_checkpoints"


@dataclass(frozen=True, slots=True)
class Go:
    """To ``state``, doing ``effects`` in order."""

    state: State
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is declined with ``code``; the state stays."""

    code: ErrorCode
    why: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """Means nothing here, and ``why``."""

    why: str


Decision = Go | Refuse | Ignore

_S, _E, _F = State, Event, Effect

# Record before the observation is released: after a kill -9 of the daemon the agent's own count of finished actions
# is compared with the record, and an observation that was seen must be in it.
_COMMIT = Go(_S.RUNNING, (_F.RECORD, _F.RELEASE_OBSERVATION))
_LOSE = Go(_S.LOST, (_F.RECORD, _F.TELL_LOST))
# The claim before the fence: of two restorers only the winner may kill. The fence before the new life: never two.
_RESTORE = Go(_S.RESTORING, (_F.TAKE_CLAIM, _F.RECORD, _F.FENCE, _F.BRING_BACK))
# Back to LOST and the claim free again, but only after what was half made is gone.
_RESTORE_FAILED = Go(_S.LOST, (_F.REMOVE_CONTAINER, _F.RECORD, _F.RELEASE_CLAIM))
_DESTROY = Go(_S.DESTROYED, (_F.FENCE, _F.REMOVE_CONTAINER, _F.REMOVE_CHECKPOINTS, _F.RECORD))

_GONE = Refuse(ErrorCode.SANDBOX_UNKNOWN, "the sandbox is destroyed")
_LOST = Refuse(ErrorCode.SANDBOX_LOST, "the sandbox is lost: restore it")
_NOT_YET = Refuse(ErrorCode.REFUSED, "the sandbox is being made")
_BUSY = Refuse(ErrorCode.REFUSED, "an action is in flight")
_CAPTURING = Refuse(ErrorCode.REFUSED, "a checkpoint is being taken")
_RESTORING = Refuse(ErrorCode.CLAIM_TAKEN, "the sandbox is being restored")


def _row(**by_event: Decision) -> dict[Event, Decision]:
    return {Event(name): decision for name, decision in by_event.items()}


def _stray(why: str, *events: Event) -> dict[Event, Decision]:
    return dict.fromkeys(events, Ignore(why))


_MAKING = (_E.CREATED, _E.CREATE_FAILED)
_ACTION_END = (_E.DECLINED, _E.COMMITTED, _E.FATE_UNKNOWN)
_CAPTURE_END = (_E.CAPTURED, _E.CAPTURE_FAILED)
_RESTORE_END = (_E.PROVED, _E.RESTORE_FAILED)

TABLE: dict[State, dict[Event, Decision]] = {
    _S.CREATING: _row(
        created=Go(_S.RUNNING, (_F.RECORD, _F.SERVE)),
        create_failed=Go(_S.DESTROYED, (_F.REMOVE_CONTAINER, _F.RECORD)),
        died=Go(_S.DESTROYED, (_F.REMOVE_CONTAINER, _F.RECORD)),
        act=_NOT_YET,
        capture=_NOT_YET,
        restore=_NOT_YET,
        destroy=_NOT_YET,
    )
    | _stray("nothing of this has begun", *_ACTION_END, *_CAPTURE_END, *_RESTORE_END),
    _S.RUNNING: _row(
        act=Go(_S.ACTING, (_F.RUN,)),
        capture=Go(_S.CAPTURING, (_F.FREEZE_AND_COPY,)),
        restore=_RESTORE,
        died=_LOSE,
        destroy=_DESTROY,
        fate_unknown=_LOSE,
    )
    | _stray("an end whose beginning is over", *_MAKING, _E.DECLINED, _E.COMMITTED, *_CAPTURE_END, *_RESTORE_END),
    _S.ACTING: _row(
        declined=Go(_S.RUNNING),
        committed=_COMMIT,
        fate_unknown=_LOSE,
        died=_LOSE,
        act=_BUSY,
        capture=_BUSY,
        restore=_BUSY,
        destroy=_DESTROY,
    )
    | _stray("an end whose beginning is over", *_MAKING, *_CAPTURE_END, *_RESTORE_END),
    _S.CAPTURING: _row(
        captured=Go(_S.RUNNING, (_F.PUBLISH,)),
        capture_failed=Go(_S.RUNNING, (_F.DISCARD,)),
        died=Go(_S.LOST, (_F.DISCARD, _F.RECORD, _F.TELL_LOST)),
        act=_CAPTURING,
        capture=_CAPTURING,
        restore=_CAPTURING,
        destroy=_CAPTURING,
    )
    | _stray("an end whose beginning is over", *_MAKING, *_ACTION_END, *_RESTORE_END),
    _S.LOST: _row(
        restore=_RESTORE,
        destroy=_DESTROY,
        act=_LOST,
        capture=_LOST,
        # Its images were complete when the sandbox died: what was captured was captured alive.
        captured=Go(_S.LOST, (_F.PUBLISH,)),
        capture_failed=Ignore("the sandbox is lost anyway"),
    )
    | _stray("the sandbox is lost already", *_MAKING, *_ACTION_END, *_RESTORE_END, _E.DIED),
    _S.RESTORING: _row(
        proved=Go(_S.RUNNING, (_F.RECORD, _F.SERVE, _F.REMOVE_CONTAINER)),
        restore_failed=_RESTORE_FAILED,
        died=Ignore("the old life was fenced; the new one is judged by its proof"),
        act=_RESTORING,
        capture=_RESTORING,
        restore=_RESTORING,
        destroy=_RESTORING,
    )
    | _stray("an end whose beginning is over", *_MAKING, *_ACTION_END, *_CAPTURE_END),
    _S.DESTROYED: _row(act=_GONE, capture=_GONE, restore=_GONE, destroy=_GONE)
    | _stray("the sandbox is destroyed", *_MAKING, *_ACTION_END, *_CAPTURE_END, *_RESTORE_END, _E.DIED),
}

NEXT: dict[State, frozenset[State]] = {
    _S.CREATING: frozenset({_S.RUNNING, _S.DESTROYED}),
    _S.RUNNING: frozenset({_S.ACTING, _S.CAPTURING, _S.RESTORING, _S.LOST, _S.DESTROYED}),
    _S.ACTING: frozenset({_S.RUNNING, _S.LOST, _S.DESTROYED}),
    _S.CAPTURING: frozenset({_S.RUNNING, _S.LOST}),
    _S.LOST: frozenset({_S.LOST, _S.RESTORING, _S.DESTROYED}),
    _S.RESTORING: frozenset({_S.RUNNING, _S.LOST}),
    _S.DESTROYED: frozenset(),
}


def decide(state: State, event: Event) -> Decision:
    return TABLE[state][event]


def after_restart(
    recorded: State, *, alive: bool, agent_busy: bool, agent_last: int, boundary: int
) -> tuple[State, str]:
    """State of a re-adopted sandbox, and the reason when it is lost (promises O1, E5). ``agent_last`` is the agent's
    own count of finished actions: one more than the record means an observation that nobody was given."""
    if recorded is _S.DESTROYED:
        return _S.DESTROYED, ""
    if recorded in (_S.LOST, _S.RESTORING):
        return (
            _S.LOST,
            "a restore was under way when envkeeper ended" if recorded is _S.RESTORING else "it was lost before",
        )
    if recorded is _S.CREATING:
        return _S.DESTROYED, "envkeeper ended while it was being made"
    if not alive:
        return _S.LOST, "it died while envkeeper was down"
    if agent_busy:
        return _S.LOST, f"envkeeper ended in the middle of action {boundary + 1}"
    if agent_last != boundary:
        return _S.LOST, f"action {agent_last} ended, but its observation was given to nobody"
    return _S.RUNNING, ""
