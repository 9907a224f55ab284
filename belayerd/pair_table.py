"""One slot's decisions as a total table: (state, event, now) -> state and ordered effects. Pure.

Every (state, event) pair is decided here, "ignore" and "refuse" included, with the states that it may lead to;
tests walk the table and stop after every effect.
"""

from __future__ import annotations

from belayerd import pair_rules as r
from belayerd import policy
from belayerd.pair import (
    ActionDone,
    ActionFailed,
    ArenaGone,
    BackoffOver,
    Called,
    Event,
    Followed,
    HandoverAsked,
    Pair,
    RestoreAsked,
    RouterBack,
    Spawned,
    SpawnFailed,
    StandbyReady,
    State,
    Wanted,
    WorkerLost,
)

S = State
# (state, event) -> (rule, states it may lead to). Total: tests/tables walks every pair.
TABLE: dict[tuple[State, type[Event]], tuple[r.Rule, frozenset[State]]] = {}


def _row(state: State, event: type[Event], rule: r.Rule, *to: State) -> None:
    TABLE[state, event] = (rule, frozenset(to) if to else frozenset({state}))


_row(S.EMPTY, Wanted, r.start, S.ARMING)
_row(S.EMPTY, Spawned, r.spawned_unwanted)
_row(S.EMPTY, SpawnFailed, r.ignore)
_row(S.EMPTY, StandbyReady, r.ignore)
_row(S.EMPTY, WorkerLost, r.ignore)
_row(S.EMPTY, ActionDone, r.ignore)
_row(S.EMPTY, ActionFailed, r.ignore)
_row(S.EMPTY, HandoverAsked, r.refuse)
_row(S.EMPTY, RestoreAsked, r.start, S.ARMING)
_row(S.EMPTY, BackoffOver, r.ignore)
_row(S.EMPTY, RouterBack, r.ignore)

_row(S.ARMING, Wanted, r.again)
_row(S.ARMING, Spawned, r.spawned)
_row(S.ARMING, SpawnFailed, r.first_start_failed, S.ARMING, S.EMPTY)
_row(S.ARMING, StandbyReady, r.candidate_ready, S.HANDOVER, S.ARMING, S.RESERVE)
_row(S.ARMING, WorkerLost, r.candidate_lost, S.ARMING, S.EMPTY, S.QUARANTINED)
_row(S.ARMING, ActionDone, r.ignore)
_row(S.ARMING, ActionFailed, r.ignore)
_row(S.ARMING, HandoverAsked, r.refuse)
_row(S.ARMING, RestoreAsked, r.refuse)
_row(S.ARMING, BackoffOver, r.again)
_row(S.ARMING, RouterBack, r.ignore)

_row(S.HANDOVER, Wanted, r.retry)
_row(S.HANDOVER, Spawned, r.spawned_unwanted)
_row(S.HANDOVER, SpawnFailed, r.ignore)
_row(S.HANDOVER, StandbyReady, r.ignore)
_row(S.HANDOVER, WorkerLost, r.candidate_lost, S.HANDOVER, S.ARMING, S.EMPTY, S.QUARANTINED)
_row(S.HANDOVER, ActionDone, r.handover_done, S.HANDOVER, S.REARMING)
_row(S.HANDOVER, ActionFailed, r.action_failed, S.HANDOVER, S.ARMING, S.EMPTY, S.QUARANTINED)
_row(S.HANDOVER, HandoverAsked, r.refuse)
_row(S.HANDOVER, RestoreAsked, r.refuse)
_row(S.HANDOVER, BackoffOver, r.retry)
_row(S.HANDOVER, RouterBack, r.ignore)

for _state, _next in ((S.EXPOSED, S.EXPOSED), (S.REARMING, S.REARMING), (S.PROTECTED, S.PROTECTED)):
    _row(_state, ActionDone, r.ignore)
    _row(_state, ActionFailed, r.ignore)
    _row(_state, RouterBack, r.announce)

_row(S.EXPOSED, Wanted, r.rearm, S.REARMING)
_row(S.EXPOSED, Spawned, r.spawned_unwanted)
_row(S.EXPOSED, SpawnFailed, r.ignore)
_row(S.EXPOSED, StandbyReady, r.ignore)
_row(S.EXPOSED, WorkerLost, r.main_lost(S.FENCING), S.EXPOSED, S.FENCING, S.QUARANTINED)
_row(S.EXPOSED, HandoverAsked, r.refuse)
_row(S.EXPOSED, RestoreAsked, r.rearm, S.REARMING)
_row(S.EXPOSED, BackoffOver, r.rearm, S.REARMING)

_row(S.REARMING, Wanted, r.again)
_row(S.REARMING, Spawned, r.spawned)
_row(S.REARMING, SpawnFailed, r.rearm_failed, S.REARMING, S.EXPOSED)
_row(S.REARMING, StandbyReady, r.shadow_ready, S.PROTECTED, S.REARMING)
_row(S.REARMING, WorkerLost, r.main_lost(S.FENCING), S.REARMING, S.EXPOSED, S.FENCING, S.QUARANTINED)
_row(S.REARMING, HandoverAsked, r.refuse)
_row(S.REARMING, RestoreAsked, r.refuse)
_row(S.REARMING, BackoffOver, r.again)

_row(S.PROTECTED, Wanted, r.ignore)
_row(S.PROTECTED, Spawned, r.spawned_unwanted)
_row(S.PROTECTED, SpawnFailed, r.ignore)
_row(S.PROTECTED, StandbyReady, r.ignore)
_row(S.PROTECTED, WorkerLost, r.main_lost(S.HANDOVER), S.PROTECTED, S.REARMING, S.EXPOSED, S.HANDOVER, S.QUARANTINED)
_row(S.PROTECTED, HandoverAsked, r.asked, S.HANDOVER)
_row(S.PROTECTED, RestoreAsked, r.refuse)
_row(S.PROTECTED, BackoffOver, r.ignore)

_row(S.FENCING, Wanted, r.retry)
_row(S.FENCING, Spawned, r.spawned)
_row(S.FENCING, SpawnFailed, r.ignore)
_row(S.FENCING, StandbyReady, r.fencing_ready, S.FENCING, S.HANDOVER)
_row(S.FENCING, WorkerLost, r.fencing_lost)
_row(S.FENCING, ActionDone, r.fencing_done, S.FENCING, S.ARMING)
_row(S.FENCING, ActionFailed, r.action_failed, S.FENCING, S.QUARANTINED)
_row(S.FENCING, HandoverAsked, r.refuse)
_row(S.FENCING, RestoreAsked, r.refuse)
_row(S.FENCING, BackoffOver, r.retry)
_row(S.FENCING, RouterBack, r.ignore)

_row(S.RESERVE, Wanted, r.ignore)
_row(S.RESERVE, Spawned, r.spawned_unwanted)
_row(S.RESERVE, SpawnFailed, r.ignore)
_row(S.RESERVE, StandbyReady, r.ignore)
_row(S.RESERVE, WorkerLost, r.reserve_lost, S.RESERVE, S.ARMING, S.EMPTY)
_row(S.RESERVE, ActionDone, r.ignore)
_row(S.RESERVE, ActionFailed, r.ignore)
_row(S.RESERVE, HandoverAsked, r.refuse)
_row(S.RESERVE, RestoreAsked, r.refuse)
_row(S.RESERVE, BackoffOver, r.ignore)
_row(S.RESERVE, RouterBack, r.ignore)

_row(S.QUARANTINED, Wanted, r.still_quarantined)
_row(S.QUARANTINED, Spawned, r.spawned_unwanted)
_row(S.QUARANTINED, SpawnFailed, r.ignore)
_row(S.QUARANTINED, StandbyReady, r.ignore)
_row(S.QUARANTINED, WorkerLost, r.ignore)
_row(S.QUARANTINED, ActionDone, r.ignore)
_row(S.QUARANTINED, ActionFailed, r.ignore)
_row(S.QUARANTINED, HandoverAsked, r.refuse)
_row(S.QUARANTINED, RestoreAsked, r.restored, S.ARMING)
_row(S.QUARANTINED, BackoffOver, r.ignore)
_row(S.QUARANTINED, RouterBack, r.ignore)

for _state in S:
    _row(_state, ArenaGone, r.ignore)
    _row(_state, Called, r.ignore)
    _row(_state, Followed, r.followed)
_row(S.PROTECTED, ArenaGone, r.rearm_anew, S.REARMING)
_row(S.RESERVE, ArenaGone, r.reserve_anew, S.ARMING)
_row(S.RESERVE, Called, r.called_ready, S.HANDOVER)
_row(S.ARMING, Called, r.called_early)
_row(S.EMPTY, Called, r.called_down, S.ARMING)


def step(pair: Pair, event: Event, now: float, limits: policy.Limits) -> r.Out:
    """Decide. Raises Refuse for an operator's wish that this state cannot grant."""
    rule, may_become = TABLE[pair.state, type(event)]
    after, effects = rule(pair, event, now, limits)
    if after.state not in may_become:
        raise AssertionError(f"{pair.state} on {type(event).__name__} became {after.state}: not in the table")
    return after, effects
